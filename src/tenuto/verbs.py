"""The verbs of the command line: each returns its figures for --json, and what prints them as tables.

Heavy imports happen inside the verbs, so that --help answers at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRINT_CONFIG = "--print_config"
SELECTIONS = ("threshold", "running", "topk", "dense")  # models/routing.py
_CONVERT = {"to": "looped, sdt, stt or mod", "output": "the folder for the converted model"}
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


def _in_unit(
    values: Sequence[float], name: str = "threshold", kind: str = "a share of halting mass"
) -> Sequence[float]:
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"The {name} {value:g} lies outside 0..1: it is {kind}.")
    return values


def _sets(options) -> list[str]:
    return [name for name in (options.sets or "").split(",") if name]


def _settings(checkpoint: str) -> dict[str, Any]:
    """What a checkpoint's config.json says; {} where there is none."""
    config = Path(checkpoint) / "config.json"
    return json.loads(config.read_text()) if config.is_file() else {}


def _is_routed(checkpoint: str) -> bool:
    """Whether a checkpoint's layers take some of the tokens (mod, sdt, stt)."""
    return "routed_layers" in _settings(checkpoint)


def _given(options, *names: str) -> dict[str, Any]:
    chosen = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in chosen.items() if value is not None}


def _refuse(options, names: Sequence[str]) -> None:
    """Refuses those of the flags that have nothing to set for this checkpoint."""
    routed = _is_routed(options.checkpoint)
    if (idle := list(_given(options, *names))) and _settings(options.checkpoint):
        kind = "routes tokens by capacity" if routed else "has no routed layers"
        own = ("capacity", "selection", "threshold") if routed else ("threshold", "min_steps", "max_steps")
        raise ValueError(
            f"{options.checkpoint} {kind}, so --{idle[0]} has nothing to set; its knobs are"
            f" {', '.join(f'--{name}' for name in own)}."
        )


def _depth_knobs(options) -> dict[str, Any]:
    """The knobs that were given, those of looped models or of routed ones; refused where they are the other's."""
    if not _is_routed(options.checkpoint):
        _refuse(options, ("capacity", "selection", "capacities"))
        return _given(options, "threshold", "min_steps", "max_steps")
    _refuse(options, ("max_steps", "min_steps", "policy", "thresholds"))
    chosen = _given(options, "capacity", "selection", "threshold")
    if "capacity" in chosen:
        _in_unit([chosen["capacity"]], "capacity", "a share of the tokens")
    if chosen.get("selection", "dense") not in SELECTIONS:
        raise ValueError(f"--selection {chosen['selection']} is none of {', '.join(SELECTIONS)}.")
    if "threshold" in chosen and (
        "capacity" in chosen or chosen.get("selection", "threshold") != "threshold"
    ):
        raise ValueError(
            "--threshold is a raw level of the scores, in place of --capacity and for --selection threshold alone:"
            " leave one of them out."
        )
    return chosen


def _knobs(options) -> dict[str, Any]:
    """The depth knobs that were given; refused for a checkpoint whose tokens all run every step."""
    chosen, settings = _depth_knobs(options), _settings(options.checkpoint)
    if "routed_layers" in settings:
        return chosen
    if "threshold" in chosen:
        _in_unit([chosen["threshold"]])
    if settings.get("policy", "fixed") == "fixed":
        # a loop of fixed depth can still be cut short or run longer
        useless = [name for name in chosen if name != "max_steps" or "num_loops" not in settings]
        if useless and settings:
            raise ValueError(
                f"{options.checkpoint} has a fixed depth, so --{useless[0]} has nothing to set;"
                " it needs policy stick_breaking."
            )
    return chosen


def _is_language(checkpoint: str) -> bool:
    """Whether a folder holds a causal language model of `tenuto train` or `tenuto convert`."""
    recipe = Path(checkpoint) / "recipe.yaml"
    if not recipe.is_file():
        made = _settings(checkpoint)
        causal = any(name.endswith("ForCausalLM") for name in made.get("architectures") or ())
        return causal and made.get("model_type", "").startswith("tenuto")
    import yaml

    return yaml.safe_load(recipe.read_text()).get("head") == "causal"


def _is_pairs(checkpoint: str) -> bool:
    """Whether a folder holds a model of `tenuto train` for sequences or parallel text."""
    recipe = Path(checkpoint) / "recipe.yaml"
    if not recipe.is_file():
        return False
    import yaml

    data = yaml.safe_load(recipe.read_text()).get("data") or {}
    return any(data.get(name) is not None for name in ("sequences", "parallel"))


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
    if "validation_accuracy" in figures:
        figures["accuracy"] = {"validation": round(figures["validation_accuracy"], 2)}
    seed = recipe.training.get("seed", 0)
    for path in {str(Path(options.output) / "result.json"), options.result} - {None}:
        options.result = path
        _write(options, options.recipe, seed, time.time() - start, figures, settings=asdict(recipe))

    def show() -> None:
        if "accuracy" in figures:
            quality = f"accuracy {figures['validation_accuracy']:.1f}%"
        else:
            quality = f"loss {figures['validation_loss']:.3f} nats a token"
        print(
            f"{figures['parameters']:,} parameters, {figures['seconds']['wall']:.0f} s:"
            f" validation {quality}. Everything is in {options.output}."
        )

    return figures, show


def prepare(options) -> Any:
    """Make training files of a user's copy of a published corpus (wmt14: English-German)."""
    if options.corpus != "wmt14":
        raise UsageError(f"There is no corpus {options.corpus!r}; wmt14 is known.")
    for name in ("input", "output"):
        if not getattr(options, name):
            raise UsageError(f"--{name} is missing: a folder.")
    _quieten()
    from .data.wmt14 import prepare as run

    figures = run(options.input, options.output)

    def show() -> None:
        read = ", ".join(f"{name} {count:,}" for name, count in figures["read"].items())
        print(
            f"Read {read}; kept {figures['train']:,} pairs, {figures['tokens']:,} tokens. Everything is in"
            f" {options.output}."
        )

    return figures, show


def convert(options) -> Any:
    """Turn a pretrained Llama, Mistral or Qwen2 into a tenuto model that computes the same at its neutral setting."""
    for name in ("to", "output"):
        if not getattr(options, name):
            raise UsageError(f"--{name} is missing: {_CONVERT[name]}.")
    _quieten()
    from .convert import convert_folder

    chosen = {name: getattr(options, name) for name in ("prelude", "coda", "loops", "injection", "routed")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if "routed" in chosen:
        try:
            chosen["routed"] = [int(layer) for layer in options.routed.split(",")]
        except ValueError:
            raise UsageError(f"--routed: {options.routed!r} is not a list of layers such as 1,3,5.") from None
    start = time.time()
    figures = convert_folder(options.source, options.to, options.output, options.gguf, options.seed, **chosen)
    options.result = str(Path(options.output) / "result.json")
    _write(options, None, options.seed, time.time() - start, figures)

    def show() -> None:
        neutral = ", ".join(f"{name}={value!r}" for name, value in figures["neutral"].items())
        print(
            f"{figures['parameters']:,} parameters, {figures['new_parameters']:,} of them new: with {neutral} the"
            f" logits of {figures['checked_tokens']} tokens differ by {figures['difference']:.1e} at most from the"
            f" source's ({figures['dtype']}). Everything is in {options.output}."
        )

    return figures, show


def evaluate(options) -> Any:
    """Accuracy or BLEU by test set beside a baseline, or a language model's loss; mean depth, MACs and seconds."""
    if _is_pairs(options.checkpoint):
        return _evaluate_pairs(options)
    if idle := list(_given(options, "beams", "length_penalty", "outputs")):
        raise UsageError(f"--{idle[0]} goes with checkpoints trained on sequences or parallel text.")
    if _is_language(options.checkpoint):
        return _evaluate_language(options)
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
        unit = "layers" if _is_routed(options.checkpoint) else "steps"
        columns = ("set", "pairs", "accuracy %", "always # %", f"{unit}/token", "MMACs/pair", "seconds")
        table(f"{options.checkpoint}: {figures['full_depth']} {unit} at most", columns, rows)
        for name, parts in figures.get("errors", {}).items():
            for key in ("relation", "operators", "depth", "negation"):
                lines = [
                    (value, row["pairs"], f"{100 * row['accuracy']:.2f}", f"{100 * row['majority']:.2f}")
                    for value, row in parts[key].items()
                ]
                table(f"\nset {name} by {key}", (key, "pairs", "accuracy %", "commonest %"), lines)

    return figures, show


def _evaluate_pairs(options) -> Any:
    others = "errors both_ways policy tasks thresholds capacities subjects files".split()
    if idle := [name for name in others if getattr(options, name)]:
        raise UsageError(f"--{idle[0]} has nothing to set for a checkpoint of sequences or parallel text.")
    knobs = _knobs(options)
    _quieten()
    from .translate import evaluate_pairs

    start = time.time()
    asked = _given(options, "beams", "length_penalty", "limit", "outputs")
    figures = evaluate_pairs(options.checkpoint, _sets(options), **asked, **knobs)
    _write_for_checkpoint(options, time.time() - start, figures)

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


def translate(options) -> Any:
    """Answer or translate the lines of standard input with a checkpoint of sequences or parallel text."""
    if not _is_pairs(options.checkpoint):
        raise ValueError(
            f"{options.checkpoint} was not trained on sequences or parallel text; translate needs such a checkpoint."
        )
    knobs = _knobs(options)
    lines = [line.strip() for line in sys.stdin.read().split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines
    _quieten()
    from .evaluate import load
    from .translate import write

    asked = _given(options, "beams", "length_penalty", "max_length")
    said = write(load(options.checkpoint), lines, progress="translating", **asked, **knobs)
    figures = {"lines": said.texts, **(said.costs() if lines else {})}
    return figures, lambda: print("".join(f"{text}\n" for text in said.texts), end="")


def _evaluate_language(options) -> Any:
    knobs, settings = _depth_knobs(options), _settings(options.checkpoint)
    routed = "routed_layers" in settings
    knob, several = ("capacity", "capacities") if routed else ("threshold", "thresholds")
    if options.tasks and options.files:
        raise UsageError("--tasks and --files are two measurements; give one of them.")
    if options.tasks and {"threshold", "capacity"} & set(knobs):
        raise UsageError(f"--{knob}: the tasks take --{several}, one or several.")
    if not options.tasks:
        idle = list(_given(options, "limit", "subjects", "thresholds"))
        if idle:
            raise UsageError(f"--{idle[0]} goes with --tasks.")
    if options.capacities and not (options.tasks or options.files):
        raise UsageError(
            "--capacities goes with --tasks or --files; without them `tenuto sweep` turns the knob."
        )
    if options.capacities and {"threshold", "capacity"} & set(knobs):
        raise UsageError("--capacities is several of --capacity; give one of them.")
    values = _numbers(getattr(options, several)) if getattr(options, several) else ()
    if routed:
        _in_unit(values, "capacity", "a share of the tokens")
    _quieten()
    start = time.time()
    if options.tasks or options.files:
        from .evaluate import load
        from .harness import evaluate_lm, perplexity

        loaded = load(options.checkpoint, options.policy, trained=False)
        if options.files:
            one = (loaded.model, loaded.tokenizer, options.files.split(","))
            if values:
                rows = [{knob: value, **perplexity(*one, **knobs, capacity=value)} for value in values]
                figures = {"rows": rows}
            else:
                figures = perplexity(*one, **knobs)
        else:
            subjects = [name for name in (options.subjects or "").split(",") if name]
            figures = evaluate_lm(
                loaded.model,
                loaded.tokenizer,
                options.tasks.split(","),
                limit=options.limit,
                subjects=subjects,
                **({several: values} if values else {}),
                **knobs,
            )
        _write_for_checkpoint(options, time.time() - start, figures)
        return figures, lambda: print(json.dumps(figures, indent=1))
    from .language import evaluate_language, realised

    figures = evaluate_language(options.checkpoint, _sets(options), options.policy, **knobs)
    if routed:
        figures |= {"routed_layers": settings["routed_layers"], "knobs": knobs}
        for row in (figures, *figures["by_group"].values()):
            row["capacity_realised"] = realised(SimpleNamespace(**settings), row["mean_depth"])
    _write_for_checkpoint(options, time.time() - start, figures)

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


def _sweep_language(options, thresholds: Sequence[float]) -> Any:
    _quieten()
    from .language import sweep_language

    start = time.time()
    figures = sweep_language(
        options.checkpoint, thresholds, _sets(options), options.repeats, options.policy, options.limit
    )
    _write_for_checkpoint(options, time.time() - start, figures)

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
                f"{row['saved_over_fixed']:+.4f}" if "saved_over_fixed" in row else "",
            )
            for row in (*figures["fixed"], *figures["rows"])
        ]
        columns = ("setting", "loss", "against full depth [95%, nats]", "loops/token", "steps skipped %", "MACs %",
                   "time %", "better than fixed")  # fmt: skip
        notes = [f"policy {figures['policy']}; {figures['tokens']:,} tokens; the last column: nats saved against a"
                 " fixed depth of the same MACs (straight line between two depths)."]  # fmt: skip
        table(f"{options.checkpoint}: the knob beside fixed depths", columns, rows, notes)

    return figures, show


def _sweep_capacity(options) -> Any:
    _quieten()
    from .language import sweep_capacity

    start = time.time()
    if options.policy or options.generated:
        raise UsageError("--policy and --generated are for models that halt, not for --capacities.")
    capacities = _in_unit(_numbers(options.capacities), "capacity", "a share of the tokens")
    figures = sweep_capacity(
        options.checkpoint, capacities, _sets(options), repeats=options.repeats, limit=options.limit
    )
    _write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        rows = [
            (
                row["selection"],
                "" if "capacity" not in row else f"{row['capacity']:g}",
                f"{row['capacity_realised']:.3f}",
                f"{row['loss']:.4f}",
                "" if row["over_topk_percent"] is None else f"{row['over_topk_percent']:+.2f}",
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


def sweep(options) -> Any:
    """The knob: threshold or capacity -> steps skipped, MACs, wall-clock, accuracy or loss."""
    if options.capacities:
        return _sweep_capacity(options)
    thresholds = _in_unit(_numbers(options.thresholds))
    if _is_language(options.checkpoint):
        return _sweep_language(options, thresholds)
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
    """Steps per token by operator count and kind of token; of a language model, by topic, kind, frequency, position."""
    if _is_language(options.checkpoint):
        return _depths_routed(options) if _is_routed(options.checkpoint) else _depths_language(options)
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


def _depths_routed(options) -> Any:
    knobs = _depth_knobs(options)
    if options.rules or options.picture:
        raise UsageError(
            f"--{'rules' if options.rules else 'picture'} is for looped models; see `tenuto report` for a routed one."
        )
    _quieten()
    from .routed_page import PARTS, executed_of

    start = time.time()
    figures = executed_of(options.checkpoint, options.limit, **knobs)
    _write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        for part, title in PARTS.items():
            rows = [
                (name, f"{row['tokens']:,}", "{:.3f} [{:.3f}, {:.3f}]".format(row["mean"], *row["interval"]),
                 f"{row['effect']:+.2f}" if "effect" in row else "")
                for name, row in figures[part].items()
            ]  # fmt: skip
            columns = ("", "tokens", "share of the routed layers run [95%]", "effect (d)")
            table(f"\n{title}", columns, rows, [figures["says"][part]])

    return figures, show


def _depths_language(options) -> Any:
    knobs = _depth_knobs(options)
    _quieten()
    from .text_depths import picture, text_depths

    start = time.time()
    figures = text_depths(options.checkpoint, options.policy, options.rules, options.limit, **knobs)
    _write_for_checkpoint(options, time.time() - start, figures)
    if options.picture:
        picture(figures, Path(options.picture))

    def show() -> None:
        for part in (
            "by_topic",
            "by_topic_adjusted",
            "by_kind",
            "by_frequency",
            "by_position",
            "by_loss_at_depth_1",
        ):
            rows = [
                (
                    name,
                    f"{row['tokens']:,}" if "tokens" in row else "",
                    "{:.3f} [{:.3f}, {:.3f}]".format(row["mean"], *row["interval"]),
                    f"{row['effect']:+.2f}" if "effect" in row else "",
                )
                for name, row in figures[part].items()
            ]
            table(f"\nloops {part.replace('_', ' ')}", ("", "tokens", "mean [95%]", "effect (d)"), rows)
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


def calibrate(options) -> Any:
    """Find the knob that meets a target on held-out text; of a routed model, set the levels of its layers first."""
    if not _is_language(options.checkpoint):
        raise ValueError(
            f"{options.checkpoint} is not a language model of `tenuto train`; calibrate needs one."
        )
    if _is_routed(options.checkpoint):
        return _calibrate_routed(options)
    _refuse(options, ("files",))
    _quieten()
    from .calibrate import calibrate as run

    start = time.time()
    figures = run(options.checkpoint, options.max_loss, options.max_steps, options.limit, save=options.save)
    _write_for_checkpoint(options, time.time() - start, figures)

    def show() -> None:
        print(
            f"threshold {figures['threshold']:g}: on the other half of the documents {figures['steps_percent']:.1f}% of"
            f" the token-steps, {figures['macs_percent']:.1f}% of the MACs, loss {figures['loss_percent']:+.2f}%"
            f" ({'met' if figures['met'] else 'not met there'})."
            + (" Written into the checkpoint's config." if figures["saved"] else "")
        )

    return figures, show


def _calibrate_routed(options) -> Any:
    _refuse(options, ("max_steps",))
    if options.save and options.max_loss is None:
        raise UsageError("--save goes with --max_loss: levels are written always.")
    _quieten()
    from .calibrate import calibrate_capacity, set_levels

    start, files = time.time(), [name for name in (options.files or "").split(",") if name]
    if options.max_loss is None:
        figures = set_levels(options.checkpoint, files, options.limit)
    else:
        figures = calibrate_capacity(
            options.checkpoint, options.max_loss, files, options.limit, save=options.save
        )
    _write_for_checkpoint(options, time.time() - start, figures)

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
                f"No capacity keeps the loss within {options.max_loss:g}% of the dense model's: at 1 it is"
                f" {figures['loss_percent']:+.2f}% on the other half of the documents. Nothing is saved."
            )
            return
        print(
            f"capacity {figures['capacity']:g}: on the other half of the documents the layers take"
            f" {100 * figures['capacity_realised']:.1f}% of the tokens, {figures['macs_percent']:.1f}% of the MACs,"
            f" {figures['kv_percent']:.1f}% of the K/V bytes, loss {figures['loss_percent']:+.2f}% of the dense model's"
            f" ({'met' if figures['met'] else 'not met there'})."
            + (" Written into the checkpoint's config." if figures["saved"] else "")
        )

    return figures, show_levels if options.max_loss is None else show_capacity


def generate(options) -> Any:
    """Go on with a text; every token on the colour of the loops, or layers, it ran."""
    if not _is_language(options.checkpoint):
        raise ValueError(
            f"{options.checkpoint} is not a language model of `tenuto train` or `tenuto convert`; generate needs one."
        )
    knobs = _depth_knobs(options)
    _quieten()
    from dataclasses import asdict

    from .evaluate import load
    from .written import coloured, legend, write

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


def average(options) -> Any:
    """Average the weights of several checkpoints of one config."""
    if not options.output:
        raise UsageError("--output is missing: the folder for the averaged model.")
    if options.best is not None and len(options.checkpoints) > 1:
        raise UsageError("--best chooses among the checkpoints of one run: name its folder alone.")
    _quieten()
    from .average import average_checkpoints, best_checkpoints

    start, folders = time.time(), options.checkpoints
    if options.best is not None:
        folders = best_checkpoints(folders[0], options.best)
    figures = average_checkpoints(folders, options.output)
    options.result = str(Path(options.output) / "result.json")
    _write(options, None, None, time.time() - start, figures)

    def show() -> None:
        names = ", ".join(figures["checkpoints"])
        print(f"The mean of {names} ({figures['parameters']:,} parameters) is in {options.output}.")

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


def _memory() -> Any:
    from .footprint import GIB, memory_table

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


def presets(options) -> Any:
    """Parameters and MACs of every preset beside the published figures."""
    _quieten()
    if options.memory:
        return _memory()
    from .presets import CAUSAL_RULE, MACS_RULE, PRESETS, costs

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


def matrix(options) -> Any:
    """Bodies x policies x seeds of looped language models; goes on where it was stopped."""
    _quieten()
    from .matrix import run_matrix
    from .progress import TrainingProgress

    start = time.time()
    figures = run_matrix(options.matrix, options.output, options.only, TrainingProgress)
    if options.result:
        _write(options, options.matrix, None, time.time() - start, figures)

    def show() -> None:
        rows = [
            (
                f"{row['body']} {row['policy']}" + (" (equal MACs)" if row["budget"] == "macs" else ""),
                row["seeds"],
                row["loops"],
                f"{row['loss']:.4f}" + ("" if row["loss_spread"] is None else f" ±{row['loss_spread']:.4f}"),
                f"{row['mean_depth']:.2f}",
                f"{row['macs_per_token'] / 1e6:.3f}",
                f"{row['tokens_per_second']:,}",
                "" if row["saved_over_fixed"] is None else f"{row['saved_over_fixed']:+.4f}",
                f"{row['collapsed']} of {row['seeds']}",
            )
            for row in figures["rows"]
        ]
        columns = ("cell", "seeds", "loops", "loss", "loops/token", "MMACs/token", "tokens/s", "better than fixed",
                   "collapsed")  # fmt: skip
        notes = [
            f"{figures['done']} of {figures['cells']} cells; table.json and picture.svg are in {options.output}."
        ]
        table(f"{options.matrix}", columns, rows, notes)

    return figures, show


def compare(options) -> Any:
    """Models that differ in a few fields, trained alike over seeds: loss, causal rule against Top-K, MACs, K/V."""
    _quieten()
    from .compare import run_comparison
    from .progress import TrainingProgress

    start = time.time()
    figures = run_comparison(options.plan, options.output, options.only, TrainingProgress)
    if options.result:
        _write(options, options.plan, None, time.time() - start, figures)

    def show() -> None:
        def give(row: dict, name: str, form: str) -> str:
            return "" if row.get(name) is None else format(row[name], form)

        rows = [
            (
                row["row"],
                row["seeds"],
                f"{row['parameters']:,}",
                f"{row['loss']:.4f}" + ("" if row["loss_spread"] is None else f" ±{row['loss_spread']:.4f}"),
                give(row, "minus_against", "+.4f"),
                give(row, "over_topk_percent", "+.2f"),
                give(row, "realised", ".3f"),
                f"{row['macs_per_token'] / 1e6:.3f}",
                "" if "kv_share" not in row else f"{100 * row['kv_share']:.1f}",
                f"{row['train_cpu_seconds']:.0f}",
            )
            for row in figures["rows"]
        ]
        columns = ("model", "seeds", "parameters", "loss", f"minus {figures['against']}", "above Top-K %", "realised",
                   "MMACs/token", "K/V %", "training CPU s")  # fmt: skip
        notes = [f"{figures['done']} of {figures['cells']} models; table.json is in {options.output}."]
        table(f"{options.plan}", columns, rows, notes)

    return figures, show


def isoflops(options) -> Any:
    """A looped model beside dense models of the same parameters and of the same arithmetic; the exponent of loops."""
    _quieten()
    from .isoflops import run_isoflops
    from .progress import TrainingProgress

    start = time.time()
    figures = run_isoflops(options.plan, options.output, options.only, TrainingProgress)
    if options.result:
        _write(options, options.plan, None, time.time() - start, figures)

    def show() -> None:
        rows = [
            (
                row["member"],
                row["seeds"],
                f"{row['parameters']:,}",
                f"{row['loss']:.4f}" + ("" if row["loss_spread"] is None else f" ±{row['loss_spread']:.4f}"),
                "" if row["minus_looped"] is None else f"{row['minus_looped']:+.4f}",
                f"{row['macs_per_token'] / 1e6:.3f}",
                f"{row['train_cpu_seconds']:.0f}",
            )
            for row in figures["members"]
        ]
        columns = ("model", "seeds", "parameters", "loss", "minus looped", "MMACs/token", "training CPU s")
        notes = [f"{figures['done']} of {figures['cells']} models; table.json is in {options.output}."]
        if figures["exponent"]:
            notes.insert(
                0,
                "a layer looped r times is worth r^phi layers, phi = {phi} {interval}".format(
                    **figures["exponent"]
                ),
            )
        table(options.plan, columns, rows, notes)

    return figures, show


def report(options) -> Any:
    """One self-contained HTML page about a checkpoint."""
    _quieten()
    if _is_language(options.checkpoint):
        if _is_routed(options.checkpoint):
            from .routed_page import measure_routed as run
            from .routed_page import routed_page as page
        else:
            from .language_page import language_page as page
            from .language_page import measure_language as run
        figures = run(options.checkpoint, options.limit)
        path = Path(options.output or Path(options.checkpoint) / "report.html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(figures), encoding="utf-8")
        return {"report": str(path), **figures}, lambda: print(f"The report is {path}.")
    from .report import measure, write_report

    figures = measure(options.checkpoint, options.limit)
    path = write_report(figures, options.output or Path(options.checkpoint) / "report.html")
    return {"report": str(path), **figures}, lambda: print(f"The report is {path}.")


def demo(options) -> Any:
    """Train a small model live, then show longer-trained ones."""
    _quieten()
    from .demo import demo as run

    return run(options.checkpoint, options.output, options.recipe, options.language)
