"""A training run: from a recipe to a folder, begun from other weights or resumed (trainer.py has its steps)."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from . import models  # noqa: F401 - registers the architectures
from .lora import add_lora
from .presets import build, config_of
from .recipe import Recipe, load_recipe
from .tasks import task_of
from .trainer import AdaptiveTrainer, last_checkpoint


def start_from(model, checkpoint: str) -> None:
    """Loads a checkpoint's weights; only halting net and routers may be missing, nothing may be left over."""
    file = Path(checkpoint) / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"There is no checkpoint {checkpoint} (looked for {file}).")
    weights = load_file(file)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [name for name, tensor in weights.items() if shapes.get(name) != tensor.shape]
    tied = getattr(model, "all_tied_weights_keys", {})
    new = (".policy.", ".routers.")
    missing = [
        name
        for name in shapes
        if name not in weights and name not in tied and not any(n in name for n in new)
    ]
    if wrong or missing:
        raise ValueError(
            f"{checkpoint} is of another config: {len(wrong)} weights do not fit"
            f" ({', '.join(wrong[:3]) or 'none'}), {len(missing)} are missing ({', '.join(missing[:3]) or 'none'})."
        )
    model.load_state_dict(weights, strict=False)
    model.tie_weights()


def start_converted(model, recipe: Recipe) -> None:
    """Loads the weights of a pretrained model of transformers into a model made for them."""
    from .convert import fill, read, target_config, tensors_of

    source, _ = read(recipe.start)
    tensors, tied = tensors_of(source)
    # a half-precision checkpoint is trained in full, as any model here; what a GGUF gave refuses source.float()
    tensors = {name: one.float() for name, one in tensors.items()}
    fill(model, tensors, target_config(source.config, tied=tied, **recipe.convert)[1])


def same_recipe(recipe: Recipe, output: Path) -> None:
    """Refuses to go on with another recipe than the run began with, naming what differs."""
    began, now = load_recipe(output / "recipe.yaml"), recipe
    for field in fields(Recipe):
        before, after = getattr(began, field.name), getattr(now, field.name)
        if before != after:
            raise ValueError(
                f"{output} was begun with another {field.name} ({before}); a resumed run keeps its recipe."
            )


def train(
    recipe: Recipe, output: str | Path, resume: bool = False, progress: TrainerCallback | None = None
) -> dict:
    """Runs a recipe into the folder `output`; with `resume`, goes on from its last checkpoint.

    `progress` takes the place of transformers' own bars and printed dictionaries.

    The folder holds the final model, its tokenizer, the recipe, `training.json` (figures) and TensorBoard logs.
    """
    output = Path(output)
    last = last_checkpoint(output)
    if (output / "training.json").is_file() and not resume:
        raise FileExistsError(f"{output} holds a finished run; choose another --output.")
    if last and not resume:
        raise FileExistsError(
            f"{output} holds checkpoints of an earlier run; add --resume to go on, or choose another --output."
        )
    if last and resume:
        same_recipe(recipe, output)
    refused = sorted(
        {"output_dir", "label_smoothing_factor", "train_sampling_strategy"} & set(recipe.training)
    )
    if refused:
        raise ValueError(
            f"training.{refused[0]} has no effect here: the folder is --output, smoothing is"
            " config.label_smoothing, and the curriculum draws the batches."
        )
    own = [name for name in ("muon_learning_rate", "learning_rates") if getattr(recipe, name)]
    if own and "optim" in recipe.training:
        raise ValueError(f"training.optim and {own[0]} both choose the optimizer; give one of them.")
    unknown = sorted(set(recipe.training) - {field.name for field in fields(TrainingArguments)})
    if unknown:
        raise ValueError(f"training.{unknown[0]} is not an argument of transformers' TrainingArguments.")
    defaults = {
        "per_device_eval_batch_size": 256,
        "logging_steps": 50,
        "save_total_limit": 2,
        "report_to": "tensorboard",
        "seed": 0,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "remove_unused_columns": False,
        # a language model is judged by its loss; its logits over all validation text would not fit
        "prediction_loss_only": recipe.data.text is not None,
        "disable_tqdm": not sys.stderr.isatty(),
    }
    args = TrainingArguments(output_dir=str(output), **{**defaults, **recipe.training})
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs by torchrun; DataParallel cannot gather a ledger
    set_seed(args.seed)
    task = task_of(recipe)
    config = config_of(recipe, vocab_size=task.vocabulary)
    if config.vocab_size < task.vocabulary:
        raise ValueError(
            f"config.vocab_size={config.vocab_size} is below the tokenizer's {task.vocabulary} tokens."
        )
    model = build(config, recipe.head)
    if recipe.convert:
        start_converted(model, recipe)
    elif recipe.start:
        start_from(model, recipe.start)
    size = sum(p.numel() for p in model.parameters())
    tuner = add_lora(model, recipe.lora) if recipe.lora else None
    more = {} if task.collate is None else {"data_collator": task.collate}
    measure = task.measure

    def figures_of(prediction) -> dict[str, float]:
        logits = prediction.predictions
        return measure(logits[0] if isinstance(logits, tuple) else logits, prediction.label_ids)

    trainer = AdaptiveTrainer(
        model=model,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.validation,
        processing_class=task.tokenizer,
        compute_metrics=None if measure is None else figures_of,
        recipe=recipe,
        task=task,
        **more,
    )
    if progress is not None:
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(progress)
    output.mkdir(parents=True, exist_ok=True)
    if trainer.is_world_process_zero():
        recipe.save(output)
    wall = time.time()
    trainer.train(resume_from_checkpoint=last)
    spent = [row["cpu_seconds"] for row in trainer.state.log_history if "cpu_seconds" in row]
    # wall clock of this call; processor time of all calls, evaluation during training included
    seconds = {"wall": time.time() - wall, "cpu": spent[-1] if spent else 0.0}
    metrics = trainer.evaluate()
    if tuner is not None:
        tuner.merge_and_unload()
    trainer.save_model()
    quality = {"validation_loss": metrics["eval_loss"]}
    if "eval_accuracy" in metrics:
        quality = {"validation_accuracy": 100 * metrics["eval_accuracy"]}
    if "eval_exact" in metrics:
        quality["validation_exact"] = 100 * metrics["eval_exact"]
    figures = {
        **quality,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "resumed": bool(last),
        "parameters": size,
        "history": [
            {
                key: row[key]
                for key in row
                if key in ("step", "loss", "eval_accuracy", "eval_exact", "eval_loss", "depth/mean")
                or key.startswith(("layer/", "depth/expected"))
            }
            for row in trainer.state.log_history
        ],
    }
    if trainer.is_world_process_zero():
        draft = output / "training.part"
        draft.write_text(json.dumps(figures, indent=1) + "\n")
        draft.replace(output / "training.json")
    return figures
