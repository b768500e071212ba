"""Verbs that show: presets, report, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .shared import is_language, is_routed, is_sequences, quieten, table


def presets(options) -> Any:
    """Parameters and MACs of every preset beside the published figures."""
    quieten()
    if options.memory:
        return _memory()
    from ..presets import CAUSAL_RULE, MACS_RULE, PRESETS, costs

    figures = [costs(name) for name in PRESETS]

    def beside(ours: int, published: int | None, unit: float) -> tuple[str, str, str]:
        shown = f"{ours / unit:,.1f}" if ours >= unit else f"{ours / unit:.3f}"
        if published is None:
            return shown, "-", ""
        return shown, f"{published / unit:,.0f}", f"{100 * (ours / published - 1):+.1f}"

    def show() -> None:
        notes, rows = list(dict.fromkeys(row["note"] for row in figures if row["note"])), []
        for row in figures:
            mark = f" [{notes.index(row['note']) + 1}]" if row["note"] else ""
            parameters = beside(row["parameters"], row["parameters_published"], 1e6)
            macs = beside(row["macs"], row["macs_published"], 1e6)
            rows.append((row["name"] + mark, *parameters, *macs, f"{row['vocab']:,}", row["paper"]))
        columns = ("preset", "M params", "published", "%", "M MACs", "published", "%", "vocab", "paper")
        listed = [f"[{number}] {note}" for number, note in enumerate(notes, 1)]
        rules = [f"MACs: {MACS_RULE}.", f"MACs of looped-* and dense-*: {CAUSAL_RULE}."]
        table(
            "Presets: encoder-decoders, and causal models (looped-*, dense-*)",
            columns,
            rows,
            [*rules, *listed],
        )

    return figures, show


def _memory() -> Any:
    from ..footprint import GIB, memory_table

    figures = memory_table()

    def show() -> None:
        rows = [
            (
                row["name"],
                row["precision"],
                "yes" if row["checkpointing"] else "",
                row["batch"],
                row["batch_math"],
                f"{row['activations'] / GIB:.2f}",
                f"{row['total'] / GIB:.2f}",
            )
            for row in figures
        ]
        columns = (
            "preset",
            "precision",
            "checkpointing",
            "batch",
            "if T x T is kept",
            "activations GiB",
            "total GiB",
        )
        notes = [
            "Largest batch (a power of two) in 12 GB at length 1,024 with AdamW. Computed; no GPU was run.",
            "1 GiB is allowed for context and fragmentation.",
        ]
        table("Training memory", columns, rows, notes)

    return figures, show


def report(options) -> Any:
    """One self-contained HTML page about a checkpoint."""
    quieten()
    target = options.output or Path(options.checkpoint) / "report.html"
    if is_language(options.checkpoint) or is_sequences(options.checkpoint):
        if is_sequences(options.checkpoint):
            from ..pairs_page import measure_pairs_report as measure
            from ..pairs_page import pairs_page as page
        elif is_routed(options.checkpoint):
            from ..routed_page import measure_routed as measure
            from ..routed_page import routed_page as page
        else:
            from ..language_page import language_page as page
            from ..language_page import measure_language as measure
        figures, path = measure(options.checkpoint, options.limit), Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(figures), encoding="utf-8")
    else:
        from ..report import measure, write_report

        figures = measure(options.checkpoint, options.limit)
        path = write_report(figures, target)
    return {"report": str(path), **figures}, lambda: print(f"The report is {path}.")


def demo(options) -> Any:
    """Train a small model live, then show longer-trained ones."""
    quieten()
    from ..demo import demo as run

    return run(options.checkpoint, options.output, options.recipe, options.language)
