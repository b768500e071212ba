"""Evaluation of causal language models: tasks of lm-evaluation-harness on shipped data, and perplexity of files.

Tasks need the extra `tenuto[eval]`; lm-eval is imported when one is first used. Perplexity needs no extra. Other
tasks of lm-eval run through `AdaptiveLM`, which is one of its models.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F

from .language import realised

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task

DATA = Path(__file__).parent / "data"
CHANCE = {"blimp": 50.0, "mmlu": 25.0}


def __getattr__(name: str):
    if name == "AdaptiveLM":
        return _adaptive_lm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# one forward pass


@dataclass(frozen=True)
class Cost:
    """What one row of tokens cost: the steps (loops; of a routed model, layers run) and MACs of its tokens, None where
    the model does not tell them.
    """

    tokens: int
    steps: int | None
    macs: int | None


def cost_figures(costs: Iterable[Cost]) -> dict[str, float | None]:
    """Tokens run, their mean depth and all MACs of rows; a row that answered several requests counts once."""
    rows = list({id(cost): cost for cost in costs}.values())
    tokens = sum(row.tokens for row in rows)
    known = {name: [getattr(row, name) for row in rows] for name in ("steps", "macs")}
    total = {name: None if not rows or None in values else sum(values) for name, values in known.items()}
    depth = None if total["steps"] is None else round(total["steps"] / tokens, 4)
    return {"tokens": tokens, "depth_mean": depth, "macs": total["macs"]}


def check_knobs(model, knobs: dict[str, Any]) -> dict[str, Any]:
    """The knobs that are set; ValueError when the model's forward does not name one of them, or its stack has it not.

    A stock transformers model would swallow the argument and run as ever.
    """
    knobs = {name: value for name, value in knobs.items() if value is not None}
    own = getattr(getattr(model, "stack", None), "knobs", None)
    for name in knobs:
        if own is not None and name not in own:
            raise ValueError(f"{type(model).__name__} has no knob {name!r}; its knobs are {', '.join(own)}.")
        if name not in inspect.signature(model.forward).parameters:
            raise ValueError(f"{type(model).__name__} has no knob {name!r}: its forward does not take it.")
    return knobs


def prefix_token(tokenizer) -> int:
    """The token before the first of a text: BOS, else EOS; ValueError when the tokenizer has neither."""
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ValueError(
            "The tokenizer has neither a BOS nor an EOS token: nothing stands before the first token of a text."
        )
    return token


@torch.no_grad()
def run(model, rows: Sequence[Sequence[int]], knobs: dict[str, Any]):
    """Logits [B, T, vocabulary] and costs of B rows of token ids, padded and masked on the right; and the seconds."""
    device = next(model.parameters()).device
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = torch.tensor(row), 1
    ids, mask = ids.to(device), mask.to(device)
    before = _now(device)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, **knobs)
    seconds = _now(device) - before
    depths, ledger = getattr(out, "depths", None), getattr(out, "compute", None)
    steps = [None] * len(rows) if depths is None else (depths * mask).sum(-1).tolist()
    macs = [None] * len(rows) if ledger is None else ledger.per_sequence.tolist()
    costs = [Cost(len(row), *spent) for row, *spent in zip(rows, steps, macs, strict=True)]
    return out.logits, costs, seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _batches(rows: Sequence, size: int, title: str | None) -> Iterable:
    bar = Console(stderr=True)
    starts = range(0, len(rows), size)
    hidden = title is None or not bar.is_terminal
    for start in track(starts, title or "", console=bar, transient=True, disable=hidden):
        yield rows[start : start + size]


# the model, as lm-eval sees it


@cache
def _adaptive_lm():
    _need_lm_eval()
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
            for batch in _batches(ordered, override_bs or self.batch_size, self.title):
                logits, spent, seconds = run(self.model, batch, self.knobs)
                self.rows, self.seconds = self.rows + len(batch), self.seconds + seconds
                for row, scores, cost in zip(batch, logits, spent, strict=True):
                    for place in askers[row]:
                        wanted = torch.tensor(requests[place][2], device=scores.device)
                        said = _wide(scores[len(row) - len(wanted) : len(row)]).log_softmax(-1)
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


def _need_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError("Tasks need lm-evaluation-harness: pip install 'tenuto[eval]'.") from error


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


# the tasks


@cache
def _read(name: str) -> list[dict]:
    folder, file = (DATA / "files" / name).parent, (DATA / "files" / name).name
    recorded = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    packed = (folder / file).read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != recorded.get(file):
        raise ValueError(
            f"{name} is not the published file: its SHA-256 is {found}, but SHA256SUMS records"
            f" {recorded.get(file, 'nothing')}; restore the file"
        )
    return [json.loads(line) for line in gzip.decompress(packed).decode().split("\n") if line]


@cache
def _yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((DATA / "tasks" / f"{name}.yaml").read_text())


def _by(key: str, rows: list[dict]) -> dict[str, list[dict]]:
    parts = defaultdict(list)
    for row in rows:
        parts[row[key]].append(row)
    return dict(parts)


@cache
def blimp() -> dict[str, list[dict]]:
    """The 1,000 minimal pairs of each of BLiMP's 67 paradigms; ValueError when the file is not the recorded one."""
    return _by("UID", _read("blimp/blimp.jsonl.gz"))


@cache
def mmlu(split: str = "test") -> dict[str, list[dict]]:
    """The questions of each of MMLU's 57 subjects: split dev (5 each), val or test; ValueError as `blimp`."""
    if split not in ("dev", "val", "test"):
        raise ValueError(f"MMLU has no split {split!r}; it has dev, val, test.")
    return _by("subject", _read(f"mmlu/mmlu_{split}.jsonl.gz"))


def mmlu_categories() -> dict[str, list[str]]:
    """The subjects of MMLU's categories stem, humanities, social_sciences and other."""
    return _yaml("mmlu_categories")


def build_tasks(
    names: Sequence[str], num_fewshot: int | None = None, subjects: Sequence[str] = ()
) -> tuple[dict[str, Task], dict[str, Group]]:
    """Tasks and groups of lm-eval, as its `evaluate(lm, {"tasks": ..., "groups": ...})` takes them.

    names: `blimp` (mean of 67 paradigms), `blimp_{paradigm}`, `mmlu` (57 subjects, mean over all questions),
    `mmlu_{category}`, `mmlu_{subject}`. num_fewshot: examples in MMLU's prompts, 0 to 5, 5 when None; BLiMP has none.
    subjects: the subjects and categories that `mmlu` is narrowed to. ValueError when a name is unknown.
    """
    _need_lm_eval()
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    if num_fewshot is not None and not 0 <= num_fewshot <= 5:
        raise ValueError(f"num_fewshot must be 0 to 5, MMLU's examples of a subject, not {num_fewshot}.")
    members = _members(names, subjects)
    tasks = {name: _task(name, num_fewshot) for group in members.values() for name in group}
    groups = {}
    for name, parts in members.items():
        if name in parts:
            continue
        # paradigms weigh alike; a subject weighs as many questions as it has
        mean = AggMetricConfig(metric="acc", weight_by_size=name != "blimp")
        groups[name] = Group(name, aggregate_metric_list=[mean])
        for part in parts:
            groups[name].add(tasks[part])
    return tasks, groups


def _members(names: Sequence[str], subjects: Sequence[str]) -> dict[str, list[str]]:
    """The tasks of each name: of a group its members, of a task itself."""
    if isinstance(names, str):
        raise ValueError(f"Tasks are a list of names: [{names!r}], not {names!r}.")
    categories = mmlu_categories()
    every = [subject for group in categories.values() for subject in group]
    chosen = [one for name in subjects for one in categories.get(name, [name])] or every
    unknown = [name for name in chosen if name not in every]
    if unknown:
        raise ValueError(
            f"MMLU has no subject or category {unknown[0]}: categories are {', '.join(categories)}; subjects are"
            f" {', '.join(sorted(every))}."
        )
    known = {"blimp": [f"blimp_{paradigm}" for paradigm in blimp()]}
    known |= {"mmlu": [f"mmlu_{one}" for one in dict.fromkeys(chosen)]}
    known |= {f"mmlu_{name}": [f"mmlu_{one}" for one in group] for name, group in categories.items()}
    known |= {name: [name] for name in (*known["blimp"], *(f"mmlu_{one}" for one in every))}
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"There is no task {', '.join(unknown[:1]) or 'named'}: name blimp, blimp_(paradigm), mmlu,"
            f" mmlu_(subject) or mmlu_(category), categories being {', '.join(categories)}."
        )
    if subjects and "mmlu" not in names:
        raise ValueError("subjects narrow the task mmlu, which is not among the tasks.")
    return {name: known[name] for name in names}


def _task(name: str, num_fewshot: int | None) -> Task:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from pyarrow import Table

    family, _, part = name.partition("_")
    config = {**_yaml(family), "task": name}
    if family == "blimp":
        rows = {"test": blimp()[part]}
        config["process_results"] = _prefers_good
    else:
        rows = {split: mmlu(split)[part] for split in ("dev", "test")}
        about = part.replace("_", " ")
        config["description"] = (
            f"The following are multiple choice questions (with answers) about {about}.\n\n"
        )
        if num_fewshot is not None:
            config["num_fewshot"] = num_fewshot

    class ShippedTask(ConfigurableTask):
        def download(self, dataset_kwargs=None, **_):
            # from memory: lm-eval's json loader would write a copy of every task into the user's cache.
            # A fingerprint is given, for to compute one takes longer than all else
            self.dataset = {
                split: Dataset(Table.from_pylist(found), fingerprint=f"{name}-{split}")
                for split, found in rows.items()
            }

        def fewshot_docs(self):
            return self.dataset.get("dev")

    return ShippedTask(config=config)


def _prefers_good(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    # lm-eval's argmax would call a tie, and a model that returns NaN, right
    good, bad = (score for score, _ in results)
    return {"acc": float(good > bad)}


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
    _need_lm_eval()
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


# perplexity of files


def read_texts(paths: str | Path | Iterable[str | Path], pattern: str = "*.py") -> dict[str, str]:
    """The texts of files by path: plain or .gz, UTF-8, bytes as they are; of a folder every file that fits pattern.

    FileNotFoundError when a path or a fitting file is missing, ValueError when a file is not UTF-8.
    """
    paths, texts = [paths] if isinstance(paths, str | Path) else list(paths), {}
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {path}.")
        files = sorted(file for file in path.rglob(pattern) if file.is_file()) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"The folder {path} has no file {pattern}.")
        for file in files:
            data = file.read_bytes()
            try:
                texts[str(file)] = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file} is not UTF-8 text: {error.reason} at byte {error.start}."
                ) from error
    return texts


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Cuts a text (its prefix token, then N tokens) into windows that together predict each of the N tokens once.

    Yields (window, n): the model reads all tokens of a window but the last, at most `length`, and the last n are
    scored. All but the first window score `stride` tokens.
    """
    done, total = 0, len(tokens) - 1
    while done < total:
        new = min(stride if done else length, total - done)
        done += new
        yield list(tokens[max(0, done - length) : done + 1]), new


def perplexity(
    model,
    tokenizer,
    paths: str | Path | Iterable[str | Path],
    length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    pattern: str = "*.py",
    **knobs,
) -> dict[str, Any]:
    """Nats per token, bits per byte and perplexity of text files or of a folder of code, each file a text of its own.

    length: tokens that the model reads at once, its config's max_position_embeddings when None. stride: tokens that a
    window scores, half of length when None; at that, a token is predicted from length / 2 tokens or more, or from all
    before it. The BOS token stands first. knobs: threshold, min_steps, max_steps, or of a routed model
    capacity, threshold, selection. depth_mean (loops, or layers run) and macs_per_token are of the tokens run, which
    overlapping windows run again. Errors as `read_texts`; ValueError for a stride longer than length, a knob that the
    model lacks, or when no file has text.
    """
    knobs = check_knobs(model, knobs)
    length = length or getattr(model.config, "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"{type(model).__name__}'s config has no max_position_embeddings: give length.")
    stride = stride or max(1, length // 2)
    if not 1 <= stride <= length:
        raise ValueError(f"stride {stride} must be 1 to length {length}, or tokens would be left out.")
    first, texts, cut = prefix_token(tokenizer), read_texts(paths, pattern), []
    for text in texts.values():
        cut += windows(
            [first, *tokenizer.encode(text, add_special_tokens=False, verbose=False)], length, stride
        )
    if not cut:
        raise ValueError("The files hold no text.")
    cut.sort(key=lambda window: -len(window[0]))
    nats, costs, seconds, training = 0.0, [], 0.0, model.training
    model.eval()
    try:
        for batch in _batches(cut, batch_size, "perplexity"):
            logits, spent, passed = run(model, [window[:-1] for window, _ in batch], knobs)
            costs, seconds = costs + spent, seconds + passed
            for (window, new), scores in zip(batch, logits, strict=True):
                wanted = torch.tensor(window[-new:], device=scores.device)
                said = _wide(scores[len(window) - 1 - new : len(window) - 1])
                nats += float(F.cross_entropy(said, wanted, reduction="sum"))
    finally:
        model.train(training)
    tokens, size = sum(new for _, new in cut), sum(len(text.encode()) for text in texts.values())
    cost = cost_figures(costs)
    share = realised(model.config, cost["depth_mean"])
    return {
        "files": len(texts),
        "bytes": size,
        "tokens": tokens,
        "nats_per_token": nats / tokens,
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(nats / tokens),
        "length": length,
        "stride": stride,
        "knobs": knobs,
        "tokens_run": cost["tokens"],
        "depth_mean": cost["depth_mean"],
        **({} if share is None else {"capacity_realised": share}),
        "macs_per_token": None if cost["macs"] is None else cost["macs"] // cost["tokens"],
        "seconds": round(seconds, 3),
    }
