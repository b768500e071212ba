"""Transformers' Trainer with loss terms, depth and routing in the logs, and schedules of depth."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from transformers import Trainer, default_data_collator

from .collapse import collapse
from .models.routed import Routed
from .optim import MuonAdamW, parameter_groups
from .recipe import Recipe
from .tasks import Task

logger = logging.getLogger("tenuto")


class NonFiniteLoss(RuntimeError):
    """The loss became infinite or NaN; the message says where and what is left."""


class AdaptiveTrainer(Trainer):
    """Trainer that passes the depth schedule to the model and logs every loss term, depth and expert usage."""

    def __init__(self, *args, recipe: Recipe, task: Task, **kwargs):
        self.recipe, self.task = recipe, task
        self.sums, self.counts = defaultdict(float), defaultdict(int)
        self.totals: dict[str, float] = {}
        # of an evaluation: sum of the loss over labels, and their number
        self.judged = torch.zeros(2, dtype=torch.float64)
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
        if not model.training:
            count = _counts(inputs)["task"]
            self.judged += torch.tensor([float(loss) * count, count], dtype=torch.float64)
        return (loss, out) if return_outputs else loss

    def evaluate(self, *args, **kwargs):
        # routed layers choose by levels, which move with the weights
        if isinstance(self.model, Routed):
            calibrate_on(self.model, self.task)
        return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        self.judged = torch.zeros(2, dtype=torch.float64)
        out = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        # the mean over labels: batches have unlike many, and those of short sequences would weigh as much as the others
        total, count = self.judged.tolist()
        if self.args.world_size > 1:
            total, count = self.accelerator.reduce(self.judged.float().to(self.args.device), "sum").tolist()
        # where a sequence's first label is no target, as in a language model, the rows are of one length
        if count and self.recipe.head == "text-to-text":
            out.metrics[f"{metric_key_prefix}_loss"] = total / count
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
