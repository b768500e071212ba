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

from .data import algorithmic
from .evaluate import Loaded, full_depth, load
from .models.halting import POLICIES
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
        before, cpu_before = _now(model.device), time.process_time()
        out = model(**some, use_cache=False, **knobs)
        seconds, cpu_seconds = (
            seconds + _now(model.device) - before, cpu_seconds + time.process_time() - cpu_before,
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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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


def difference(
    document: np.ndarray, ours: np.ndarray, theirs: np.ndarray, draws: int = 500
) -> dict[str, Any]:
    """Mean of ours - theirs [R, T] in nats per token, paired, with a 95% bootstrap interval over documents [R, T]."""
    here = ~np.isnan(ours)
    change = (ours - theirs)[here]
    owner = np.unique(document[here], return_inverse=True)[1]
    sums, counts = np.bincount(owner, change), np.bincount(owner)
    drawn = np.random.default_rng(0).integers(len(counts), size=(draws, len(counts)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return {
        "difference": round(float(change.mean()), 5),
        "interval": np.percentile(means, [2.5, 97.5]).round(5).tolist(),
        "documents": len(counts),
    }


def halves(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows in two parts that share no document: to choose on one and to report the other."""
    part = np.unique(corpus.document[:, 0], return_inverse=True)[1] % 2
    # a row holds several documents: what the first part has seen of them, the second leaves out
    seen = np.unique(corpus.document[part == 0])
    known = np.isin(corpus.document, seen[seen >= 0]).any(1)
    return np.flatnonzero(part == 0), np.flatnonzero((part == 1) & ~known)


def at_depth(config, depth: int) -> dict[str, Any]:
    """Knobs with which every token runs `depth` loops.

    A policy that mixes states is read as it was trained, by the mixture (a threshold of 1 stops nobody); any other by
    the state of that loop.
    """
    if config.policy == "fixed":
        return {"max_steps": depth}
    if POLICIES[config.policy].mixes:
        return {"max_steps": depth, "min_steps": min(config.min_steps, depth), "threshold": 1.0}
    return {"max_steps": depth, "min_steps": depth}


def frontier(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """(cost, loss) of fixed depths -> the corners of what fixed depths reach: the lower convex hull, never rising.

    Between two corners lies what giving one depth to some texts and the other to the rest would reach.
    """
    hull: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if hull and loss >= hull[-1][1]:
            continue  # dearer and no better
        while len(hull) > 1:
            (c0, l0), (c1, l1) = hull[-2:]
            if (l1 - l0) * (cost - c0) < (loss - l0) * (c1 - c0):
                break
            hull.pop()
        hull.append((cost, loss))
    return [cost for cost, _ in hull], [loss for _, loss in hull]


def saved(said: Measured, fixed: Sequence[Measured], rows: np.ndarray) -> float:
    """Nats that a pass saves, on some rows, against the best of fixed depths at the same MACs (see `frontier`)."""
    tokens = (fixed[0].depths[rows] > 0).sum()
    cost, loss = frontier([(one.row_macs[rows].sum() / tokens, one.on(rows).loss) for one in fixed])
    return round(float(np.interp(said.row_macs[rows].sum() / tokens, cost, loss)) - said.on(rows).loss, 4)


def sweep_language(
    checkpoint: str | Path,
    thresholds: Sequence[float],
    names: Sequence[str] = (),
    repeats: int = 3,
    policy: str | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """The knob beside every fixed depth.

    `rows`: one for each threshold; `fixed`: one for each depth 1..L, all tokens alike (`at_depth`). Every setting is
    timed `repeats` times, turn by turn; the fastest counts. `saved_over_fixed`: the lowest loss that fixed depths reach
    with the row's MACs (`frontier`) minus the row's: positive if adaptive depth beats fixed depth. Chosen on one half
    of the documents, with the figures of the other half (None where there are too few documents): `best`, the threshold
    that saves most; `best_fixed`, the depth of the lowest loss; `target`, the threshold of the fewest MACs at a loss of
    no more than 0.5% above full depth.
    """
    loaded = load(checkpoint, policy)
    if hasattr(loaded.model.config, "routed_layers"):
        raise ValueError(f"{loaded.folder} routes tokens by capacity: sweep --capacities, not thresholds.")
    model, full = loaded.model, loaded.model.config.num_loops
    if model.config.policy == "fixed":
        raise ValueError(
            f"{loaded.folder} has a fixed depth; --policy margin or latent reads one without training."
        )
    corpus = corpus_of(loaded, names, limit)
    settings: list[dict[str, Any]] = [at_depth(model.config, depth) for depth in range(1, full + 1)]
    settings += [{"threshold": one} for one in thresholds]
    said: list[list[Measured]] = [[] for _ in settings]
    for turn in range(repeats):
        for runs, knobs in zip(said, settings, strict=True):
            runs.append(measure(model, corpus, f"turn {turn + 1} of {repeats}, {knobs}", **knobs))
    fastest = [min(run.seconds for run in runs) for runs in said]
    passes, everything = [runs[0] for runs in said], np.arange(len(corpus.labels))
    depths, named = passes[:full], [{"max_steps": depth + 1} for depth in range(full)] + settings[full:]

    def row(place: int, rows: np.ndarray) -> dict[str, Any]:
        one, base = passes[place].on(rows), depths[-1].on(rows)
        figures = {
            **named[place],
            "loss": round(one.loss, 4),
            "loss_percent": round(100 * (one.loss / base.loss - 1), 3),
            **difference(corpus.document[rows], one.losses, base.losses),
            "mean_depth": round(one.mean_depth, 3),
            "steps_skipped": round(100 * (1 - one.mean_depth / full), 2),
            "macs_per_token": round(one.macs / int((base.depths > 0).sum())),
            "macs_share": round(one.macs / base.macs, 4),
            "seconds_share": round(fastest[place] / fastest[full - 1], 4),
        }
        if not corpus.bytes_per_token:
            figures["accuracy"] = round(100 * float(one.right[~np.isnan(one.losses)].mean()), 2)
        if place >= full:
            figures["saved_over_fixed"] = saved(passes[place], depths, rows)
        return figures

    chosen: dict[str, dict[str, Any] | None] = dict.fromkeys(("best", "best_fixed", "target"))
    fit, test = halves(corpus)
    if len(fit) and len(test):
        # the largest of several is too good by chance: it is judged on documents it was not chosen on
        knobs, most = range(full, len(passes)), 1.005 * depths[-1].on(fit).loss
        chosen["best"] = row(max(knobs, key=lambda place: saved(passes[place], depths, fit)), test)
        chosen["best_fixed"] = row(min(range(full), key=lambda place: depths[place].on(fit).loss), test)
        allowed = [place for place in knobs if passes[place].on(fit).loss <= most]
        if allowed:
            chosen["target"] = row(min(allowed, key=lambda place: passes[place].on(fit).macs), test)
    every = [row(place, everything) for place in range(len(passes))]
    figures = {"full_depth": full, "tokens": int((depths[0].depths > 0).sum()), "policy": model.config.policy}
    return {**figures, "fixed": every[:full], "rows": every[full:], **chosen}


def sweep_capacity(
    checkpoint: str | Path,
    capacities: Sequence[float],
    names: Sequence[str] = (),
    selections: Sequence[str] = ("threshold", "running", "topk"),
    repeats: int = 3,
    limit: int | None = None,
) -> dict[str, Any]:
    """The knob of a routed model: one row for each rule and capacity, beside every token in every layer ("dense").

    `capacity_realised`: share of the tokens that the routed layers took. `over_topk_percent`: loss above Top-K's at the
    same capacity, which sees the whole text and is no rule to decode by. Shares are of the dense row.
    """
    loaded = load(checkpoint)
    model, config = loaded.model, loaded.model.config
    if not getattr(config, "routed_layers", None):
        raise ValueError(
            f"{loaded.folder} has no routed layers (mod, sdt, stt); sweep --thresholds of a looped model."
        )
    corpus = corpus_of(loaded, names, limit)
    settings: list[dict[str, Any]] = [{"selection": "dense"}]
    settings += [{"selection": rule, "capacity": one} for one in capacities for rule in selections]
    said: list[list[Measured]] = [[] for _ in settings]
    for turn in range(repeats):
        for runs, knobs in zip(said, settings, strict=True):
            runs.append(measure(model, corpus, f"turn {turn + 1} of {repeats}, {knobs}", **knobs))
    fastest = [min(run.seconds for run in runs) for runs in said]
    base, tokens = said[0][0], int((said[0][0].depths > 0).sum())
    best = {
        knobs["capacity"]: runs[0]
        for runs, knobs in zip(said, settings, strict=True)
        if knobs["selection"] == "topk"
    }
    rows = []
    for (one, *_), knobs, seconds in zip(said, settings, fastest, strict=True):
        upper = best.get(knobs.get("capacity"))
        rows.append(
            {
                **knobs,
                "loss": round(one.loss, 4),
                "over_topk_percent": None if upper is None else round(100 * (one.loss / upper.loss - 1), 3),
                "capacity_realised": realised(config, one.mean_depth),
                "macs_per_token": round(one.macs / tokens),
                "macs_share": round(one.macs / base.macs, 4),
                "kv_share": round(int(one.row_kv_bytes.sum()) / int(base.row_kv_bytes.sum()), 4),
                "seconds_share": round(seconds / fastest[0], 4),
            }
        )
    return {"tokens": tokens, "routed_layers": config.routed_layers, "rows": rows}
