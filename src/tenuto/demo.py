"""`tenuto demo`: a small model trained live, a longer-trained one looked at, and a report of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

MARK = ".tenuto-demo"
THRESHOLDS = (0.99, 0.9, 0.7, 0.5, 0.3)
PAIRS = 150  # of each test set
PROMPTS = (
    "It was a dark night, and ",
    "Janet has 12 apples. She gives 5 of them to her friend. How many",
    "def read(path):\n    ",
)


def _find(path: str) -> Path:
    """A file or folder of the project: from the working directory, or beside the source."""
    here = Path(path)
    beside = Path(__file__).parents[2] / path
    return beside if not here.exists() and beside.exists() else here


def _fresh(folder: Path) -> Path:
    """Empties the folder of an earlier demo; refuses one that is not a demo's."""
    if folder.exists() and not (folder / MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not the folder of an earlier demo; choose another --output.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).write_text("made by `tenuto demo`, which empties this folder when it runs again\n")
    return folder


def second_act(folder: Path) -> dict[str, Any]:
    """What the language model in `folder` writes, each token with its loops, at its own threshold."""
    from dataclasses import asdict

    from .evaluate import load
    from .report import made_by
    from .written import write

    loaded = load(folder)
    texts = [write(loaded.model, loaded.tokenizer, prompt, 70) for prompt in PROMPTS]
    return {
        "path": str(folder),
        "command": made_by(folder)["command"],
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "full_depth": loaded.model.config.num_loops,
        "policy": loaded.model.config.policy,
        "texts": [{**asdict(one), "mean_depth": round(one.mean_depth, 3)} for one in texts],
    }


def demo(
    checkpoint: str, output: str, recipe_path: str, language: str
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Trains live, measures `checkpoint` (the live model when there is none), lets `language` write, makes the report.

    Progress is shown as it comes; returns the figures, and what prints the closing tables.
    """
    from .data.logical_inference import protocol
    from .progress import TrainingProgress
    from .recipe import load_recipe
    from .report import made_by, measure, write_report
    from .train import train

    say = Console(stderr=True, highlight=False).print
    start = time.time()
    recipe = load_recipe(_find(recipe_path))
    folder = _fresh(Path(output))
    most = recipe.data.max_operators
    valid = [one for one in protocol(recipe.data.protocol).validation if one.operators <= most]
    always = 100 * sum(one.relation == "#" for one in valid) / len(valid)
    say(f"Live: {recipe.preset} on pairs of at most {most} operators, {recipe.training['max_steps']} steps.")
    with TrainingProgress() as progress:
        trained = train(recipe, folder / "live", progress=progress)
    live = {
        "accuracy": round(trained["validation_accuracy"], 2),
        "always_independent": round(always, 2),
        "pairs": len(valid),
        "seconds": trained["seconds"]["wall"],
        "parameters": trained["parameters"],
    }
    found = _find(checkpoint)
    shipped = found.is_dir()
    source = found if shipped else folder / "live"
    command = made_by(source)["command"] if shipped else None
    say(f"Looking at {source}, {PAIRS} pairs of each test set.")
    figures = measure(source, PAIRS, THRESHOLDS, repeats=2)
    text = (
        f"The demo's own training: at most {most} operators, {live['seconds']:.0f} seconds,"
        f" {live['accuracy']:.1f}% right at the end where always # gets {always:.1f}%."
    )
    extra = {"history": trained["history"], "text": text, "always": always} if shipped else None
    writer = _find(language)
    if writer.is_dir():
        say(f"Second act: {writer} writes.")
        figures["language"] = second_act(writer)
    path = write_report(figures, folder / "report.html", extra)
    result = {
        "live": live,
        "checkpoint": {"path": str(source), "shipped": shipped, "command": command},
        "by_operators": figures["by_operators"],
        "knob": figures["knob"],
        "pairs": figures["pairs"],
        "language": figures.get("language"),
        "seconds": round(time.time() - start, 1),
        "report": str(path),
    }
    return result, lambda: _show(result)


def _show(result: dict[str, Any]) -> None:
    from .verbs.logic import knob_table
    from .verbs.shared import table

    live, checkpoint = result["live"], result["checkpoint"]
    print(
        f"\nTrained live in {live['seconds']:.0f} s: {live['accuracy']:.1f}% of {live['pairs']:,} validation"
        f" pairs, {live['accuracy'] - live['always_independent']:+.1f} points beside always # at"
        f" {live['always_independent']:.1f}%."
    )
    if checkpoint["shipped"]:
        print(f"\n{checkpoint['path']}: trained longer, by\n  {checkpoint['command']}")
    else:
        print("\nThere is no longer-trained checkpoint; the tables are of the model just trained.")
    limits = ", ".join(f"{name}: {few:,} of {many:,}" for name, (few, many) in result["pairs"].items())
    rows = [
        (
            key,
            row["pairs"],
            f"{row['accuracy']:.1f}",
            "{:.1f}..{:.1f}".format(*row["interval"]),
            f"{row['always_independent']:.1f}",
            f"{row['mean']:.2f}",
            f"{row['spread']:.2f}",
        )
        for key, row in result["by_operators"].items()
    ]
    columns = ("operators", "pairs", "right %", "95% interval", "always # %", "mean depth", "spread")
    table("\nBy operator count", columns, rows, [f"Not all pairs were looked at: {limits}."])
    if result["knob"]:
        print()
        knob_table(result["knob"], checkpoint["path"])
    if result["language"]:
        _show_language(result["language"])
    print(f"\nThe report with pictures is {result['report']} ({result['seconds']:.0f} s in all).")


def _show_language(act: dict[str, Any]) -> None:
    from .written import Written, coloured, legend

    console = Console(highlight=False)
    print(
        f"\nSecond act. {act['path']}: {act['parameters']:,} parameters, trained longer, by\n  {act['command']}\n"
    )
    if console.is_terminal:
        console.print(legend(act["full_depth"]))
    for one in act["texts"]:
        said = Written(**{name: one[name] for name in Written.__dataclass_fields__})
        if console.is_terminal:
            console.print(coloured(said))
        else:
            print("".join(said.tokens))
        print(f"-- {said.mean_depth:.2f} of {said.full} loops per token at threshold {said.threshold:g}\n")
