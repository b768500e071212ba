"""The verbs that make checkpoints and training files: train, prepare, convert, average."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from .shared import UsageError, given, quieten, write

PRINT_CONFIG = "--print_config"
_PREPARE = {"input": "the folder of the published files, or hf: and a set's name", "output": "a folder"}
_CONVERT = {"to": "looped, sdt, stt or mod", "output": "the folder for the converted model"}


def train(options) -> Any:
    """Train what a recipe describes."""
    from dataclasses import asdict

    from ..recipe import load_recipe

    recipe = load_recipe(options.recipe, [word for word in options.overrides if word != PRINT_CONFIG])
    if PRINT_CONFIG in options.overrides:
        import yaml

        settings = asdict(recipe)
        return settings, lambda: print(yaml.safe_dump(settings, sort_keys=False), end="")
    if not options.output:
        raise UsageError("--output is missing: the folder for the model, its logs and checkpoints.")
    quieten()
    from ..progress import TrainingProgress
    from ..train import train as run

    start = time.time()
    with TrainingProgress() as progress:
        figures = run(recipe, options.output, options.resume, progress)
    if int(os.environ.get("RANK", 0)):
        # of several processes the first alone writes and speaks
        sys.stdout = open(os.devnull, "w")
        return figures, lambda: None
    if "validation_accuracy" in figures:
        figures["accuracy"] = {"validation": round(figures["validation_accuracy"], 2)}
    seed = recipe.training.get("seed", 0)
    for path in {str(Path(options.output) / "result.json"), options.result} - {None}:
        options.result = path
        write(options, options.recipe, seed, time.time() - start, figures, settings=asdict(recipe))

    def show() -> None:
        if "accuracy" in figures:
            quality = f"accuracy {figures['validation_accuracy']:.1f}%"
        else:
            quality = f"loss {figures['validation_loss']:.3f} nats a token"
        if "validation_exact" in figures:
            quality += f", {figures['validation_exact']:.1f}% of the answers exact"
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
            raise UsageError(f"--{name} is missing: {_PREPARE[name]}.")
    quieten()
    from ..data.wmt14 import prepare as run

    figures = run(options.input, options.output, **given(options, "vocab_size"))

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
    quieten()
    from ..convert import convert_folder

    chosen = given(options, "prelude", "coda", "loops", "injection", "routed")
    if "routed" in chosen:
        try:
            chosen["routed"] = [int(layer) for layer in options.routed.split(",")]
        except ValueError:
            raise UsageError(f"--routed: {options.routed!r} is not a list of layers such as 1,3,5.") from None
    start = time.time()
    figures = convert_folder(options.source, options.to, options.output, options.gguf, options.seed, **chosen)
    options.result = str(Path(options.output) / "result.json")
    write(options, None, options.seed, time.time() - start, figures)

    def show() -> None:
        neutral = ", ".join(f"{name}={value!r}" for name, value in figures["neutral"].items())
        print(
            f"{figures['parameters']:,} parameters, {figures['new_parameters']:,} of them new: with {neutral} the"
            f" logits of {figures['checked_tokens']} tokens differ by {figures['difference']:.1e} at most from the"
            f" source's ({figures['dtype']}). Everything is in {options.output}."
        )

    return figures, show


def average(options) -> Any:
    """Average the weights of several checkpoints of one config."""
    if not options.output:
        raise UsageError("--output is missing: the folder for the averaged model.")
    if options.best is not None and len(options.checkpoints) > 1:
        raise UsageError("--best chooses among the checkpoints of one run: name its folder alone.")
    quieten()
    from ..average import average_checkpoints, best_checkpoints

    start, folders = time.time(), options.checkpoints
    if options.best is not None:
        folders = best_checkpoints(folders[0], options.best)
    figures = average_checkpoints(folders, options.output)
    options.result = str(Path(options.output) / "result.json")
    write(options, None, None, time.time() - start, figures)

    def show() -> None:
        names = ", ".join(figures["checkpoints"])
        print(f"The mean of {names} ({figures['parameters']:,} parameters) is in {options.output}.")

    return figures, show
