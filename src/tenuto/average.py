"""The mean of the weights of several checkpoints, and the choice of a run's best ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from . import models

# of a config, what says how it was saved and not what the model is
_BOOKKEEPING = {"_name_or_path", "dtype", "transformers_version"}


def best_checkpoints(run: str | Path, count: int) -> list[Path]:
    """The `count` checkpoints of a run of `tenuto train` that did best on the validation part, the best first.

    By exact match where the training measured it (compositional tasks), else, and between equals, by loss.

    ValueError when so many measured ones are not there: training.eval_strategy and save_strategy must be alike, and
    training.save_total_limit large enough.
    """
    folders = {
        int(one.parent.name.split("-")[1]): one for one in Path(run).glob("checkpoint-*/trainer_state.json")
    }
    history = json.loads(folders[max(folders)].read_text())["log_history"] if folders else []
    ranks = {
        row["step"]: (-row.get("eval_exact", 0.0), row["eval_loss"])
        for row in history
        if "eval_loss" in row and row["step"] in folders
    }
    if not 1 <= count <= len(ranks):
        raise ValueError(
            f"{run} holds {len(ranks)} checkpoints with a validation loss, and {count} are wanted."
        )
    return [folders[step].parent for step in sorted(ranks, key=ranks.get)[:count]]


def average_checkpoints(folders: Sequence[str | Path], output: str | Path) -> dict[str, Any]:
    """Writes the mean of the checkpoints' weights into the folder `output`; tokenizer and recipe are the first one's.

    Means are taken in float64. Returns the checkpoints' names and the number of parameters. FileNotFoundError for a
    folder without a model, FileExistsError when the output holds one, ValueError when configs differ.
    """
    output, folders = Path(output), [Path(one) for one in folders]
    if (output / "config.json").is_file():
        raise FileExistsError(f"{output} holds a model already; choose another --output.")
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} is not a checkpoint: it has no config.json.")
    first, *others = folders
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in folders]
    for folder, config in zip(others, configs[1:], strict=True):
        for name in sorted({*config, *configs[0]} - _BOOKKEEPING):
            before, after = configs[0].get(name), config.get(name)
            if before != after:
                raise ValueError(
                    f"{first} has {name}={before!r} and {folder} has {after!r}: only checkpoints of one config"
                    " have a mean."
                )
    kind = getattr(models, configs[0]["architectures"][0])
    model = kind.from_pretrained(first)
    total = {name: weight.double() for name, weight in model.state_dict().items()}
    for folder in others:
        for name, weight in kind.from_pretrained(folder).state_dict().items():
            total[name] += weight
    weights = model.state_dict()
    with torch.no_grad():
        for name, weight in total.items():
            weights[name].copy_(weight / len(folders))
    model.save_pretrained(output)
    if (first / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(first).save_pretrained(output)
    # a checkpoint within a run has its recipe one folder above
    for recipe in (first / "recipe.yaml", first.parent / "recipe.yaml"):
        if recipe.is_file():
            shutil.copy(recipe, output / "recipe.yaml")
            break
    return {"checkpoints": [str(one) for one in folders], "parameters": model.num_parameters()}
