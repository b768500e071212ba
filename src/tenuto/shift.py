"""The shift of an SDT or STT in training: whether surprise by novelty gives way to surprise by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def shift(history: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """`shift_of` each layer and of the mean over layers; None where no surprise, or too little of it, was logged."""
    layers = {name: signs for name, signs in series(history).items() if {"s_ce", "s_cu"} <= set(signs)}
    found = {}
    for name, signs in layers.items():
        (steps, s_ce), (_, s_cu) = (zip(*signs[key], strict=True) for key in ("s_ce", "s_cu"))
        found[name] = shift_of(steps, s_ce, s_cu)
    found = {name: one for name, one in found.items() if one is not None}
    if not found:
        return None
    means = [
        np.mean([[value for _, value in layers[name][key]] for name in found], 0) for key in ("s_ce", "s_cu")
    ]
    steps = [step for step, _ in layers[next(iter(found))]["s_ce"]]
    return {"overall": shift_of(steps, *means), "layers": found}


def shift_of(steps: Sequence[int], s_ce: Sequence[float], s_cu: Sequence[float]) -> dict[str, Any] | None:
    """Whether novelty gives way to prediction: S_CU above S_CE in the first tenth of the training, below in the last.

    first, last: the means of both and of S_CU - S_CE there, with its standard error: the spread between neighbouring
    logs, which holds for logs that scatter independently. shift: both differences exceed two standard errors.
    crossover: the step from which on the running mean over a tenth of the logs stays below zero; None without a shift.
    None with fewer than five logs.
    """
    if len(steps) < 5:
        return None
    steps, s_ce, s_cu = (np.asarray(one, float) for one in (steps, s_ce, s_cu))
    gap = s_cu - s_ce
    noise = np.diff(gap).std() / np.sqrt(2)
    parts = {"first": steps <= steps[-1] / 10, "last": steps > steps[-1] * 0.9}
    # sparse logs have none in the first tenth
    parts["first"][0] = True
    figures: dict[str, Any] = {
        name: {
            "s_ce": round(float(s_ce[here].mean()), 5),
            "s_cu": round(float(s_cu[here].mean()), 5),
            "difference": round(float(gap[here].mean()), 5),
            "error": round(float(noise / np.sqrt(here.sum())), 5),
        }
        for name, here in parts.items()
    }
    first, last = (gap[here].mean() / max(noise / np.sqrt(here.sum()), 1e-12) for here in parts.values())
    figures["above_first"], figures["below_last"] = bool(first > 2), bool(last < -2)
    figures["shift"] = figures["above_first"] and figures["below_last"]
    figures["crossover"] = None
    if figures["shift"]:
        width = max(1, int(parts["first"].sum()))
        smooth = np.convolve(gap, np.ones(width) / width, "valid")
        above = np.flatnonzero(smooth >= 0)
        figures["crossover"] = int(steps[min(above[-1] + width, len(steps) - 1)]) if len(above) else None
    return figures


def series(history: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The signs logged in training: layer -> sign -> [(step, value)]; layers in order."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in history:
        for key, value in row.items():
            if key.startswith("layer/"):
                layer, _, sign = key.removeprefix("layer/").rpartition(".")
                found.setdefault(layer, {}).setdefault(sign, []).append((row["step"], value))
    return dict(sorted(found.items(), key=lambda one: (len(one[0]), one[0])))
