"""Verbs over plans, each a YAML file of models to be trained and measured alike: matrix, compare, isoflops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .shared import quieten, shown, table, write


def matrix(options) -> Any:
    """Bodies x policies x seeds of looped language models; goes on where it was stopped."""
    quieten()
    from ..matrix import run_matrix

    figures = _run(run_matrix, options.matrix, options)

    def show() -> None:
        rows = [
            (
                f"{row['body']} {row['policy']}" + (" (equal MACs)" if row["budget"] == "macs" else ""),
                row["seeds"],
                row["loops"],
                _loss(row),
                f"{row['mean_depth']:.2f}",
                f"{row['macs_per_token'] / 1e6:.3f}",
                f"{row['tokens_per_second']:,}",
                shown(row, "saved_over_fixed", "+.4f"),
                f"{row['collapsed']} of {row['seeds']}",
            )
            for row in figures["rows"]
        ]
        columns = ("cell", "seeds", "loops", "loss", "loops/token", "MMACs/token", "tokens/s", "better than fixed",
                   "collapsed")  # fmt: skip
        notes = [
            f"{figures['done']} of {figures['cells']} cells; table.json and picture.svg are in {options.output}."
        ]
        table(options.matrix, columns, rows, notes)

    return figures, show


def compare(options) -> Any:
    """Models that differ in a few fields, trained alike over seeds: loss, causal rule against Top-K, MACs, K/V."""
    quieten()
    from ..compare import run_comparison

    figures = _run(run_comparison, options.plan, options)

    def show() -> None:
        rows = [
            (
                row["row"],
                row["seeds"],
                f"{row['parameters']:,}",
                _loss(row),
                shown(row, "minus_against", "+.4f"),
                shown(row, "over_topk_percent", "+.2f"),
                shown(row, "realised", ".3f"),
                f"{row['macs_per_token'] / 1e6:.3f}",
                "" if "kv_share" not in row else f"{100 * row['kv_share']:.1f}",
                f"{row['train_cpu_seconds']:.0f}",
            )
            for row in figures["rows"]
        ]
        columns = ("model", "seeds", "parameters", "loss", f"minus {figures['against']}", "above Top-K %", "realised",
                   "MMACs/token", "K/V %", "training CPU s")  # fmt: skip
        table(options.plan, columns, rows, [_done(figures, options)])

    return figures, show


def isoflops(options) -> Any:
    """A looped model beside dense models of the same parameters and of the same arithmetic; the exponent of loops."""
    quieten()
    from ..isoflops import run_isoflops

    figures = _run(run_isoflops, options.plan, options)

    def show() -> None:
        rows = [
            (
                row["member"],
                row["seeds"],
                f"{row['parameters']:,}",
                _loss(row),
                shown(row, "minus_looped", "+.4f"),
                f"{row['macs_per_token'] / 1e6:.3f}",
                f"{row['train_cpu_seconds']:.0f}",
            )
            for row in figures["members"]
        ]
        columns = ("model", "seeds", "parameters", "loss", "minus looped", "MMACs/token", "training CPU s")
        notes = [_done(figures, options)]
        if figures["exponent"]:
            worth = "a layer looped r times is worth r^phi layers, phi = {phi} {interval}"
            notes.insert(0, worth.format(**figures["exponent"]))
        table(options.plan, columns, rows, notes)

    return figures, show


def _run(run: Callable[..., dict[str, Any]], plan: str, options) -> dict[str, Any]:
    """Trains what is missing of a plan, or of --only; the figures, in a result file too where one is asked for."""
    from ..progress import TrainingProgress

    start = time.time()
    figures = run(plan, options.output, options.only, TrainingProgress)
    if options.result:
        write(options, plan, None, time.time() - start, figures)
    return figures


def _loss(row: dict[str, Any]) -> str:
    return f"{row['loss']:.4f}" + ("" if row["loss_spread"] is None else f" ±{row['loss_spread']:.4f}")


def _done(figures: dict[str, Any], options) -> str:
    return f"{figures['done']} of {figures['cells']} models; table.json is in {options.output}."
