"""The verbs of the command line: each returns its figures for --json, and what prints them as tables.

Heavy imports happen inside the verbs, so that --help answers at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRINT_CONFIG = "--print_config"
_TEXT = ("paper", "most specific tokens (PMI, nats)")  # columns of words


class UsageError(Exception):
    """The words do not make a command: exit code 2."""


def _quieten() -> None:
    """No bars and warnings of transformers' own; called by the verbs that load or save models."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> None:
    """One table on stdout, the first column left, the others right; notes below."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column in _TEXT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console.print(table)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers such as 0.9,0.5.") from None


def _in_unit(values: Sequence[float]) -> Sequence[float]:
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"The threshold {value:g} lies outside 0..1: it is a share of halting mass.")
    return values


def _sets(options) -> list[str]:
    return [name for name in (options.sets or "").split(",") if name]


def _knobs(options) -> dict[str, Any]:
    """The depth knobs that were given; refused for a checkpoint whose tokens all run every step."""
    chosen = {name: getattr(options, name) for name in ("threshold", "min_steps", "max_steps")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if "threshold" in chosen:
        _in_unit([chosen["threshold"]])
    config = Path(options.checkpoint) / "config.json"
    settings = json.loads(config.read_text()) if config.is_file() else {}
    if settings.get("policy", "fixed") == "fixed":
        # a loop of fixed depth can still be cut short or run longer
        useless = [name for name in chosen if name != "max_steps" or "num_loops" not in settings]
        if useless and settings:
            raise ValueError(
                f"{options.checkpoint} has a fixed depth, so --{useless[0]} has nothing to set;"
                " it needs policy stick_breaking."
            )
    return chosen


def _write(options, recipe: str, seed: int, seconds: float, figures: dict, **more) -> None:
    from .results import write_result

    write_result(
        Path(options.result),
        recipe=recipe,
        command=options.command,
        seed=seed,
        seconds=seconds,
        figures=figures,
        **more,
    )


def _write_for_checkpoint(options, seconds: float, figures: dict) -> None:
    from .report import made_by

    if options.result:
        made = made_by(options.checkpoint)
        _write(options, made["recipe"], made["seed"], seconds, figures, made_by=made["command"])


def train(options) -> Any:
    """Train what a recipe describes."""
    from dataclasses import asdict

    from .recipe import load_recipe

    recipe = load_recipe(options.recipe, [word for word in options.overrides if word != PRINT_CONFIG])
    if PRINT_CONFIG in options.overrides:
        import yaml

        settings = asdict(recipe)
        return settings, lambda: print(yaml.safe_dump(settings, sort_keys=False), end="")
    if not options.output:
        raise UsageError("--output is missing: the folder for the model, its logs and checkpoints.")
    _quieten()
    from .progress import TrainingProgress
    from .train import train as run

    start = time.time()
    with TrainingProgress() as progress:
        figures = run(recipe, options.output, options.resume, progress)
    figures["accuracy"] = {"validation": round(figures["validation_accuracy"], 2)}
    seed = recipe.training.get("seed", 0)
    for path in {str(Path(options.output) / "result.json"), options.result} - {None}:
        options.result = path
        _write(options, options.recipe, seed, time.time() - start, figures, settings=asdict(recipe))

    def show() -> None:
        print(
            f"{figures['parameters']:,} parameters, {figures['seconds']['wall']:.0f} s:"
            f" validation accuracy {figures['validation_accuracy']:.1f}%. Everything is in {options.output}."
        )

    return figures, show


def evaluate(options) -> Any:
    """Accuracy by test set beside the always-`#` rate, mean depth, MACs and seconds."""
    knobs = _knobs(options)
    _quieten()
    from .evaluate import evaluate as run

    start = time.time()
    figures = run(options.checkpoint, _sets(options), options.errors, options.both_ways, **knobs)
    _write_for_checkpoint(options, time.time() - start, figures)

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
        columns = ("set", "pairs", "accuracy %", "always # %", "steps/token", "MMACs/pair", "seconds")
        table(f"{options.checkpoint}: {figures['full_depth']} steps at most", columns, rows)
        for name, parts in figures.get("errors", {}).items():
            for key in ("relation", "operators", "depth", "negation"):
                lines = [
                    (value, row["pairs"], f"{100 * row['accuracy']:.2f}", f"{100 * row['majority']:.2f}")
                    for value, row in parts[key].items()
                ]
                table(f"\nset {name} by {key}", (key, "pairs", "accuracy %", "commonest %"), lines)

    return figures, show


def sweep(options) -> Any:
    """The knob: threshold -> steps skipped, MACs, wall-clock, accuracy."""
    thresholds = _in_unit(_numbers(options.thresholds))
    _quieten()
    from .evaluate import sweep as run

    start = time.time()
    figures = run(options.checkpoint, thresholds, _sets(options), options.generated, options.repeats)
    _write_for_checkpoint(options, time.time() - start, figures)
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
    """Steps per token by operator count and by kind of token."""
    knobs = _knobs(options)
    _quieten()
    from .depths import depths as run

    figures = run(options.checkpoint, _sets(options), **knobs)

    def show() -> None:
        for title, groups in (("operators", figures["by_operators"]), ("kind of token", figures["by_kind"])):
            rows = [
                (
                    name,
                    f"{one['tokens']:,}",
                    f"{one['mean']:.2f}",
                    f"{one['spread']:.2f}",
                    " ".join(f"{100 * share:3.0f}" for share in one["histogram"]),
                )
                for name, one in [*groups.items(), ("all", figures["all"])]
            ]
            histogram = f"% after step 1..{figures['full_depth']}"
            table(f"\nsteps by {title}", (title, "tokens", "mean", "spread", histogram), rows)
        if figures["collapsed"]:
            print("The depths have collapsed: all tokens stop at about the same step.")

    return figures, show


def experts(options) -> Any:
    """Which expert serves which token."""
    _quieten()
    from .expert_usage import expert_usage

    figures = expert_usage(options.checkpoint, _sets(options), options.limit)

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
            title = f"\n{name}: entropy {router['entropy']:.3f} of 1, {len(router['dead'])} never used"
            table(title, ("expert", "usage %", "most specific tokens (PMI, nats)"), rows)
            counts = router["counts"]
            lines = [
                (token, *(f"{100 * n / max(1, sum(row)):.0f}" for n in row)) for token, row in counts.items()
            ]
            table("% of a token's assignments", ("token", *map(str, range(len(rows)))), lines)

    return figures, show


def presets(options) -> Any:
    """Parameters and MACs of every preset beside the published figures."""
    _quieten()
    from .presets import MACS_RULE, PRESETS, costs

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
        table("Encoder-decoders of the presets", columns, rows, [f"MACs: {MACS_RULE}.", *listed])

    return figures, show


def report(options) -> Any:
    """One self-contained HTML page about a checkpoint."""
    _quieten()
    from .report import measure, write_report

    figures = measure(options.checkpoint, options.limit)
    path = write_report(figures, options.output or Path(options.checkpoint) / "report.html")
    return {"report": str(path), **figures}, lambda: print(f"The report is {path}.")


def demo(options) -> Any:
    """Train a small model live, then show a longer-trained one."""
    _quieten()
    from .demo import demo as run

    return run(options.checkpoint, options.output, options.recipe)
