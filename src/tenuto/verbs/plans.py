"""Verbs over plans, each a YAML file of models to be trained and measured alike: matrix, compare, isoflops."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
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
                f"{row['tokens_per_cpu_second']:,}",
                shown(row, "saved_over_fixed", "+.4f"),
                f"{row['collapsed']} of {row['seeds']}",
            )
            for row in figures["rows"]
        ]
        columns = ("cell", "seeds", "loops", "loss", "loops/token", "MMACs/token", "tokens/CPU s", "better than fixed",
                   "collapsed")  # fmt: skip
        notes = [
            f"{figures['done']} of {figures['cells']} cells; table.json and picture.svg are in {options.output}."
        ]
        table(options.matrix, columns, rows, notes)

    return figures, show


def compare(options) -> Any:
    """Models that differ in a few fields, trained alike over seeds: loss, BLEU, accuracy, MACs, causal rule."""
    quieten()
    from ..compare import run_comparison

    figures = _run(partial(run_comparison, overrides=options.overrides), options.plan, options)

    def show() -> None:
        if figures["rows"] and "sets" in figures["rows"][0]:
            if "readings" in figures["rows"][0]:
                return _show_logic(figures, options)
            return _show_pairs(figures, options)
        if figures["rows"] and "problems" in figures["rows"][0]:
            return _show_problems(figures, options)
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


def _show_problems(figures: dict[str, Any], options) -> None:
    """The rows of problems with a known need of depth, a table a set."""
    for name in figures["rows"][0]["problems"]:
        rows = []
        for row in figures["rows"]:
            part = row["problems"][name]
            rows.append(
                (
                    row["row"],
                    row["seeds"],
                    f"{row['parameters']:,}",
                    _ranged(part["accuracy"], ".2f"),
                    f"{part['mean_depth']:.2f}",
                    f"{part['macs_per_token'] / 1e6:.3f}",
                    _ranged(part["over_fixed"], "+.2f") if "over_fixed" in part else "",
                    f"{row['train_cpu_seconds']:.0f}",
                )
            )
        columns = ("model", "seeds", "parameters", "accuracy %", "loops/token", "MMACs/token",
                   "above fixed depths, points", "training CPU s")  # fmt: skip
        table(f"{options.plan}: {name}", columns, rows, [_done(figures, options)])


def _ranged(value: dict[str, Any], form: str) -> str:
    """A mean, with its interval where there is one."""
    ends = value["interval"]
    return f"{value['mean']:{form}}" + ("" if ends is None else f" [{ends[0]:{form}}, {ends[1]:{form}}]")


def _show_logic(figures: dict[str, Any], options) -> None:
    """The rows of logical inference: accuracy by set, what it cost, and how it differs from that of `against`."""
    # those of the systematic splits' own validation are in the file
    names = [*dict.fromkeys(name for row in figures["rows"] for name in row["sets"] if " " not in name)]
    common = [name for name in names if all(name in row["sets"] for row in figures["rows"])]
    costs = common[-1] if common else names[-1]
    rows, always, gaps = [], {}, []
    for row in figures["rows"]:
        sets, cells = row["sets"], []
        for name in names:
            part = sets.get(name)
            if part is None:
                cells.append("")
                continue
            always[name], accuracy = part["majority"], part["accuracy"]
            spread = "" if accuracy["spread"] is None else f" ±{accuracy['spread']:.1f}"
            cells.append(f"{accuracy['mean']:.1f}{spread}")
        cost = sets.get(costs)
        if any("minus_against" in part for part in sets.values()):
            gaps.append((row["row"], *(_gap(sets.get(name)) for name in names)))
        rows.append(
            (
                row["row"],
                "/".join(str(count) for count in dict.fromkeys(part["seeds"] for part in sets.values())),
                f"{row['parameters']:,}",
                *cells,
                "" if cost is None else f"{cost['macs_per_pair'] / 1e6:.1f}",
                "" if cost is None else f"{cost['mean_steps']:.2f} of {row['full_depth']}",
                "" if cost is None else f"{cost['seconds']:.1f}",
                f"{row['train_cpu_seconds']:.0f}",
            )
        )
    rows.append(("always #", "", "", *(f"{always[name]:.1f}" for name in names), "", "", "", ""))
    columns = ("model", "seeds", "parameters", *names, "MMACs/pair", "steps", "seconds", "training CPU s")
    table(
        options.plan, columns, rows, [f"Accuracy in percent. MACs, steps and seconds are those of {costs}."]
    )
    if gaps:
        title = f"\nminus {figures['against']}, points, over the seeds that both have [95%]"
        table(title, ("model", *names), gaps)
    print(_done(figures, options))


def _gap(part: dict[str, Any] | None) -> str:
    return "" if part is None or "minus_against" not in part else _ranged(part["minus_against"], "+.1f")


def _show_pairs(figures: dict[str, Any], options) -> None:
    """The rows of sequences or parallel text, a table a set."""
    for name, first in figures["rows"][0]["sets"].items():
        measure, title = ("bleu", "BLEU") if "bleu" in first else ("exact", "exact %")
        rows = []
        for row in figures["rows"]:
            part = row["sets"][name]
            gap = part.get("minus_against")
            low = None if gap is None else gap["interval"]
            rows.append(
                (
                    row["row"],
                    row["seeds"],
                    f"{row['parameters']:,}",
                    f"{part[measure]['mean']:.2f}"
                    + ("" if part[measure]["spread"] is None else f" ±{part[measure]['spread']:.2f}"),
                    "" if gap is None else "{:+.2f} [{:+.2f}, {:+.2f}]".format(gap["difference"], *low),
                    "" if gap is None else gap["over"],
                    f"{part['loss']:.4f}",
                    f"{part['encoder_depth']:.2f} / {part['decoder_depth']:.2f}",
                    f"{part['macs_per_token'] / 1e6:.3f}",
                    f"{part['tokens_per_second']:,.0f}",
                    f"{row['train_cpu_seconds']:.0f}",
                )
            )
        columns = ("model", "seeds", "parameters", title, f"minus {figures['against']} [95%]", "over", "loss",
                   "steps read / written", "MMACs/token", "tokens/s", "training CPU s")  # fmt: skip
        notes = [f"{first['examples']:,} examples."]
        if measure == "exact":
            notes[0] += f" The commonest answer gets {first['majority']:.2f}%, a copy {first['copy']:.2f}%."
        table(f"\n{options.plan}, {name}", columns, rows, notes)
    print(_done(figures, options))


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
                shown(row, "minus_looped", "+.4f")
                + (
                    " [{:+.4f}, {:+.4f}]".format(*row["minus_looped_interval"])
                    if row["minus_looped_interval"]
                    else ""
                ),
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
