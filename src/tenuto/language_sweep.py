"""Language models at every setting of their knob: fixed depths, what the best of them reach, thresholds, capacities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import load
from .language import Corpus, Measured, corpus_of, measure, realised
from .models.halting import POLICIES


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
