"""Verbs over checkpoints of sequences or parallel text: evaluate, sweep, translate."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from .shared import UsageError, given, is_sequences, knobs_of, names, quieten, table, write_for_checkpoint


def evaluate(options) -> Any:
    """BLEU, or exact answers, by set beside a copy of the source; steps, MACs and seconds."""
    others = "errors both_ways policy tasks thresholds capacities subjects files".split()
    if idle := [name for name in others if getattr(options, name)]:
        raise UsageError(f"--{idle[0]} has nothing to set for a checkpoint of sequences or parallel text.")
    knobs = knobs_of(options)
    quieten()
    from ..translate import evaluate_pairs

    start = time.time()
    asked = given(options, "beams", "length_penalty", "limit", "outputs")
    figures = evaluate_pairs(options.checkpoint, names(options.sets), **asked, **knobs)
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        translation = "bleu" in next(iter(figures["sets"].values()))
        quality = ("bleu", "split_bleu", "copy_bleu") if translation else ("exact", "majority", "copy")
        rows = [
            (
                name,
                f"{row['examples']:,}",
                *(f"{row[one]:.2f}" for one in quality),
                f"{row['encoder_depth']:.2f}",
                f"{row['decoder_depth']:.2f}",
                f"{row['macs_per_token'] / 1e6:.3f}",
                f"{row['seconds']:.1f}",
            )
            for name, row in figures["sets"].items()
        ]
        titles = ("BLEU", "split BLEU", "copy") if translation else ("exact %", "majority %", "copy %")
        columns = ("set", "examples", *titles, "steps/source token", "steps/target token", "MMACs/token",
                   "seconds")  # fmt: skip
        notes = [f"beams {figures['beams']}, length penalty {figures['length_penalty']:g}"]
        if translation:
            first = next(iter(figures["sets"].values()))
            notes += [first["signature"], first["split_signature"]]
        table(f"{options.checkpoint}: {figures['full_depth']} steps at most", columns, rows, notes)
        for name, row in figures["sets"].items():
            if len(row.get("by_kind", ())) > 1:
                kinds = row["by_kind"].items()
                lines = [(kind, one["examples"], f"{one['exact']:.2f}") for kind, one in kinds]
                table(f"\nset {name}", ("kind", "examples", "exact %"), lines)

    return figures, show


def sweep(options, thresholds: Sequence[float]) -> Any:
    """BLEU or exact answers, steps of both sides, MACs and seconds at each threshold."""
    if idle := [name for name in ("capacities", "policy", "generated") if getattr(options, name)]:
        raise UsageError(f"--{idle[0]} has nothing to set for a checkpoint of sequences or parallel text.")
    quieten()
    from ..sweep_pairs import sweep_pairs

    start = time.time()
    asked = given(options, "beams", "length_penalty", "limit")
    figures = sweep_pairs(
        options.checkpoint, thresholds, names(options.sets), repeats=options.repeats, **asked
    )
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        full = figures["full_depth"]
        for name, part in figures["sets"].items():
            rows = [
                (
                    f"{row['threshold']:g}",
                    f"{row[part['measure']]:.2f}",
                    "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["difference_interval"]),
                    f"{row['changed']:.1f}",
                    f"{row['encoder_skipped']:.1f}",
                    f"{row['decoder_skipped']:.1f}",
                    f"{row['skipped']:.1f}",
                    f"{100 * row['macs_share']:.1f}",
                    f"{100 * row['macs_per_token_share']:.1f}",
                    f"{100 * row['seconds_share']:.1f}",
                )
                for row in part["rows"]
            ]
            measure = "BLEU" if part["measure"] == "bleu" else "exact %"
            columns = ("threshold", measure, "difference [95%]", "answers changed %", "encoder skips %",
                       "decoder skips %", "skips %", "MACs %", "MACs/token %", "time %")  # fmt: skip
            notes = [
                f"{part['examples']:,} examples, beams {figures['beams']}; shares and differences are against"
                f" threshold 1 ({full['encoder']} and {full['decoder']} steps)."
            ]
            table(f"{options.checkpoint}, {name}: the threshold knob", columns, rows, notes)

    return figures, show


def translate(options) -> Any:
    """Answer or translate the lines of standard input with a checkpoint of sequences or parallel text."""
    if not is_sequences(options.checkpoint):
        raise ValueError(
            f"{options.checkpoint} was not trained on sequences or parallel text; translate needs such a checkpoint."
        )
    knobs = knobs_of(options)
    lines = [line.strip() for line in sys.stdin.read().split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines
    quieten()
    from ..evaluate import load
    from ..translate import write

    asked = given(options, "beams", "length_penalty", "max_length")
    said = write(load(options.checkpoint), lines, progress="translating", **asked, **knobs)
    figures = {"lines": said.texts, **(said.costs() if lines else {})}
    return figures, lambda: print("".join(f"{text}\n" for text in said.texts), end="")
