"""What all verbs share: tables, lists and knobs from the options, what a checkpoint is, result files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SELECTIONS = ("threshold", "running", "topk", "dense")  # models/routing.py
_TEXT = ("paper", "most specific tokens (PMI, nats)")  # columns of words


class UsageError(Exception):
    """The words do not make a command: exit code 2."""


def quieten() -> None:
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


def shown(row: dict[str, Any], name: str, form: str) -> str:
    """A figure of a row in this format; "" where the row has none."""
    return "" if row.get(name) is None else format(row[name], form)


def numbers(text: str) -> list[float]:
    """The numbers of a list such as 0.9,0.5; ValueError if it is none."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers such as 0.9,0.5.") from None


def in_unit(
    values: Sequence[float], name: str = "threshold", kind: str = "a share of halting mass"
) -> Sequence[float]:
    """The values; ValueError where one lies outside 0..1."""
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"The {name} {value:g} lies outside 0..1: it is {kind}.")
    return values


def names(text: str | None) -> list[str]:
    """The names of a list such as 7,8; none where the option was left out."""
    return [name for name in (text or "").split(",") if name]


def settings_of(checkpoint: str) -> dict[str, Any]:
    """What a checkpoint's config.json says; {} where there is none."""
    config = Path(checkpoint) / "config.json"
    return json.loads(config.read_text()) if config.is_file() else {}


def _recipe_of(checkpoint: str) -> dict[str, Any] | None:
    """What a checkpoint's recipe.yaml says; None where there is none."""
    recipe = Path(checkpoint) / "recipe.yaml"
    if not recipe.is_file():
        return None
    import yaml

    return yaml.safe_load(recipe.read_text())


def is_language(checkpoint: str) -> bool:
    """Whether a folder holds a causal language model of `tenuto train` or `tenuto convert`."""
    recipe = _recipe_of(checkpoint)
    if recipe is None:
        made = settings_of(checkpoint)
        causal = any(name.endswith("ForCausalLM") for name in made.get("architectures") or ())
        return causal and made.get("model_type", "").startswith("tenuto")
    return recipe.get("head") == "causal"


def is_sequences(checkpoint: str) -> bool:
    """Whether a folder holds a model of `tenuto train` for sequences or parallel text."""
    data = (_recipe_of(checkpoint) or {}).get("data") or {}
    return any(data.get(name) is not None for name in ("sequences", "parallel"))


def is_routed(checkpoint: str) -> bool:
    """Whether a checkpoint's layers take some of the tokens (mod, sdt, stt)."""
    return "routed_layers" in settings_of(checkpoint)


def given(options, *names: str) -> dict[str, Any]:
    """Those of the options that were given, with their values."""
    chosen = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in chosen.items() if value is not None}


def refuse(options, names: Sequence[str]) -> None:
    """Refuses those of the flags that have nothing to set for this checkpoint."""
    routed = is_routed(options.checkpoint)
    if (idle := list(given(options, *names))) and settings_of(options.checkpoint):
        kind = "routes tokens by capacity" if routed else "has no routed layers"
        own = ("capacity", "selection", "threshold") if routed else ("threshold", "min_steps", "max_steps")
        raise ValueError(
            f"{options.checkpoint} {kind}, so --{idle[0]} has nothing to set; its knobs are"
            f" {', '.join(f'--{name}' for name in own)}."
        )


def depth_knobs(options) -> dict[str, Any]:
    """The knobs that were given, those of looped models or of routed ones; refused where they are the other's."""
    if not is_routed(options.checkpoint):
        refuse(options, ("capacity", "selection", "capacities"))
        return given(options, "threshold", "min_steps", "max_steps")
    refuse(options, ("max_steps", "min_steps", "policy", "thresholds"))
    chosen = given(options, "capacity", "selection", "threshold")
    if "capacity" in chosen:
        in_unit([chosen["capacity"]], "capacity", "a share of the tokens")
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


def knobs_of(options) -> dict[str, Any]:
    """The depth knobs that were given; refused for a checkpoint whose tokens all run every step."""
    chosen, settings = depth_knobs(options), settings_of(options.checkpoint)
    if "routed_layers" in settings:
        return chosen
    if "threshold" in chosen:
        in_unit([chosen["threshold"]])
    if settings.get("policy", "fixed") == "fixed":
        # a loop of fixed depth can still be cut short or run longer
        useless = [name for name in chosen if name != "max_steps" or "num_loops" not in settings]
        if useless and settings:
            raise ValueError(
                f"{options.checkpoint} has a fixed depth, so --{useless[0]} has nothing to set;"
                " it needs policy stick_breaking."
            )
    return chosen


def write(options, recipe: str | None, seed: int | None, seconds: float, figures: dict, **more) -> None:
    """Writes the result file --result."""
    from ..results import write_result

    write_result(
        Path(options.result),
        recipe=recipe,
        command=options.command,
        seed=seed,
        seconds=seconds,
        figures=figures,
        **more,
    )


def write_for_checkpoint(options, seconds: float, figures: dict) -> None:
    """Writes the result file --result, where it is asked for, with the command that made the checkpoint."""
    from ..report import made_by

    if options.result:
        made = made_by(options.checkpoint)
        write(options, made["recipe"], made["seed"], seconds, figures, made_by=made["command"])
