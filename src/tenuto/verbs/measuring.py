"""Verbs that ask what a checkpoint is, and leave the rest to the room of its kind: evaluate, sweep, depths, calibrate;
experts, which is of any kind.

logic.py: logical inference. sequences.py: sequences, parallel text. language.py: language models. routed.py: those of
them whose layers take some of the tokens.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from . import language, logic, routed, sequences
from .shared import (
    UsageError,
    in_unit,
    is_language,
    is_routed,
    is_sequences,
    names,
    numbers,
    quieten,
    table,
    write_for_checkpoint,
)


def evaluate(options) -> Any:
    """Accuracy or BLEU by test set beside a baseline, or a language model's loss; mean depth, MACs and seconds."""
    if is_sequences(options.checkpoint):
        return sequences.evaluate(options)
    _not_of_sequences(options)
    if is_language(options.checkpoint):
        _idle(options, "errors both_ways", "checkpoints of logical inference")
        return language.evaluate(options)
    _idle(options, "policy tasks thresholds capacities subjects files limit", "language models")
    return logic.evaluate(options)


def sweep(options) -> Any:
    """The knob: threshold or capacity -> steps skipped, MACs, wall-clock, accuracy, BLEU or loss."""
    if is_sequences(options.checkpoint):
        return sequences.sweep(options, in_unit(numbers(options.thresholds)))
    _not_of_sequences(options)
    if options.capacities:
        return routed.sweep(options)
    thresholds = in_unit(numbers(options.thresholds))
    kind = language if is_language(options.checkpoint) else logic
    return kind.sweep(options, thresholds)


def depths(options) -> Any:
    """Steps per token by operator count and kind of token; of a language model, by topic, kind, frequency, position."""
    if not is_language(options.checkpoint):
        return logic.depths(options)
    return routed.depths(options) if is_routed(options.checkpoint) else language.depths(options)


def calibrate(options) -> Any:
    """Find the knob that meets a target on held-out text; of a routed model, set the levels of its layers first."""
    if not is_language(options.checkpoint):
        raise ValueError(
            f"{options.checkpoint} is not a language model of `tenuto train`; calibrate needs one."
        )
    return routed.calibrate(options) if is_routed(options.checkpoint) else language.calibrate(options)


def experts(options) -> Any:
    """Which expert serves which token; of encoder-decoders, by side and kind of attention."""
    quieten()
    from ..expert_picture import picture, spoken
    from ..expert_usage import expert_usage

    start = time.time()
    figures = expert_usage(options.checkpoint, names(options.sets), options.limit)
    write_for_checkpoint(options, time.time() - start, figures)
    if options.picture:
        picture(figures, Path(options.picture))

    def show() -> None:
        for name, router in figures["routers"].items():
            rows = [
                (
                    number,
                    f"{100 * router['usage'][number]:.1f}",
                    "  ".join(f"{one['token']} {one['pmi']:+.2f}" for one in tokens),
                )
                for number, tokens in router["specific"].items()
            ]
            title = f"\n{spoken(name)}: entropy {router['entropy']:.3f} of 1"
            dead, faint = (", ".join(map(str, router[key])) or "none" for key in ("dead", "faint"))
            notes = [
                f"never used: {dead}; below a tenth of an even share: {faint}; the largest is"
                f" {router['largest']:.2f} times an even one; a token says {router['information']:.3f} nats"
            ]
            table(title, ("expert", "usage %", "most specific tokens (PMI, nats)"), rows, notes)
            if is_sequences(options.checkpoint):
                continue  # a vocabulary of thousands is for --json
            lines = [
                (token, *(f"{100 * n / max(1, sum(row)):.0f}" for n in row))
                for token, row in router["counts"].items()
            ]
            table("% of a token's assignments", ("token", *map(str, range(len(rows)))), lines)

    return figures, show


def _not_of_sequences(options) -> None:
    _idle(options, "beams length_penalty outputs", "checkpoints trained on sequences or parallel text")


def _idle(options, flags: str, others: str) -> None:
    """Refuses flags that only other checkpoints have a use for."""
    if idle := [name for name in flags.split() if getattr(options, name, None) not in (None, False)]:
        raise UsageError(f"--{idle[0]} goes with {others}.")
