"""Calibration: the threshold that meets a target on one half of the held-out documents, judged on the other half."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import load
from .language import Corpus, Measured, corpus_of, difference, halves, measure


def _rows(corpus: Corpus, rows: np.ndarray) -> Corpus:
    return Corpus(
        {name: value[rows] for name, value in corpus.inputs.items()},
        corpus.document[rows], corpus.group[rows], corpus.groups, corpus.bytes_per_token,
    )  # fmt: skip


def calibrate(
    checkpoint: str | Path,
    max_loss_percent: float | None = None,
    max_steps_percent: float | None = None,
    limit: int | None = None,
    rounds: int = 7,
    save: bool = False,
) -> dict[str, Any]:
    """The lowest threshold whose loss stays within `max_loss_percent` of full depth's, or the highest whose token-steps
    stay within `max_steps_percent` of full depth's: found by bisection on one half, reported on the other.

    save: writes it into the checkpoint's config as halt_threshold. One of the two targets must be given.
    """
    if (max_loss_percent is None) == (max_steps_percent is None):
        raise ValueError("Give one target: --max_loss (max_loss_percent) or --max_steps (max_steps_percent).")
    loaded = load(checkpoint)
    model, config = loaded.model, loaded.model.config
    if config.policy == "fixed":
        raise ValueError(f"{loaded.folder} has a fixed depth: there is no threshold to find.")
    # problems: those of the trained depths; the tests stay unseen
    names = [] if loaded.recipe.data.text is not None else ["validation"]
    corpus = corpus_of(loaded, names, limit)
    fit, test = (_rows(corpus, rows) for rows in halves(corpus))
    if not len(fit.labels) or not len(test.labels):
        raise ValueError("The held-out part has too few documents to be cut in two; raise validation_rows.")
    full = measure(model, fit, max_steps=config.num_loops, min_steps=config.num_loops)

    def allowed(said: Measured) -> bool:
        if max_loss_percent is not None:
            return said.loss <= full.loss * (1 + max_loss_percent / 100)
        return said.mean_depth <= config.num_loops * max_steps_percent / 100

    threshold = bisect(
        lambda one: allowed(measure(model, fit, threshold=one)), max_loss_percent is not None, rounds
    )
    base = measure(model, test, max_steps=config.num_loops, min_steps=config.num_loops)
    said = measure(model, test, threshold=threshold)
    figures = {
        "threshold": round(threshold, 4),
        "target": {"max_loss_percent": max_loss_percent, "max_steps_percent": max_steps_percent},
        "loss_percent": round(100 * (said.loss / base.loss - 1), 3),
        **difference(test, said.losses, base.losses),
        "steps_percent": round(100 * said.mean_depth / config.num_loops, 2),
        "macs_percent": round(100 * said.macs / base.macs, 2),
        "met": bool(
            said.loss <= base.loss * (1 + max_loss_percent / 100)
            if max_loss_percent is not None
            else said.mean_depth <= config.num_loops * max_steps_percent / 100
        ),
        "saved": save,
    }
    if save:
        path = loaded.folder / "config.json"
        settings = json.loads(path.read_text())
        settings["halt_threshold"] = figures["threshold"]
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(settings, indent=2) + "\n")
        draft.replace(path)
    return figures


def bisect(allowed: Callable[[float], bool], lowest: bool, rounds: int) -> float:
    """The lowest (or highest) threshold in 0..1 that is allowed, `rounds` halvings exact; 1 (or 0) if none is found.

    A higher threshold stops fewer tokens, so that what is allowed lies at one end.
    """
    low, high = 0.0, 1.0
    for _ in range(rounds):
        middle = (low + high) / 2
        if allowed(middle) == lowest:
            high = middle
        else:
            low = middle
    return high if lowest else low
