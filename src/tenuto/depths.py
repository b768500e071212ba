"""Depth as data: how many steps tokens ran, by operator count, by the formulas' depth and by kind of token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .data.logical_inference import VARIABLES, decode
from .data.logical_inference import depth as formula_depth
from .data.pairs import PairDataset
from .evaluate import full_depth, load, predict, test_sets

KINDS = {
    **dict.fromkeys(VARIABLES, "variable"), "(": "bracket", ")": "bracket", "and": "and", "or": "or",
    "not": "not", "<bos>": "<bos>", "#SEP#": "#SEP#",
}  # fmt: skip


def depths(checkpoint: str | Path, names: Sequence[str] = (), **knobs) -> dict[str, Any]:
    """Mean, spread and histogram of steps per source token, by operator count, by the deeper formula's depth and by
    kind of token; "by_depth_at_equal_length": how the mean steps of a pair's tokens grow with the depth of its deeper
    formula among pairs of as many tokens (`slope_within`).

    `collapsed` is true when the spread of the depths is below 0.1 steps: the policy decides nothing.
    """
    loaded = load(checkpoint)
    pairs = [one for group in test_sets(loaded.recipe, names).values() for one in group]
    said = predict(loaded, pairs, progress="depths", **knobs)
    data = PairDataset(pairs, loaded.recipe.head)
    deepest = np.array([max(formula_depth(one.left), formula_depth(one.right)) for one in pairs])
    by_operators, by_depth, by_kind = defaultdict(list), defaultdict(list), defaultdict(list)
    for number, steps in enumerate(said.depths):
        by_operators[int(data.operators[number])].append(steps)
        by_depth[deepest[number]].append(steps)
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
        "by_depth": {
            int(key): describe(np.concatenate(value), full) for key, value in sorted(by_depth.items())
        },
        "by_depth_at_equal_length": slope_within(
            deepest, np.array([steps.mean() for steps in said.depths]), np.array(data.lengths)
        ),
        "by_kind": {
            kind: describe(np.array(by_kind[kind]), full)
            for kind in dict.fromkeys(KINDS.values())
            if by_kind[kind]
        },
        "collapsed": bool(everything.std() < 0.1),
    }


def slope_within(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> dict[str, Any] | None:
    """By how much y grows with x among those of the same group: the slope of y on x, both less their group's mean, and
    its 95% interval (the bootstrap over whole groups, since what is left of a group adds to 0); None where x never
    differs within a group.
    """
    _, group = np.unique(groups, return_inverse=True)
    counts = np.bincount(group)

    def centred(values: np.ndarray) -> np.ndarray:
        return values - (np.bincount(group, values) / counts)[group]

    x, y = centred(x.astype(float)), centred(y.astype(float))
    squares, products = np.bincount(group, x**2), np.bincount(group, x * y)
    told = squares > 1e-9  # the other groups say nothing of it
    if not told.any():
        return None
    squares, products = squares[told], products[told]
    drawn = np.random.default_rng(0).integers(len(squares), size=(1000, len(squares)))
    slopes = products[drawn].sum(1) / squares[drawn].sum(1)
    return {
        "steps_per_level": round(float(products.sum() / squares.sum()), 4),
        "interval": np.percentile(slopes, [2.5, 97.5]).round(4).tolist(),
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
