"""`tenuto compare` for problems with a known need of depth: each model read at every depth and threshold, set by set;
halting models held to what all fixed depths of the plan reach at the same MACs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import load
from .intervals import student
from .language import corpus_of, measure
from .language_sweep import at_depth, frontier

TOLERANCE = 0.5  # points of accuracy on the validation problems that a threshold may cost


def measure_problems(folder: Path, sets: Sequence[str], thresholds: Sequence[float]) -> dict[str, Any]:
    """By set: accuracy in percent, loss, loops and MACs per token at every fixed depth 1..L ("fixed") and, of a halting
    model, at the thresholds ("rows"). The validation problems are always among the sets: thresholds are chosen there.
    """
    loaded = load(folder)
    model, config = loaded.model, loaded.model.config
    settings: list[tuple[dict[str, float], dict[str, Any]]] = [
        ({"max_steps": depth}, at_depth(config, depth)) for depth in range(1, config.num_loops + 1)
    ]
    if config.policy != "fixed":
        settings += [({"threshold": one}, {"threshold": one}) for one in thresholds]
    quality: dict[str, Any] = {}
    for name in dict.fromkeys(("validation", *sets)):
        corpus = corpus_of(loaded, [name])
        rows = []
        for label, knobs in settings:
            said = measure(model, corpus, f"{name}, {label}", **knobs)
            rows.append(
                {
                    **label,
                    "accuracy": round(100 * float(said.right[~np.isnan(said.losses)].mean()), 2),
                    "loss": round(said.loss, 4),
                    "mean_depth": round(said.mean_depth, 3),
                    "macs_per_token": round(said.macs / int((said.depths > 0).sum())),
                }
            )
        quality[name] = {"fixed": rows[: config.num_loops], "rows": rows[config.num_loops :]}
    return quality


def problems_lines(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By row and set, as `reading` reads each seed's model: accuracy with its interval, MACs, loops; of halting
    models, `over_fixed`: points of accuracy above what fixed depths reach with the same MACs.

    Fixed depths are those of every model of the plan, halting ones included, means over their seeds; between two, the
    straight line (`frontier`). The interval is of the halting model's seeds: that of the yardstick is not in it.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        rows.setdefault(one["row"], []).append(one)
    lines: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for part in results[0]["quality"]:
        points = [
            (
                np.mean([one["quality"][part]["fixed"][depth]["macs_per_token"] for one in some]),
                100 - np.mean([one["quality"][part]["fixed"][depth]["accuracy"] for one in some]),
            )
            for some in rows.values()
            for depth in range(len(some[0]["quality"][part]["fixed"]))
        ]
        costs, errors = frontier(points)
        for name, some in rows.items():
            read = [reading(one["quality"], part) for one in some]
            accuracy = [one["accuracy"] for one in read]
            line = {
                "accuracy": student(accuracy),
                "mean_depth": round(float(np.mean([one["mean_depth"] for one in read])), 3),
                "macs_per_token": round(float(np.mean([one["macs_per_token"] for one in read]))),
            }
            if "threshold" in read[0]:
                best = [100 - float(np.interp(one["macs_per_token"], costs, errors)) for one in read]
                line["thresholds"] = [one["threshold"] for one in read]
                line["over_fixed"] = student(np.array(accuracy) - best)
            else:
                line["max_steps"] = [one["max_steps"] for one in read]
            lines[name][part] = line
    return lines


def reading(quality: dict[str, Any], part: str) -> dict[str, Any]:
    """How a model is read on a set: one of fixed depth at all its loops, a halting one at the cheapest threshold whose
    accuracy on the validation problems is within `TOLERANCE` points of the best.
    """
    seen = quality["validation"]["rows"]
    if not seen:
        return quality[part]["fixed"][-1]
    enough = max(row["accuracy"] for row in seen) - TOLERANCE
    allowed = [place for place, row in enumerate(seen) if row["accuracy"] >= enough]
    place = min(allowed, key=lambda place: seen[place]["macs_per_token"])
    return quality[part]["rows"][place]
