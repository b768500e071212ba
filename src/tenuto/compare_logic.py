"""`tenuto compare` for logical inference: what a cell is measured by, and the table of the rows.

Tests are to be read once. Every reading by this command is noted in the cell's folder before it happens.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .data.logical_inference import generate, majority_rate
from .evaluate import errors_of, full_depth, load, predict, test_sets
from .intervals import student
from .results import commit

FEWEST = 7  # operators of a generated pair: more than in training


def measure_logic(folder: Path, generated: int) -> dict[str, Any]:
    """Figures of a trained cell on validation and every test of its protocol, and on so many `generated` pairs of 7 to
    19 operators; `errors_of` the tests.
    """
    loaded = load(folder)
    sets = test_sets(loaded.recipe, ["validation", *test_sets(loaded.recipe)])
    if generated:
        sets["generated"] = generate(generated, seed=1, min_operators=FEWEST)
    quality, errors = {}, {}
    noted = {"at": datetime.now().isoformat(" ", "minutes"), "commit": commit(), "sets": [*sets]}
    draft = folder / "readings.part"
    draft.write_text(json.dumps([*readings_in(folder), noted], indent=1) + "\n")
    draft.replace(folder / "readings.json")
    for name, pairs in sets.items():
        said = predict(loaded, pairs, f"set {name}")
        quality[name] = {
            "pairs": len(pairs),
            "accuracy": round(said.accuracy(pairs), 3),
            "majority": round(100 * majority_rate(pairs), 2),
            "mean_steps": round(said.mean_steps, 3),
            "macs_per_pair": said.macs // len(pairs),
            "seconds": round(said.seconds, 2),
        }
        if name != "validation":
            errors[name] = errors_of(pairs, said)
    return {"full_depth": full_depth(loaded.model), "quality": quality, "errors": errors}


def readings_in(folder: Path) -> list[dict[str, Any]]:
    """When a cell's tests were read by this command, at which commit, and which."""
    file = folder / "readings.json"
    return json.loads(file.read_text()) if file.is_file() else []


def logic_table(against: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a row, by set: accuracy in percent over seeds (`student`), costs, and the difference from the row
    `against`, over the seeds that both have. A protocol other than "length" has a validation of its own, "validation
    A" and so on. train_cpu_seconds is the mean of the row's models, readings the most of any.
    """
    lines = []
    for name in dict.fromkeys(one["row"] for one in results):
        some = [one for one in results if one["row"] == name]
        line = {
            "row": name,
            "parameters": some[0]["parameters"],
            "full_depth": some[0]["full_depth"],
            "train_cpu_seconds": round(float(np.mean([one["train_cpu_seconds"] for one in some])), 1),
            "readings": max(len(one["readings"]) for one in some),
            "sets": {},
        }
        for protocol in dict.fromkeys(one["protocol"] for one in some):
            mine = [one for one in some if one["protocol"] == protocol]
            base = {
                one["seed"]: one["quality"]
                for one in results
                if (one["row"], one["protocol"]) == (against, protocol)
            }
            for part in mine[0]["quality"]:
                cells = [one["quality"][part] for one in mine]
                here = {
                    "seeds": len(mine),
                    "pairs": cells[0]["pairs"],
                    "majority": cells[0]["majority"],
                    "accuracy": student([one["accuracy"] for one in cells]),
                }
                for key in ("mean_steps", "macs_per_pair", "seconds"):
                    here[key] = round(float(np.mean([one[key] for one in cells])), 3)
                gaps = [
                    one["quality"][part]["accuracy"] - base[one["seed"]][part]["accuracy"]
                    for one in mine
                    if one["seed"] in base
                ]
                if name != against and gaps:
                    here["minus_against"] = {**student(gaps), "seeds": len(gaps)}
                own = part in ("validation", "generated") and protocol != "length"
                line["sets"][f"{part} {protocol}" if own else part] = here
        lines.append(line)
    return lines
