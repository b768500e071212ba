"""Training: transformers' Trainer, with loss terms, depth and routing in the logs, and schedules of depth."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from . import models  # noqa: F401 - registers the architectures
from .collapse import collapse
from .lora import add_lora
from .models.routed import Routed
from .optim import MuonAdamW, parameter_groups
from .presets import build, config_of
from .recipe import Recipe, load_recipe
from .tasks import Task, task_of

logger = logging.getLogger("tenuto")


class NonFiniteLoss(RuntimeError):
    """The loss became infinite or NaN; the message says where and what is left."""


class AdaptiveTrainer(Trainer):
    """Trainer that passes the depth schedule to the model and logs every loss term, depth and expert usage."""

    def __init__(self, *args, recipe: Recipe, task: Task, **kwargs):
        self.recipe, self.task = recipe, task
        self.sums, self.counts = defaultdict(float), defaultdict(int)
        self.totals: dict[str, float] = {}
        self.cpu = time.process_time()
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, train_dataset=None):
        args = self.args
        # a batch of the stream is what all processes and accumulation steps take in one step
        processes = args.world_size * args.gradient_accumulation_steps
        return self.task.sampler(args.max_steps, args.per_device_train_batch_size * processes, args.seed)

    def create_optimizer(self, model=None):
        rate, rates, args = self.recipe.muon_learning_rate, self.recipe.learning_rates, self.args
        # one rule of weight decay for all: the Trainer's own would not know our norms by their names
        if self.optimizer is None and "optim" not in self.recipe.training:
            # an exit head is detached and starts when the others end: its rate follows its own phase
            late = ".policy." if getattr(self.model.config, "policy", None) == "exit_head" else None
            groups = parameter_groups(self.model, rate, args.learning_rate, args.weight_decay, rates, late)
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonAdamW(groups, betas=betas, eps=args.adam_epsilon)
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        first = self.recipe.schedule.halting_from * num_training_steps

        def falling(step: int) -> float:
            return min(1.0, max(0.0, (num_training_steps - step) / max(1.0, num_training_steps - first)))

        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            for place, group in enumerate(self.optimizer.param_groups):
                if group.get("late"):
                    scheduler.lr_lambdas[place] = falling
        return scheduler

    def knobs(self) -> dict:
        """What the schedule says of this step: minimum steps and weights of the losses."""
        schedule, config = self.recipe.schedule, self.model.config
        if getattr(config, "policy", "fixed") == "fixed":
            return {}
        share = self.state.global_step / self.args.max_steps
        if share < schedule.halting_from:
            # nobody is asked, so the penalty has nothing to act on
            return {"min_steps": max(config.num_loops, getattr(config, "num_decoder_loops", 1))}
        if not getattr(config, "act_weight", 0.0):
            return {}
        warm = schedule.act_warmup
        rise = 1.0 if warm == 0 else min(1.0, (share - schedule.halting_from) / warm)
        return {"loss_weights": {"act": config.act_weight * rise}}

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [_counts(batch) for batch in batches]
        self.totals = {term: sum(one[term] for one in counts) / len(counts) for term in counts[0]}
        return batches, items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        knobs = self.knobs()
        if model.training and self.args.gradient_accumulation_steps > 1:
            # means over the accumulated batch, not means of the micro-batches' means
            weights = {"task": 1.0, **self.model.config.loss_weights(), **knobs.get("loss_weights", {})}
            shares = {term: count / self.totals[term] for term, count in _counts(inputs).items()}
            shares |= {name: shares["act"] for name in ("prior", "router", "gate", "forecast")}
            knobs["loss_weights"] = {name: w * shares.get(name, 1.0) for name, w in weights.items()}
        if model.training and isinstance(self.model, Routed):
            self.model.schedule(self.state.global_step / self.args.max_steps)
        out = model(**inputs, **knobs)
        if model.training:
            self._track(out, inputs)
        # the loss of an evaluation is the task's: prices of depth are no part of it, and change during training
        loss = out.loss if model.training else out.losses["task"]
        return (loss, out) if return_outputs else loss

    def evaluate(self, *args, **kwargs):
        # routed layers choose by levels, which move with the weights
        if isinstance(self.model, Routed):
            calibrate_on(self.model, self.task)
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        out = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.task.answers is not None:
            # here and not after: so they stand beside the loss in the logs, and metric_for_best_model knows them
            said = self.task.answers(self.model)
            out.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in said.items()})
        return out

    def _track(self, out, inputs) -> None:
        if not torch.isfinite(out.loss):
            kept = last_checkpoint(Path(self.args.output_dir))
            raise NonFiniteLoss(
                f"The loss is {out.loss.item()} at step {self.state.global_step + 1}"
                f" ({', '.join(f'{name} {value.item():.3g}' for name, value in out.losses.items())})."
                f" {f'The last checkpoint is {kept}.' if kept else 'There is no checkpoint yet.'}"
                " Try a lower learning rate or gradient clipping (training.max_grad_norm)."
            )
        for name, value in out.losses.items():
            self._add(f"loss/{name}", value.item())
        depths = out.depths[out.depths > 0]
        self._add("depth/mean", depths.float().mean().item())
        expected = out.expected_depths[out.depths > 0] if has_distribution(self.model) else None
        if expected is not None:
            self._add("depth/expected", expected.float().mean().item())
        self._watch(depths, expected)
        for depth, share in enumerate((torch.bincount(depths).float() / len(depths)).tolist()):
            self._add(f"depth/share_{depth}", share)
        for name, statistics in (out.balance or {}).items():
            usage = statistics.usage()
            entropy = -(usage * usage.clamp(min=1e-9).log()).sum() / math.log(len(usage))
            self._add(f"experts/{name}/entropy", entropy.item())
            for expert, share in enumerate(usage.tolist()):
                self._add(f"experts/{name}/share_{expert}", share)
        for name, value in (out.signs or {}).items():
            self._add(f"layer/{name}", value.item())
        tokens = _counts(inputs)["act"]
        self._add("tokens", tokens)
        self._add("macs_per_token", out.compute.total / tokens)

    def _watch(self, depths: torch.Tensor, expected: torch.Tensor | None) -> None:
        """Warns, once a log, when tokens may stop but their depths have no spread.

        PonderNet runs every step in training: judged by the means of its distributions, `expected`. An exit head runs
        every step too and has no distribution; it learns from labels, and is judged where it stops tokens, at
        inference (`tenuto depths`).
        """
        stops, config = policies_of(self.model), self.model.config
        policy = stops or expected is not None
        knobs = self.knobs()
        full, floor = (
            config.num_loops if policy else 1,
            knobs.get("min_steps", getattr(config, "min_steps", 1)),
        )
        self._add("depth/spread", depths.float().std(correction=0).item())
        if policy and (self.state.global_step + 1) % self.args.logging_steps == 0:
            judged = depths if stops else expected
            found = collapse(judged.detach().float().cpu().numpy(), floor, full, config.policy)
            schedule = self.recipe.schedule
            # a deep start is at full depth for a while, and means are alike until the halting net has learnt something
            settled = schedule.halting_from + schedule.act_warmup + 0.1
            unripe = found["at_full"] > 0.5 or not stops
            early = unripe and self.state.global_step / self.args.max_steps < settled
            if found["collapsed"] and not early:
                logger.warning("depths have collapsed: %s", found["advice"])

    def _add(self, name: str, value: float) -> None:
        self.sums[name] += value
        self.counts[name] += 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            steps = self.counts["loss/task"]
            # a depth that nobody reached in a step is absent from it: divide by the steps, not by its count
            logs |= {
                name: total / (steps if "share_" in name else self.counts[name])
                for name, total in self.sums.items()
            }
            self.sums.clear()
            self.counts.clear()
        # a resumed run adds to what its history says
        spent = [row["cpu_seconds"] for row in self.state.log_history if "cpu_seconds" in row]
        now = time.process_time()
        logs["cpu_seconds"] = (spent[-1] if spent else 0.0) + now - self.cpu
        self.cpu = now
        super().log(logs, start_time)


CALIBRATION_ROWS = 48


def calibrate_on(model: Routed, task: Task) -> None:
    """Sets the levels of routed layers on rows of the training part, spread evenly over it."""
    places = np.linspace(0, len(task.train) - 1, min(CALIBRATION_ROWS, len(task.train))).astype(int)
    wanted = {"input_ids", "attention_mask", "position_ids", "token_type_ids"}
    if model.config.is_encoder_decoder:
        wanted.add("labels")
    rows = (task.collate or default_data_collator)([task.train[int(place)] for place in places])
    model.calibrate(**{name: value.to(model.device) for name, value in rows.items() if name in wanted})


def policies_of(model) -> bool:
    """Whether tokens of the model may stop in training."""
    return any(getattr(module, "skips_in_training", False) for module in model.modules())


def has_distribution(model) -> bool:
    """Whether the expected depths of the model are means of a halting distribution."""
    return any(getattr(module, "distributes", False) for module in model.modules())


def _counts(inputs: dict) -> dict[str, float]:
    """What the terms of the loss are means over: labels, and tokens of the source."""
    return {
        "task": (inputs["labels"] != -100).sum().item(),
        "act": inputs["attention_mask"].sum().item()
        if "attention_mask" in inputs
        else inputs["input_ids"].numel(),
    }


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that is whole: its state is written last, and a kill may come before."""
    whole = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda one: int(one.name.split("-")[1]))) if whole else None


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
    # a half-precision checkpoint is trained in full, as any model here
    tensors, tied = tensors_of(source.float())
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
