"""`tenuto compare` for models of sequences and parallel text: what a cell is measured by, and the table of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import Loaded, load
from .intervals import student
from .recipe import load_recipe
from .translate import evaluate_pairs, loss_of, paired_bootstrap_of_runs, paired_exact, test_pairs

COSTS = ("loss", "macs_per_token", "tokens_per_second", "encoder_depth", "decoder_depth")


def measure_pairs(
    folder: Path, sets: list[str], beams: int, length_penalty: float, limit: int | None = None
) -> dict[str, Any]:
    """Figures of a trained cell by set (validation and all tests when none is named): what `evaluate_pairs` gives, the
    loss, and tokens read and written per second of the search. limit: the first so many of a set. What was said is kept
    in the folder `said`.
    """
    loaded = load(folder)
    names = sets or ["validation", *_tests(loaded)]
    figures = evaluate_pairs(folder, names, beams, length_penalty, limit, outputs=folder / "said")
    pairs = test_pairs(loaded, names)
    for name, row in figures["sets"].items():
        row["loss"] = round(loss_of(loaded, pairs[name][:limit]), 4)
    return {"full_depth": figures["full_depth"], "quality": figures["sets"]}


def _tests(loaded: Loaded) -> list[str]:
    try:
        return list(test_pairs(loaded))
    except ValueError:
        # parallel text without a test set
        return []


def pairs_table(
    against: str, results: list[dict[str, Any]], folders: dict[tuple[str, int], Path]
) -> list[dict[str, Any]]:
    """One line a row, by set: BLEU or exact match with its interval over seeds, costs, and the difference from the
    row `against`. folders: of the cells, by row and seed.

    A difference is taken seed by seed: of several seeds its 95% interval is Student's over them ("seeds"), beside the
    paired bootstrap's over the examples with all these seeds' answers (`examples_interval`); of one seed it is the
    latter ("examples"), which says nothing about other seeds. pooled: BLEU of
    all tests together, and the bootstrap over their sentences with the answers of all seeds; where there are several.
    """
    lines = []
    for name in dict.fromkeys(one["row"] for one in results):
        some = [one for one in results if one["row"] == name]
        line = {
            "row": name,
            "seeds": len(some),
            "parameters": some[0]["parameters"],
            "train_cpu_seconds": round(float(np.mean([one["train_cpu_seconds"] for one in some])), 1),
            "full_depth": some[0]["full_depth"],
            "sets": {},
        }
        for part in some[0]["quality"]:
            rows = [one["quality"][part] for one in some]
            measure = "bleu" if "bleu" in rows[0] else "exact"
            here = {"examples": rows[0]["examples"], measure: student([row[measure] for row in rows])}
            for key in COSTS:
                here[key] = round(float(np.mean([row[key] for row in rows])), 4)
            for key in ("majority", "copy", "copy_bleu", "unanswerable"):
                if key in rows[0]:
                    here[key] = rows[0][key]
            if name != against:
                here["minus_against"] = _difference(part, some, against, results, folders)
            line["sets"][part] = here
        tests = [part for part, here in line["sets"].items() if part != "validation" and "bleu" in here]
        if name != against and len(tests) > 1:
            line["pooled"] = _over_examples(tests, some, against, results, folders)
        lines.append(line)
    return lines


def _difference(
    part: str, some: list[dict], against: str, results: list[dict], folders: dict[tuple, Path]
) -> dict[str, Any] | None:
    """The mean difference over the seeds that both rows have; None where they share none."""
    base = {one["seed"]: one["quality"][part] for one in results if one["row"] == against}
    shared = [one for one in some if one["seed"] in base]
    if len(shared) < 2:
        found = _over_examples([part], some, against, results, folders)
        return found and {**{key: found[key] for key in ("difference", "interval", "p")}, "over": "examples"}
    measure = "bleu" if "bleu" in shared[0]["quality"][part] else "exact"
    found = student([one["quality"][part][measure] - base[one["seed"]][measure] for one in shared])
    examples = _over_examples([part], some, against, results, folders)
    return {
        "difference": found["mean"],
        "interval": found["interval"],
        "over": "seeds",
        "examples_interval": examples["interval"],
    }


def _over_examples(
    parts: list[str], some: list[dict], against: str, results: list[dict], folders: dict[tuple, Path]
) -> dict[str, Any] | None:
    """The paired bootstrap over the examples of the parts, one after another, with the answers of all seeds that both
    rows have; None where they share none. sets: those parts.
    """
    seeds = {one["seed"] for one in results if one["row"] == against}
    shared = [(one["row"], one["seed"]) for one in some if one["seed"] in seeds]
    if not shared:
        return None
    ours = [_joined(folders[cell], parts) for cell in shared]
    theirs = [_joined(folders[against, seed], parts) for _, seed in shared]
    targets = []
    for part in parts:
        pairs = _references(folders[shared[0]], part)
        targets += [pair[1] for pair in pairs[: len(said_in(folders[shared[0]], part))]]
    if "bleu" in some[0]["quality"][parts[0]]:
        return {"sets": parts, **paired_bootstrap_of_runs(theirs, ours, targets)}
    # an unfinished answer is a word longer than its target and does not equal it
    right = (
        [[one == target for one, target in zip(said, targets, strict=True)] for said in row]
        for row in (theirs, ours)
    )
    return {"sets": parts, **paired_exact(*map(np.array, right))}


def _joined(folder: Path, parts: list[str]) -> list[str]:
    return [line for part in parts for line in said_in(folder, part)]


def _references(folder: Path, part: str) -> list[tuple]:
    return test_pairs(Loaded(None, load_recipe(folder / "recipe.yaml"), folder), [part])[part]


def said_in(folder: Path, part: str) -> list[str]:
    """The answers of a measured cell to a set, in its order."""
    return (folder / "said" / f"{part}.txt").read_bytes().decode().split("\n")[:-1]
