"""Verbs over language models whose layers take some of the tokens (mod, sdt, stt): sweep, depths, calibrate."""

from __future__ import annotations

import time
from typing import Any

from .language import group_rows
from .shared import (
    UsageError,
    depth_knobs,
    in_unit,
    names,
    numbers,
    quieten,
    refuse,
    shown,
    table,
    write_for_checkpoint,
)

WHOLE = "the loss with every token in every layer"


def sweep(options) -> Any:
    """Each capacity by each rule, beside the dense model."""
    quieten()
    from ..language_sweep import sweep_capacity

    start = time.time()
    if options.policy or options.generated:
        raise UsageError("--policy and --generated are for models that halt, not for --capacities.")
    capacities = in_unit(numbers(options.capacities), "capacity", "a share of the tokens")
    figures = sweep_capacity(
        options.checkpoint, capacities, names(options.sets), repeats=options.repeats, limit=options.limit
    )
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        rows = [
            (
                row["selection"],
                shown(row, "capacity", "g"),
                f"{row['capacity_realised']:.3f}",
                f"{row['loss']:.4f}",
                shown(row, "over_topk_percent", "+.2f"),
                f"{100 * row['macs_share']:.1f}",
                f"{100 * row['kv_share']:.1f}",
                f"{100 * row['seconds_share']:.1f}",
            )
            for row in figures["rows"]
        ]
        columns = ("rule", "capacity", "realised", "loss", "above Top-K %", "MACs %", "K/V %", "time %")
        notes = [f"{figures['tokens']:,} tokens; routed layers {figures['routed_layers']}. Top-K sees the whole text:"
                 " an upper bound, no rule to decode by."]  # fmt: skip
        table(f"{options.checkpoint}: the knob beside the dense model", columns, rows, notes)

    return figures, show


def depths(options) -> Any:
    """Share of the routed layers run, by topic, kind, frequency and position of the token."""
    knobs = depth_knobs(options)
    if options.rules or options.picture:
        raise UsageError(
            f"--{'rules' if options.rules else 'picture'} is for looped models; see `tenuto report` for a routed one."
        )
    quieten()
    from ..routed_depths import PARTS, executed_of

    start = time.time()
    figures = executed_of(options.checkpoint, options.limit, **knobs)
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        for part, title in PARTS.items():
            columns = ("", "tokens", "share of the routed layers run [95%]", "effect (d)")
            table(f"\n{title}", columns, group_rows(figures[part]), [figures["says"][part]])

    return figures, show


def calibrate(options) -> Any:
    """Sets the levels of the layers; --max_loss: finds the smallest capacity that meets it as well."""
    refuse(options, ("max_steps",))
    if options.save and options.max_loss is None:
        raise UsageError("--save goes with --max_loss: levels are written always.")
    quieten()
    from ..calibrate import calibrate_capacity, set_levels

    start, files = time.time(), names(options.files)
    if options.max_loss is None:
        figures = set_levels(options.checkpoint, files, options.limit)
    else:
        figures = calibrate_capacity(
            options.checkpoint, options.max_loss, files, options.limit, save=options.save
        )
    write_for_checkpoint(options, time.time() - start, figures)

    def show_levels() -> None:
        columns = ("layer", *(f"asked {row['capacity']:g}" for row in figures["rows"]))
        rows = [
            (layer, *(f"{row['layers'][str(layer)]:.3f}" for row in figures["rows"]))
            for layer in figures["routed_layers"]
        ]
        rows += [
            (name, *(format(row[key], form) for row in figures["rows"]))
            for name, key, form in (("all", "realised", ".3f"), ("loss (nats)", "loss", ".4f"))
        ]
        notes = [f"levels set on {figures['levels_from']} and written; judged on {figures['held_out_tokens']:,}"
                 " held-out tokens."]  # fmt: skip
        table(f"{options.checkpoint}: share of the tokens taken, by layer", columns, rows, notes)

    def show_capacity() -> None:
        if not figures["found"]:
            print(
                f"No capacity stays within {options.max_loss:g}% of {WHOLE}: at 1 it is"
                f" {figures['loss_percent']:+.2f}% on the other half of the documents. Nothing is saved."
            )
            return
        print(
            f"capacity {figures['capacity']:g}: on the other half of the documents the layers take"
            f" {100 * figures['capacity_realised']:.1f}% of the tokens, {figures['macs_percent']:.1f}% of the MACs,"
            f" {figures['kv_percent']:.1f}% of the K/V bytes, loss {figures['loss_percent']:+.2f}% against"
            f" {WHOLE} ({figures['against']})"
            f" ({'met' if figures['met'] else 'not met there'})."
            + (" Written into the checkpoint's config." if figures["saved"] else "")
        )

    return figures, show_levels if options.max_loss is None else show_capacity
