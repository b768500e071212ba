"""Verbs over checkpoints of logical inference: evaluate, sweep, depths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .shared import is_routed, knobs_of, names, quieten, table, write_for_checkpoint


def evaluate(options) -> Any:
    """Accuracy by test set beside the answer # always, steps, MACs and seconds; --errors: by kind of pair too."""
    knobs = knobs_of(options)
    quieten()
    from ..evaluate import evaluate as run

    start = time.time()
    figures = run(options.checkpoint, names(options.sets), options.errors, options.both_ways, **knobs)
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        rows = [
            (
                name,
                f"{figures['pairs'][name]:,}",
                f"{figures['accuracy'][name]:.2f}",
                f"{figures['majority'][name]:.2f}",
                f"{figures['mean_steps'][name]:.2f}",
                f"{figures['macs_per_pair'][name] / 1e6:.1f}",
                f"{figures['seconds'][name]:.1f}",
            )
            for name in figures["accuracy"]
        ]
        unit = "layers" if is_routed(options.checkpoint) else "steps"
        columns = ("set", "pairs", "accuracy %", "always # %", f"{unit}/token", "MMACs/pair", "seconds")
        table(f"{options.checkpoint}: {figures['full_depth']} {unit} at most", columns, rows)
        for name, parts in figures.get("errors", {}).items():
            for key in ("relation", "operators", "depth", "negation", "negated_operands"):
                lines = [
                    (value, row["pairs"], f"{100 * row['accuracy']:.2f}", f"{100 * row['majority']:.2f}")
                    for value, row in parts[key].items()
                ]
                table(f"\nset {name} by {key}", (key, "pairs", "accuracy %", "commonest %"), lines)

    return figures, show


def sweep(options, thresholds: Sequence[float]) -> Any:
    """Accuracy, steps, MACs and seconds at each threshold."""
    quieten()
    from ..evaluate import sweep as run

    start = time.time()
    figures = run(options.checkpoint, thresholds, names(options.sets), options.generated, options.repeats)
    write_for_checkpoint(options, time.time() - start, figures)
    return figures, lambda: knob_table(figures, options.checkpoint)


def knob_table(figures: dict[str, Any], name: str) -> None:
    """Prints the rows of a sweep."""
    rows = [
        (
            f"{row['threshold']:g}",
            f"{row['steps']:.2f}",
            f"{row['steps_skipped']:.1f}",
            f"{row['macs_per_pair'] / 1e6:.1f}",
            f"{100 * row['macs_share']:.1f}",
            f"{row['seconds']:.2f}",
            f"{100 * row['seconds_share']:.1f}",
            f"{row['accuracy']:.2f}",
            "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["difference_interval"]),
        )
        for row in figures["rows"]
    ]
    columns = ("threshold", "steps/token", "steps skipped %", "MMACs/pair", "MACs %", "seconds", "time %",
               "accuracy %", "difference [95%]")  # fmt: skip
    full = figures["full_depth"]
    notes = [f"{figures['pairs']:,} pairs; shares and differences are against threshold 1 ({full} steps)."]
    table(f"{name}: the threshold knob", columns, rows, notes)


def depths(options) -> Any:
    """Steps by operator count and kind of token."""
    knobs = knobs_of(options)
    quieten()
    from ..depths import depths as run

    figures = run(options.checkpoint, names(options.sets), **knobs)

    def show() -> None:
        groupings = {
            "operators": "by_operators",
            "depth of the formula": "by_depth",
            "kind of token": "by_kind",
        }
        for title, key in groupings.items():
            rows = [
                (
                    name,
                    f"{one['tokens']:,}",
                    f"{one['mean']:.2f}",
                    f"{one['spread']:.2f}",
                    " ".join(f"{100 * share:3.0f}" for share in one["histogram"]),
                )
                for name, one in [*figures[key].items(), ("all", figures["all"])]
            ]
            histogram = f"% after step 1..{figures['full_depth']}"
            table(f"\nsteps by {title}", (title, "tokens", "mean", "spread", histogram), rows)
        slope = figures["by_depth_at_equal_length"]
        if slope is not None:
            low, high = slope["interval"]
            print(
                f"Among pairs of as many tokens, a level of the formula's depth adds {slope['steps_per_level']:+.3f}"
                f" [{low:+.3f}, {high:+.3f}] steps a token."
            )
        if figures["collapsed"]:
            print("The depths have collapsed: all tokens stop at about the same step.")

    return figures, show
