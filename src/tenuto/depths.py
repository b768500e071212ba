"""Depth as data: how many steps tokens ran, by operator count and by kind of token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .data.logical_inference import VARIABLES, decode
from .data.pairs import PairDataset
from .evaluate import full_depth, load, predict, test_sets

KINDS = {
    **dict.fromkeys(VARIABLES, "variable"), "(": "bracket", ")": "bracket", "and": "and", "or": "or",
    "not": "not", "<bos>": "<bos>", "#SEP#": "#SEP#",
}  # fmt: skip


def depths(checkpoint: str | Path, names: Sequence[str] = (), **knobs) -> dict[str, Any]:
    """Mean, spread and histogram of steps per source token, by operator count and by kind of token.

    `collapsed` is true when the spread of the depths is below 0.1 steps: the policy decides nothing.
    """
    loaded = load(checkpoint)
    pairs = [one for group in test_sets(loaded.recipe, names).values() for one in group]
    said = predict(loaded, pairs, progress="depths", **knobs)
    data = PairDataset(pairs, loaded.recipe.head)
    by_operators, by_kind = defaultdict(list), defaultdict(list)
    for number, steps in enumerate(said.depths):
        by_operators[int(data.operators[number])].append(steps)
        for token, step in zip(decode(data[number]["ids"]), steps, strict=True):
            by_kind[KINDS[token]].append(step)
    everything = np.concatenate(said.depths)
    full = max(full_depth(loaded.model), int(everything.max()))  # max_steps may go beyond the config
    return {
        "pairs": len(pairs),
        "full_depth": full,
        "all": describe(everything, full),
        "by_operators": {
            key: describe(np.concatenate(value), full) for key, value in sorted(by_operators.items())
        },
        "by_kind": {
            kind: describe(np.array(by_kind[kind]), full)
            for kind in dict.fromkeys(KINDS.values())
            if by_kind[kind]
        },
        "collapsed": bool(everything.std() < 0.1),
    }


def describe(steps: np.ndarray, full: int) -> dict[str, Any]:
    """Number of tokens, mean and spread of their steps, and the shares that stopped after 1..full steps."""
    counts = np.bincount(steps, minlength=full + 1)[1:]
    return {
        "tokens": len(steps),
        "mean": round(float(steps.mean()), 3),
        "spread": round(float(steps.std()), 3),
        "histogram": (counts / counts.sum()).round(4).tolist(),
    }
