"""Causal language models measured: loss, depth, MACs and seconds of a checkpoint at any threshold, token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from .clock import now
from .data import algorithmic
from .evaluate import Loaded, full_depth, load
from .tasks import held_out, problems

BATCH = 16


@dataclass
class Measured:
    """What a model did on R rows of T tokens.

    losses [R, T]: nats of the token at each place, as predicted from the one before; nan where nothing predicts it.
    depths [R, T]: loops that the token at each place ran; 0 at padding. right [R, T]: whether it was the first
    choice. row_macs, row_kv_bytes [R]: multiply-accumulates, and bytes of keys and values, of each row. seconds,
    cpu_seconds: of the forward passes, by the clock and of the processor. executed [N, L]: which layers each of the N
    tokens (no padding, row by row) ran; None where all did.
    """

    losses: np.ndarray
    depths: np.ndarray
    right: np.ndarray
    row_macs: np.ndarray
    row_kv_bytes: np.ndarray
    seconds: float
    cpu_seconds: float = 0.0
    executed: np.ndarray | None = None

    def on(self, rows: np.ndarray) -> Measured:
        """Some of the rows; the seconds are still those of all, `executed` is left out."""
        parts = (self.losses, self.depths, self.right, self.row_macs, self.row_kv_bytes)
        return Measured(*(part[rows] for part in parts), self.seconds, self.cpu_seconds)

    @property
    def macs(self) -> int:
        """All multiply-accumulates."""
        return int(self.row_macs.sum())

    @property
    def loss(self) -> float:
        """Mean nats per predicted token."""
        return float(np.nanmean(self.losses))

    @property
    def mean_depth(self) -> float:
        """Loops per token."""
        return float(self.depths[self.depths > 0].mean())


@dataclass
class Corpus:
    """Validation rows as tensors [R, T]: input_ids, labels, and position_ids or attention_mask.

    document [R, T]: index of the token's document (-1: padding); group [R, T]: index into `groups` (topics or sets).
    bytes_per_token: of the whole held-out part, by group; empty for problems.
    """

    inputs: dict[str, torch.Tensor]
    document: np.ndarray
    group: np.ndarray
    groups: list[str]
    bytes_per_token: dict[str, float]

    @property
    def labels(self) -> torch.Tensor:
        """[R, T], -100 where nothing is predicted."""
        return self.inputs["labels"]


def corpus_of(loaded: Loaded, names: Sequence[str] = (), limit: int | None = None) -> Corpus:
    """The held-out text of the checkpoint's recipe, or its problems: sets `names` (all tests when none is given)."""
    recipe = loaded.recipe
    if recipe.data.text is not None:
        if names:
            raise ValueError("A text recipe has one held-out part; --sets has nothing to choose.")
        packed, rows = held_out(recipe.data.text, loaded.tokenizer)
        rows = rows[:limit]
        inputs = {
            "input_ids": packed.input_ids[rows],
            "position_ids": packed.position_ids[rows],
            "labels": packed.labels[rows],
        }
        size = {name: packed.bytes_per_token(name) for name in packed.topics}
        return Corpus(
            {name: torch.from_numpy(value).long() for name, value in inputs.items()},
            packed.document[rows], packed.topic[rows], list(packed.topics), size,
        )  # fmt: skip
    made = problems(recipe)
    made.pop("train")
    unknown = [name for name in names if name not in made]
    if unknown:
        raise ValueError(f"There is no set {unknown[0]!r}; there are {', '.join(made)}.")
    groups = list(names) or [name for name in made if name != "validation"]
    chosen = [(number, one) for number, name in enumerate(groups) for one in made[name][:limit]]
    # like lengths side by side
    chosen.sort(key=lambda pair: len(pair[1].tokens))
    data = algorithmic.AlgorithmicDataset([one for _, one in chosen], "causal")
    inputs = data.collate([data[place] for place in range(len(data))])
    group = np.array([number for number, _ in chosen])[:, None]
    document = np.where(inputs["attention_mask"].bool(), np.arange(len(data))[:, None], -1)
    return Corpus(inputs, document, np.broadcast_to(group, document.shape), groups, {})


@torch.inference_mode()
def measure(model, corpus: Corpus, progress: str | None = None, batch: int = BATCH, **knobs) -> Measured:
    """One pass over the rows; `knobs` are threshold, min_steps, max_steps; capacity, selection of a routed model."""
    rows, length = corpus.labels.shape
    losses = np.full((rows, length), np.nan, np.float32)
    depths, right = np.zeros((rows, length), np.int16), np.zeros((rows, length), bool)
    row_macs, row_kv_bytes = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    seconds = cpu_seconds = 0.0
    ran: list[np.ndarray] = []
    bar = Console(stderr=True)
    hidden = progress is None or not bar.is_terminal
    for start in track(range(0, rows, batch), progress or "", console=bar, transient=True, disable=hidden):
        some = {
            name: value[start : start + batch] for name, value in corpus.inputs.items() if name != "labels"
        }
        labels = corpus.labels[start : start + batch]
        if "attention_mask" in some:
            longest = int(some["attention_mask"].sum(-1).max())
            some = {name: value[:, :longest] for name, value in some.items()}
            labels = labels[:, :longest]
        some = {name: value.to(model.device) for name, value in some.items()}
        before, cpu_before = now(model.device), time.process_time()
        out = model(**some, use_cache=False, **knobs)
        seconds, cpu_seconds = (
            seconds + now(model.device) - before, cpu_seconds + time.process_time() - cpu_before,
        )  # fmt: skip
        row_macs[start : start + batch] = out.compute.per_sequence.cpu().numpy()
        row_kv_bytes[start : start + batch] = out.compute.kv_bytes.cpu().numpy()
        targets = labels[:, 1:].to(model.device)
        one = F.cross_entropy(
            out.logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100
        ).view(targets.shape)
        one = one.masked_fill(targets == -100, torch.nan)
        place = (slice(start, start + batch), slice(1, labels.shape[1]))
        losses[place] = one.cpu().numpy()
        right[place] = (out.logits[:, :-1].argmax(-1) == targets).cpu().numpy()
        depths[start : start + batch, : labels.shape[1]] = out.depths.cpu().numpy()
        if out.executed is not None:
            ran.append(out.executed[out.depths > 0].cpu().numpy())
    executed = np.concatenate(ran) if ran else None
    return Measured(losses, depths, right, row_macs, row_kv_bytes, seconds, cpu_seconds, executed)


def summary(corpus: Corpus, said: Measured) -> dict[str, Any]:
    """Figures of one pass: loss, bits per byte (text) or accuracy (problems), over all and by group."""
    predicted = ~np.isnan(said.losses)
    figures: dict[str, Any] = {
        "loss": round(said.loss, 4),
        "tokens": int((said.depths > 0).sum()),
        "mean_depth": round(said.mean_depth, 3),
        "macs_per_token": round(said.macs / int((said.depths > 0).sum())),
        "seconds": round(said.seconds, 3),
    }
    by_group: dict[str, dict[str, float]] = {}
    for number, name in enumerate(corpus.groups):
        here = corpus.group == number
        loss = float(said.losses[here & predicted].mean())
        row = {
            "loss": round(loss, 4),
            "mean_depth": round(float(said.depths[here & (said.depths > 0)].mean()), 3),
        }
        if corpus.bytes_per_token:
            row["bits_per_byte"] = round(loss / np.log(2) / corpus.bytes_per_token[name], 4)
        else:
            row["accuracy"] = round(100 * float(said.right[here & predicted].mean()), 2)
        by_group[name] = row
    measure = "bits_per_byte" if corpus.bytes_per_token else "accuracy"
    # every group counts alike: rows of the held-out part are as many for each
    figures[measure] = round(float(np.mean([row[measure] for row in by_group.values()])), 4)
    figures["by_group"] = by_group
    return figures


def evaluate_language(checkpoint: str | Path, names: Sequence[str] = (), policy: str | None = None, **knobs):
    """Loss, accuracy or bits per byte, depth, MACs and seconds on the held-out part."""
    loaded = load(checkpoint, policy)
    corpus = corpus_of(loaded, names)
    figures = summary(corpus, measure(loaded.model, corpus, "evaluation", **knobs))
    figures["parameters"] = sum(p.numel() for p in loaded.model.parameters())
    figures["full_depth"] = full_depth(loaded.model)
    if not corpus.bytes_per_token:
        figures["accuracy"] = {name: row["accuracy"] for name, row in figures["by_group"].items()}
    return figures


def realised(config, layers: float | None) -> float | None:
    """Share of the tokens that a model's routed layers took, given the layers run per token; None without such."""
    routed = len(getattr(config, "routed_layers", None) or ())
    if not routed or layers is None:
        return None
    return round((layers - config.num_hidden_layers + routed) / routed, 4)
