"""Verbs over language models: evaluate, sweep, depths, calibrate, generate."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .shared import (
    UsageError,
    depth_knobs,
    given,
    in_unit,
    is_language,
    names,
    numbers,
    quieten,
    refuse,
    settings_of,
    shown,
    table,
    write_for_checkpoint,
)


def evaluate(options) -> Any:
    """Loss, bits per byte and depth by topic; --tasks: accuracy on tasks, --files: perplexity of files."""
    knobs, settings = depth_knobs(options), settings_of(options.checkpoint)
    routed = "routed_layers" in settings
    knob, several = ("capacity", "capacities") if routed else ("threshold", "thresholds")
    if options.tasks and options.files:
        raise UsageError("--tasks and --files are two measurements; give one of them.")
    if options.tasks and {"threshold", "capacity"} & set(knobs):
        raise UsageError(f"--{knob}: the tasks take --{several}, one or several.")
    if not options.tasks:
        idle = list(given(options, "limit", "subjects", "thresholds"))
        if idle:
            raise UsageError(f"--{idle[0]} goes with --tasks.")
    if options.capacities and not (options.tasks or options.files):
        raise UsageError(
            "--capacities goes with --tasks or --files; without them `tenuto sweep` turns the knob."
        )
    if options.capacities and {"threshold", "capacity"} & set(knobs):
        raise UsageError("--capacities is several of --capacity; give one of them.")
    values = numbers(getattr(options, several)) if getattr(options, several) else ()
    if routed:
        in_unit(values, "capacity", "a share of the tokens")
    quieten()
    start = time.time()
    if options.tasks or options.files:
        measure = _perplexity if options.files else _tasks
        figures = measure(options, {several: values} if values else {}, knobs)
        write_for_checkpoint(options, time.time() - start, figures)
        return figures, lambda: print(json.dumps(figures, indent=1))
    from ..language import evaluate_language, realised

    figures = evaluate_language(options.checkpoint, names(options.sets), options.policy, **knobs)
    if routed:
        figures |= {"routed_layers": settings["routed_layers"], "knobs": knobs}
        for row in (figures, *figures["by_group"].values()):
            row["capacity_realised"] = realised(SimpleNamespace(**settings), row["mean_depth"])
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        measure = "accuracy" if "accuracy" in figures else "bits_per_byte"
        rows = [
            (name, f"{row['loss']:.4f}", f"{row[measure]:.3f}", f"{row['mean_depth']:.2f}",
             *([f"{row['capacity_realised']:.3f}"] if routed else []))
            for name, row in figures["by_group"].items()
        ]  # fmt: skip
        notes = [
            f"all: loss {figures['loss']:.4f}, {figures['macs_per_token'] / 1e6:.2f} MMACs per token,"
            f" {figures['seconds']:.1f} s, {figures['tokens']:,} tokens"
        ]
        unit = "accuracy %" if measure == "accuracy" else "bits/byte"
        title = f"{options.checkpoint}: {figures['full_depth']} loops at most"
        columns = ("set", "loss (nats)", unit, "loops/token")
        if routed:
            title = f"{options.checkpoint}: {figures['full_depth']} layers"
            notes[0] += f"; routed layers {settings['routed_layers']}"
            columns = (*columns[:-1], "layers/token", "realised capacity")
        table(title, columns, rows, notes)

    return figures, show


def _perplexity(options, several: dict[str, Sequence[float]], knobs: dict[str, Any]) -> dict[str, Any]:
    from ..evaluate import load
    from ..perplexity import perplexity

    loaded = load(options.checkpoint, options.policy, trained=False)
    one = (loaded.model, loaded.tokenizer, options.files.split(","))
    if not several:
        return perplexity(*one, **knobs)
    values = several["capacities"]
    return {"rows": [{"capacity": value, **perplexity(*one, **knobs, capacity=value)} for value in values]}


def _tasks(options, several: dict[str, Sequence[float]], knobs: dict[str, Any]) -> dict[str, Any]:
    from ..evaluate import load
    from ..harness import evaluate_lm

    loaded = load(options.checkpoint, options.policy, trained=False)
    return evaluate_lm(
        loaded.model,
        loaded.tokenizer,
        options.tasks.split(","),
        limit=options.limit,
        subjects=names(options.subjects),
        **several,
        **knobs,
    )


def sweep(options, thresholds: Sequence[float]) -> Any:
    """Each threshold beside every fixed depth."""
    quieten()
    from ..language_sweep import sweep_language

    start = time.time()
    figures = sweep_language(
        options.checkpoint, thresholds, names(options.sets), options.repeats, options.policy, options.limit
    )
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        rows = [
            (
                f"depth {row['max_steps']}" if "max_steps" in row else f"{row['threshold']:g}",
                f"{row['loss']:.4f}",
                "{:+.2f}% [{:+.4f}, {:+.4f}]".format(row["loss_percent"], *row["interval"]),
                f"{row['mean_depth']:.2f}",
                f"{row['steps_skipped']:.1f}",
                f"{100 * row['macs_share']:.1f}",
                f"{100 * row['seconds_share']:.1f}",
                shown(row, "saved_over_fixed", "+.4f"),
            )
            for row in (*figures["fixed"], *figures["rows"])
        ]
        columns = ("setting", "loss", "against full depth [95%, nats]", "loops/token", "steps skipped %", "MACs %",
                   "time %", "better than fixed")  # fmt: skip
        notes = [f"policy {figures['policy']}; {figures['tokens']:,} tokens; the last column: nats saved against a"
                 " fixed depth of the same MACs (straight line between two depths)."]  # fmt: skip
        table(f"{options.checkpoint}: the knob beside fixed depths", columns, rows, notes)

    return figures, show


def depths(options) -> Any:
    """Loops by topic, kind, frequency and position of the token; the oracle; --rules: exit rules beside it."""
    knobs = depth_knobs(options)
    quieten()
    from ..text_depths import picture, text_depths

    start = time.time()
    figures = text_depths(options.checkpoint, options.policy, options.rules, options.limit, **knobs)
    write_for_checkpoint(options, time.time() - start, figures)
    if options.picture:
        picture(figures, Path(options.picture))

    def show() -> None:
        parts = "by_topic by_topic_adjusted by_kind by_frequency by_position by_loss_at_depth_1"
        for part in parts.split():
            columns = ("", "tokens", "mean [95%]", "effect (d)")
            table(f"\nloops {part.replace('_', ' ')}", columns, group_rows(figures[part]))
        oracle = figures["oracle"]
        losses = "  ".join(f"{loss:.4f}" for loss in oracle["loss_by_depth"])
        print(f"\nloss at depth 1..{figures['full_depth']}: {losses}")
        print(
            f"oracle: loss {oracle['loss']:.4f} at {oracle['mean_depth']:.2f} loops, headroom {oracle['headroom']:.4f}"
        )
        for name, value in figures["correlation"].items():
            print(f"rank correlation of depth {name}: {value:+.3f}")
        rows = [
            (
                row["rule"],
                f"{row['saved_over_fixed']:+.4f}",
                "" if row["of_headroom"] is None else f"{100 * row['of_headroom']:.1f}",
                f"{row['threshold']:g}",
                f"{row['loss']:.4f}",
                f"{row['mean_depth']:.2f}",
            )
            for row in figures.get("rules", [])
        ]
        if rows:
            columns = (
                "exit rule",
                "better than fixed (nats)",
                "% of headroom",
                "threshold",
                "loss",
                "loops/token",
            )
            table("\nexit rules, each where it does best", columns, rows)
        if figures["advice"]:
            print(f"The depths have collapsed: {figures['advice']}.")

    return figures, show


def group_rows(groups: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Name, tokens, mean with its interval, and effect of each group of tokens."""
    return [
        (
            name,
            shown(row, "tokens", ","),
            "{:.3f} [{:.3f}, {:.3f}]".format(row["mean"], *row["interval"]),
            shown(row, "effect", "+.2f"),
        )
        for name, row in groups.items()
    ]


def calibrate(options) -> Any:
    """The threshold that meets a target, from half of the held-out documents, judged on the other half."""
    refuse(options, ("files",))
    quieten()
    from ..calibrate import calibrate as run

    start = time.time()
    figures = run(options.checkpoint, options.max_loss, options.max_steps, options.limit, save=options.save)
    write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        print(
            f"threshold {figures['threshold']:g}: on the other half of the documents {figures['steps_percent']:.1f}% of"
            f" the token-steps, {figures['macs_percent']:.1f}% of the MACs, loss {figures['loss_percent']:+.2f}%"
            f" ({'met' if figures['met'] else 'not met there'})."
            + (" Written into the checkpoint's config." if figures["saved"] else "")
        )

    return figures, show


def generate(options) -> Any:
    """Go on with a text; every token on the colour of the loops, or layers, it ran."""
    if not is_language(options.checkpoint):
        raise ValueError(
            f"{options.checkpoint} is not a language model of `tenuto train` or `tenuto convert`; generate needs one."
        )
    knobs = depth_knobs(options)
    quieten()
    from dataclasses import asdict

    from ..evaluate import load
    from ..written import coloured, legend, write

    loaded = load(options.checkpoint, options.policy, trained=False)
    seed = None if options.greedy else options.seed
    said = write(loaded.model, loaded.tokenizer, options.prompt, options.tokens, seed=seed, **knobs)

    def show() -> None:
        from rich.console import Console

        console = Console(highlight=False)
        if console.is_terminal:
            console.print(legend(said.full, said.unit, said.floor))
            console.print(coloured(said))
        else:
            print("".join(said.tokens))
        print(f"{said.mean_depth:.2f} of {said.full} {said.unit} per token at {said.setting}")

    return {**asdict(said), "text": "".join(said.tokens), "mean_depth": round(said.mean_depth, 3)}, show
