"""Evaluation of causal language models on tasks of lm-evaluation-harness: accuracy beside depth and MACs.

`evaluate_lm` runs the shipped tasks (harness_tasks.py). Other tasks of lm-eval run through `AdaptiveLM`, which is one
of its models. Needs the extra `tenuto[eval]`; lm-eval is imported when first used.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .forward import Cost, batches, check_knobs, cost_figures, prefix_token, run, wide
from .harness_tasks import build_tasks, need_lm_eval
from .language import realised

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task

CHANCE = {"blimp": 50.0, "mmlu": 25.0}


def __getattr__(name: str):
    if name == "AdaptiveLM":
        return _adaptive_lm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def evaluate_lm(
    model,
    tokenizer,
    tasks: Sequence[str] = ("blimp",),
    thresholds: Sequence[float | None] = (None,),
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 16,
    subjects: Sequence[str] = (),
    max_length: int | None = None,
    log_samples: bool = False,
    capacities: Sequence[float] = (),
    **knobs,
) -> dict[str, Any]:
    """Accuracy, depth and MACs of a causal model on tasks (`build_tasks` names them), a row for each threshold or,
    where they are given, capacity.

    thresholds: None leaves the model's own. limit: the first documents of each task only. knobs: min_steps,
    max_steps, or selection. Of each task and group: accuracy, its standard error and chance level in percent, samples,
    mean depth (loops, or layers run) of the tokens run, MACs per token run and per sample. None where the model tells
    no depth or MACs. capacity_realised: of a routed model. seconds: of forward passes. truncated: requests cut short
    at the left because they did not fit. log_samples: lm-eval's record of each sample too, with tokens, depth_mean and
    macs. ValueError for an unknown task or knob.
    """
    need_lm_eval()
    from lm_eval.evaluator import evaluate

    for one, several in (("threshold", "thresholds"), ("capacity", "capacities")):
        if one in knobs:
            raise ValueError(f"Give {several}=({knobs[one]},) in place of {one}.")
    name, values = ("capacity", capacities) if capacities else ("threshold", thresholds)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 document, not {limit}.")
    for value in values:
        check_knobs(model, {**knobs, name: value})
    training, rows = model.training, []
    with _quiet():
        built, groups = build_tasks(tasks, num_fewshot, subjects)
        for value in values:
            title = "evaluation" if value is None else f"evaluation, {name} {value:g}"
            try:
                lm = _adaptive_lm()(model, tokenizer, batch_size, max_length, title, **{name: value}, **knobs)
                said = evaluate(lm, {"tasks": built, "groups": groups}, limit=limit, log_samples=log_samples)
            finally:
                model.train(training)
            row = _figures(lm, said, built, groups)
            share = realised(model.config, row["depth_mean"])
            rows.append({name: value, **({} if share is None else {"capacity_realised": share}), **row})
    return {
        "tasks": list(tasks),
        "limit": limit,
        "batch_size": batch_size,
        "num_fewshot": {name: task.config.num_fewshot for name, task in built.items()},
        "knobs": knobs,
        "rows": rows,
    }


def _figures(lm, said: dict, tasks: dict[str, Task], groups: dict[str, Group]) -> dict[str, Any]:
    spent = defaultdict(lambda: defaultdict(list))
    for (task, document, _), cost in lm.costs.items():
        spent[task][document].append(cost)

    def figures(name: str, parts: list[str]) -> dict[str, Any]:
        found = said["results"][name]
        samples = sum(len(spent[part]) for part in parts)
        stderr = found["acc_stderr,none"]
        return {
            "accuracy": round(100 * float(found["acc,none"]), 2),
            "stderr": None if stderr == "N/A" else round(100 * float(stderr), 2),
            "chance": CHANCE[name.partition("_")[0]],
            "samples": samples,
            **per_token_and_sample(parts, samples),
        }

    def per_token_and_sample(parts: Iterable[str], samples: int) -> dict[str, float | None]:
        # a row shared by samples (two documents alike) was run once
        cost = cost_figures(one for part in parts for costs in spent[part].values() for one in costs)
        macs = cost["macs"]
        return {
            "depth_mean": cost["depth_mean"],
            "macs_per_token": None if macs is None else macs // cost["tokens"],
            "macs_per_sample": None if macs is None else macs // samples,
        }

    samples = sum(map(len, spent.values()))
    row = {
        "groups": {name: figures(name, group.child_names) for name, group in groups.items()},
        "tasks": {name: figures(name, [name]) for name in tasks},
        **per_token_and_sample(tasks, samples),
        "samples": samples,
        "requests": len(lm.costs),
        "rows_run": lm.rows,
        "truncated": lm.truncated,
        "seconds": round(lm.seconds, 3),
    }
    if "samples" in said:
        row["samples_by_task"] = {
            name: [{**sample, **cost_figures(spent[name][sample["doc_id"]])} for sample in records]
            for name, records in said["samples"].items()
        }
    return row


@cache
def _adaptive_lm():
    need_lm_eval()
    from lm_eval.models.huggingface import HFLM

    class AdaptiveLM(HFLM):
        """A loaded causal model as a model of lm-eval, with depth knobs and what each request cost.

        knobs: threshold, min_steps, max_steps, or capacity, threshold, selection of a routed model, passed to the
        model's forward where they are not None. title: of the
        progress bar on stderr, None for no bar. max_length: tokens of a row, the config's when None; a longer
        request loses its left end. The model is put into evaluation mode. ValueError for a knob that the model
        lacks, or a tokenizer without BOS and EOS.

        costs: {(task, document, request of the document): Cost} of all log-likelihoods asked for. Requests whose
        model input is the same (the four letters of a question) are run once and share one Cost. rows, truncated,
        seconds: rows run, requests cut short, seconds of forward passes.
        """

        def __init__(
            self,
            model,
            tokenizer,
            batch_size: int = 16,
            max_length: int | None = None,
            title: str | None = None,
            **knobs,
        ):
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ValueError(f"batch_size must be a positive whole number, not {batch_size!r}.")
            prefix_token(tokenizer)
            self.knobs, self.title = check_knobs(model, knobs), title
            self.costs: dict[tuple[str, int, int], Cost] = {}
            self.rows, self.truncated, self.seconds = 0, 0, 0.0
            # a copy, for HFLM gives the tokenizer a pad token
            super().__init__(
                model,
                backend="causal",
                tokenizer=deepcopy(tokenizer),
                batch_size=batch_size,
                max_length=max_length,
            )
            # its length is known; the copy need not warn of prompts that will be cut
            self._max_length, self.tokenizer.model_max_length = self.max_length, int(1e30)

        def loglikelihood(self, requests, disable_tqdm: bool = False):
            """[(log-probability, is greedy)] of requests (context, continuation), in their order."""
            answers = super().loglikelihood(requests, disable_tqdm=True)
            for request, cost in zip(requests, self._last, strict=True):
                self.costs[request.task_name, request.doc_id, request.idx] = cost
            return answers

        def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
            # HFLM's own gives the model no attention mask: pads would be given depth, and billed
            askers: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for place, (_, context, continuation) in enumerate(requests):
                whole = [*context, *continuation]
                if not 0 < len(continuation) <= self.max_length:
                    raise ValueError(
                        f"A continuation has {len(continuation)} tokens; it must have 1 to {self.max_length}."
                    )
                self.truncated += len(whole) > self.max_length + 1
                askers[tuple(whole[-(self.max_length + 1) : -1])].append(place)
            # the longest first: memory runs out at once or never
            ordered = sorted(askers, key=lambda row: (-len(row), row))
            answers, costs = [None] * len(requests), [None] * len(requests)
            for batch in batches(ordered, override_bs or self.batch_size, self.title):
                logits, spent, seconds = run(self.model, batch, self.knobs)
                self.rows, self.seconds = self.rows + len(batch), self.seconds + seconds
                for row, scores, cost in zip(batch, logits, spent, strict=True):
                    for place in askers[row]:
                        wanted = torch.tensor(requests[place][2], device=scores.device)
                        said = wide(scores[len(row) - len(wanted) : len(row)]).log_softmax(-1)
                        greedy = bool((said.argmax(-1) == wanted).all())
                        answers[place] = (float(said.gather(-1, wanted[:, None]).sum()), greedy)
                        costs[place] = cost
            self._last = costs
            return answers

        def _model_call(self, inps, attn_mask=None, labels=None):
            with torch.no_grad():
                return self.model(input_ids=inps, attention_mask=attn_mask, **self.knobs).logits

        def _model_generate(self, context, max_length, stop, **generation_kwargs):
            return super()._model_generate(context, max_length, stop, **generation_kwargs, **self.knobs)

    return AdaptiveLM


@contextmanager
def _quiet():
    # lm-eval logs its choices, and shows one bar for every task
    from lm_eval.api import task

    log, bar = logging.getLogger("lm_eval"), task.tqdm
    level = log.level
    log.setLevel(logging.ERROR)
    task.tqdm = lambda documents, **_: documents
    try:
        yield
    finally:
        log.setLevel(level)
        task.tqdm = bar
