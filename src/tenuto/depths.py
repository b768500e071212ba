"""Depth as data: how many steps tokens ran, by operator count and by kind of token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .data.logical_inference import VARIABLES, decode
from .data.pairs import PairDataset
from .evaluate import Loaded, full_depth, load, predict, test_sets

KINDS = {
    **dict.fromkeys(VARIABLES, "variable"), "(": "bracket", ")": "bracket", "and": "and", "or": "or",
    "not": "not", "<bos>": "<bos>", "#SEP#": "#SEP#",
}  # fmt: skip


def depths(checkpoint: str | Path, names: Sequence[str] = (), **knobs) -> dict[str, Any]:
    """Mean, spread and histogram of steps per token, by operator count and by kind of token.

    `collapsed` is true when the spread of the depths is below 0.1 steps: the policy decides nothing.
    """
    loaded = load(checkpoint)
    pairs = [one for group in test_sets(loaded.recipe, names).values() for one in group]
    said = predict(loaded, pairs, progress="depths", **knobs)
    data = PairDataset(pairs, loaded.recipe.head)
    by_operators, by_kind = defaultdict(list), defaultdict(list)
    for number, steps in enumerate(said.depths):
        by_operators[int(data.operators[number])].append(steps)
        for token, step in zip(decode(data[number]["ids"].tolist()), steps, strict=True):
            by_kind[KINDS[token]].append(step)
    everything = np.concatenate(said.depths)
    full = full_depth(loaded.model)
    return {
        "pairs": len(pairs),
        "full_depth": full,
        "all": _describe(everything, full),
        "by_operators": {
            key: _describe(np.concatenate(value), full) for key, value in sorted(by_operators.items())
        },
        "by_kind": {key: _describe(np.array(by_kind[key]), full) for key in dict.fromkeys(KINDS.values())},
        "collapsed": bool(everything.std() < 0.1),
    }


def _describe(steps: np.ndarray, full: int) -> dict[str, Any]:
    counts = np.bincount(steps, minlength=full + 1)[1:]
    return {
        "tokens": len(steps),
        "mean": round(float(steps.mean()), 3),
        "spread": round(float(steps.std()), 3),
        "histogram": (counts / counts.sum()).round(4).tolist(),
    }


def token_depths(loaded: Loaded, pairs: Sequence, **knobs) -> list[dict[str, Any]]:
    """For each pair its tokens, the steps of each, the true relation and the model's answer."""
    from .data.logical_inference import RELATIONS

    data = PairDataset(pairs, loaded.recipe.head)
    said = predict(loaded, pairs, **knobs)
    return [
        {
            "tokens": decode(data[number]["ids"].tolist()),
            "steps": said.depths[number].tolist(),
            "relation": pair.relation,
            "answer": RELATIONS[said.relations[number]] if said.relations[number] >= 0 else "?",
            "operators": pair.operators,
        }
        for number, pair in enumerate(pairs)
    ]
