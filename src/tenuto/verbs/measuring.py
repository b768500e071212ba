"""Verbs that ask what a checkpoint is, and leave the rest to the room of its kind: evaluate, sweep, depths, calibrate.

logic.py: logical inference. sequences.py: sequences, parallel text. language.py: language models. routed.py: those of
them whose layers take some of the tokens.
"""

from __future__ import annotations

from typing import Any

from . import language, logic, routed, sequences
from .shared import UsageError, given, in_unit, is_language, is_routed, is_sequences, numbers


def evaluate(options) -> Any:
    """Accuracy or BLEU by test set beside a baseline, or a language model's loss; mean depth, MACs and seconds."""
    if is_sequences(options.checkpoint):
        return sequences.evaluate(options)
    if idle := list(given(options, "beams", "length_penalty", "outputs")):
        raise UsageError(f"--{idle[0]} goes with checkpoints trained on sequences or parallel text.")
    return language.evaluate(options) if is_language(options.checkpoint) else logic.evaluate(options)


def sweep(options) -> Any:
    """The knob: threshold or capacity -> steps skipped, MACs, wall-clock, accuracy or loss."""
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
