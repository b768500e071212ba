"""Depth of a language model as data: by topic, kind of token, frequency, position and loss at depth 1; exit rules
against the oracle.

The depth of the token at place t is what was computed to predict the token at t + 1: it is held against that loss.

    oracle depth    the first depth with the lowest loss of all fixed depths, token by token
    headroom        lowest mean loss of a fixed depth - mean loss at the oracle depth
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .calibrate import only_rows, spread_thresholds
from .collapse import collapse
from .evaluate import load
from .language import Corpus, corpus_of, measure
from .language_sweep import at_depth, halves, sweep_language
from .models.halting import RULES

FUNCTION_WORDS = frozenset(
    """a an the this that these those my your his her its our their some any no every each either neither both all
    i me you he him she it we us they them who whom whose which what one ones myself himself herself itself themselves
    and or but nor so yet for if because as while although though unless until since than whether when where how why
    of in on at by to from with without about into onto upon over under above below between among through during
    before after against toward towards within along across behind beyond near off out up down around
    be am is are was were been being have has had having do does did doing will would shall should can could may might
    must not n't 's 're 've 'll 'd 'm there here then too very just also only even""".split()
)
KINDS = ("function word", "content word", "later piece", "number", "punctuation", "whitespace", "special")
PROBE = 12  # rows that thresholds of exit rules are found on
POSITIONS = ((0, 4), (4, 16), (16, 64), (64, 256), (256, 1024), (1024, 1 << 30))


def token_kinds(ids_RT: np.ndarray, tokenizer) -> np.ndarray:
    """[R, T] ids -> [R, T] index into KINDS.

    A token that begins with a letter after a letter is a later piece of its word; the kind of the first piece is that
    of the whole word.
    """
    texts = np.array(tokenizer.batch_decode([[one] for one in range(len(tokenizer))]), dtype=object)
    special = set(tokenizer.all_special_ids)
    kinds = np.zeros(ids_RT.shape, np.int8)
    for row, ids in enumerate(ids_RT):
        pieces = [texts[one] for one in ids]
        inside, first, word = False, -1, ""

        for place, (one, piece) in enumerate(zip(ids, pieces, strict=True)):
            core = piece.strip()
            starts = bool(re.match(r"[^\W\d_]", core)) and int(one) not in special
            if starts and inside and piece[0] == core[0]:
                kinds[row, place] = 2
                word += core
            else:
                if first >= 0:
                    kinds[row, first] = word_kind(word)
                first, word = (place, core) if starts else (-1, "")
                if int(one) in special:
                    kinds[row, place] = 6
                elif not core:
                    kinds[row, place] = 5
                elif not starts:
                    kinds[row, place] = 3 if core[0].isdigit() else 4
            # letters may be followed by other signs in one token
            inside = starts and piece[-1].isalpha()
        if first >= 0:
            kinds[row, first] = word_kind(word)
    return kinds


def word_kind(word: str) -> int:
    """Index into KINDS of a whole word."""
    return 0 if re.sub(r"\W+$", "", word.lower()) in FUNCTION_WORDS else 1


def bands(counts_V: np.ndarray, ids_RT: np.ndarray, number: int = 5) -> np.ndarray:
    """[R, T] frequency band of each token: bands hold alike many running tokens, 0 the rarest."""
    order = np.argsort(counts_V, kind="stable")
    share = np.cumsum(counts_V[order]) / counts_V.sum()
    band = np.zeros(len(counts_V), np.int64)
    band[order] = np.minimum((share - counts_V[order] / counts_V.sum() / 2) * number, number - 1).astype(int)
    return band[ids_RT]


def grouped(
    values: np.ndarray, group: np.ndarray, names: Sequence[str], document: np.ndarray, draws: int = 300
) -> dict[str, dict[str, Any]]:
    """By group: tokens, mean of the values [N], spread, 95% interval (bootstrap over documents), effect size.

    effect: Cohen's d, (mean here - mean elsewhere) / pooled standard deviation.
    """
    random, rows = np.random.default_rng(0), {}
    owner = np.unique(document, return_inverse=True)[1]
    drawn = random.integers(owner.max() + 1, size=(draws, owner.max() + 1))
    for number, name in enumerate(names):
        here = group == number
        if not here.any():
            continue
        sums = np.bincount(owner[here], values[here], owner.max() + 1)
        counts = np.bincount(owner[here], minlength=owner.max() + 1)
        drawn_counts = counts[drawn].sum(1)
        means = sums[drawn].sum(1)[drawn_counts > 0] / drawn_counts[drawn_counts > 0]
        rows[name] = {
            "tokens": int(here.sum()),
            "documents": int((counts > 0).sum()),
            "mean": round(float(values[here].mean()), 4),
            "spread": round(float(values[here].std()), 4),
            "interval": np.percentile(means, [2.5, 97.5]).round(4).tolist(),
        }
        if not here.all():
            spread = np.sqrt(
                (values[here].var() * here.sum() + values[~here].var() * (~here).sum()) / len(values)
            )
            gap = values[here].mean() - values[~here].mean()
            rows[name]["effect"] = round(float(gap / spread), 3) if spread > 0 else 0.0
    return rows


def adjusted(
    values: np.ndarray, group: np.ndarray, names: Sequence[str], covariates: np.ndarray, document: np.ndarray,
    draws: int = 100,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Mean of the values [N] by group at the same covariates [N, k] (least squares), with intervals over documents."""
    centred = covariates - covariates.mean(0)
    centred = centred / np.maximum(centred.std(0), 1e-9)
    present = [number for number in range(len(names)) if (group == number).any()]
    design = np.concatenate([np.stack([group == number for number in present], 1).astype(float), centred], 1)
    # sums of products by document: a resampled fit then costs nothing
    owner = np.unique(document, return_inverse=True)[1]
    squares = np.zeros((owner.max() + 1, design.shape[1], design.shape[1]))
    products = np.zeros((owner.max() + 1, design.shape[1]))
    for one in range(owner.max() + 1):
        rows = design[owner == one]
        squares[one], products[one] = rows.T @ rows, rows.T @ values[owner == one]

    def fit(chosen) -> np.ndarray:
        return np.linalg.lstsq(squares[chosen].sum(0), products[chosen].sum(0), rcond=None)[0]

    answer, random = fit(slice(None)), np.random.default_rng(0)
    fits = np.full((draws, design.shape[1]), np.nan)
    for one in range(draws):
        chosen = random.integers(len(squares), size=len(squares))
        fits[one] = fit(chosen)
        # a topic of which no document was drawn has no mean
        fits[one, np.diagonal(squares[chosen].sum(0)) == 0] = np.nan
    low, high = np.nanpercentile(fits, [2.5, 97.5], axis=0)
    return {
        names[number]: {
            "mean": round(float(answer[k]), 4),
            "interval": [round(float(low[k]), 4), round(float(high[k]), 4)],
        }
        for k, number in enumerate(present)
    }


def losses_by_depth(model, corpus: Corpus, progress: Callable | None = None) -> np.ndarray:
    """[R, T, L] loss of every token when all tokens run l = 1..L loops; nan where nothing is predicted."""
    said = [
        measure(model, corpus, f"depth {depth}", **at_depth(model.config, depth)).losses
        for depth in range(1, model.config.num_loops + 1)
    ]
    return np.stack(said, -1)


def text_depths(
    checkpoint: str | Path,
    policy: str | None = None,
    rules: bool = False,
    limit: int | None = None,
    **knobs,
) -> dict[str, Any]:
    """Depth by topic (raw, and adjusted for loss at depth 1, frequency and position), kind, band, position; oracle.

    rules: every exit rule that can read the model as well, against the oracle and the best fixed depths. frozen_gap:
    loss as run minus the loss of the same depths where nobody stops early, token by token: what it costs that others
    stopped (their keys and values, and what a coda reads of them, are those of their last loop).
    Knobs: threshold, min_steps, max_steps.
    """
    loaded = load(checkpoint, policy)
    model, config = loaded.model, loaded.model.config
    corpus = corpus_of(loaded, limit=limit)
    said = measure(model, corpus, "depths", **knobs)
    by_depth = losses_by_depth(model, corpus)
    ids = corpus.inputs["input_ids"].numpy()
    counts = np.bincount(ids[corpus.document >= 0], minlength=config.vocab_size)
    # place t reads token t and predicts t + 1
    here = ~np.isnan(said.losses[:, 1:])
    depth = said.depths[:, :-1][here].astype(float)
    losses = by_depth[:, 1:][here]
    document, topic = corpus.document[:, :-1][here], corpus.group[:, :-1][here]
    position = (
        corpus.inputs["position_ids"].numpy()[:, :-1][here]
        if "position_ids" in corpus.inputs
        else (np.broadcast_to(np.arange(ids.shape[1] - 1), here.shape)[here])
    )
    band = bands(counts, ids[:, :-1], 5)[here]
    kind = token_kinds(ids, loaded.tokenizer)[:, :-1][here]
    first_loss = losses[:, 0]
    loss_band = np.searchsorted(np.quantile(first_loss, [0.2, 0.4, 0.6, 0.8]), first_loss)
    position_band = np.searchsorted([high for _, high in POSITIONS[:-1]], position, side="right")
    covariates = np.stack([first_loss, np.log(counts[ids[:, :-1][here]]), np.log1p(position)], 1)
    oracle = losses.argmin(-1) + 1
    same_depth = np.take_along_axis(losses, np.minimum(depth.astype(int), config.num_loops)[:, None] - 1, -1)[
        :, 0
    ]
    fifths = [f"fifth {number + 1} of 5" for number in range(5)]
    shares = np.bincount(depth.astype(int), minlength=config.num_loops + 1)[1:] / len(depth)
    figures: dict[str, Any] = {
        "tokens": len(depth),
        "documents": len(np.unique(document)),
        "full_depth": config.num_loops,
        "policy": config.policy,
        "mean_depth": round(float(depth.mean()), 4),
        "frozen_gap": round(float((said.losses[:, 1:][here] - same_depth).mean()), 5),
        "histogram": shares.round(4).tolist(),
        **(collapse(depth, knobs.get("min_steps", config.min_steps), knobs.get("max_steps", config.num_loops),
                    config.policy)
           if config.policy != "fixed" else {"collapsed": False, "advice": None}),
        "by_topic": grouped(depth, topic, corpus.groups, document),
        "by_topic_adjusted": adjusted(depth, topic, corpus.groups, covariates, document),
        "by_kind": grouped(depth, kind, KINDS, document),
        "by_frequency": grouped(depth, band, [f"{name}, rarest first" for name in fifths], document),
        "by_position": grouped(depth, position_band, [f"{low}-{high - 1}" for low, high in POSITIONS], document),
        "by_loss_at_depth_1": grouped(depth, loss_band, [f"{name}, easiest first" for name in fifths], document),
        "correlation": {
            "with loss at depth 1": spearman(depth, first_loss),
            "with what full depth saves": spearman(depth, losses[:, 0] - losses[:, -1]),
            "with the oracle depth": spearman(depth, oracle),
        },
        "oracle": {
            "loss_by_depth": losses.mean(0).round(4).tolist(),
            "loss": round(float(losses.min(-1).mean()), 4),
            "headroom": round(float(losses.mean(0).min() - losses.min(-1).mean()), 4),
            "mean_depth": round(float(oracle.mean()), 3),
            "histogram": (np.bincount(oracle, minlength=config.num_loops + 1)[1:] / len(oracle)).round(4).tolist(),
            "by_topic": grouped(oracle.astype(float), topic, corpus.groups, document),
        },
    }  # fmt: skip
    if rules:
        figures["rules"] = exit_rules(checkpoint, config, limit)
    return figures


def exit_rules(checkpoint, config, limit: int | None) -> list[dict[str, Any]]:
    """Every rule that can read the model: the threshold that does best against fixed depths on one half of the
    documents, what it saves on the other, and how much of that half's headroom that is.

    Every rule is tried at thresholds of its own, which run shares of the loops (`spread_thresholds`): a confidence
    between 0.48 and 0.51 and one above 0.95 have no grid in common. ValueError with too few documents to be halved.
    """
    readable = [rule for rule in RULES if not (config.num_coda_layers and rule in ("kl", "margin"))]
    own = [] if config.policy in (*RULES, "fixed") else [None]
    rows = []
    for rule in (*own, *readable):
        loaded = load(checkpoint, rule)
        corpus = corpus_of(loaded, limit=limit)
        fit, test = halves(corpus)
        if not len(fit) or not len(test):
            raise ValueError(
                "Too few documents to choose thresholds on one half and judge them on the other."
            )
        thresholds = spread_thresholds(loaded.model, only_rows(corpus, fit[:PROBE]))
        knob = sweep_language(checkpoint, thresholds, repeats=1, policy=rule, limit=limit)
        by_depth = losses_by_depth(loaded.model, only_rows(corpus, test))
        by_depth = by_depth[~np.isnan(by_depth[..., 0])]
        headroom = float(by_depth.mean(0).min() - by_depth.min(-1).mean())
        best = knob["best"]
        rows.append(
            {
                "rule": rule or config.policy,
                "saved_over_fixed": best["saved_over_fixed"],
                "of_headroom": round(best["saved_over_fixed"] / headroom, 4) if headroom > 0 else None,
                "threshold": best["threshold"], "loss": best["loss"], "mean_depth": best["mean_depth"],
                "macs_per_token": best["macs_per_token"], "best_fixed_loss": knob["best_fixed"]["loss"],
                "sweep": knob["rows"],
            }
        )  # fmt: skip
    return rows


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; 0 when one of the two is constant."""
    ranks = []
    for values in (a, b):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    if min(rank.std() for rank in ranks) == 0:
        return 0.0
    return round(float(np.corrcoef(*ranks)[0, 1]), 4)


def picture(figures: dict[str, Any], path: Path) -> None:
    """Mean depth with its interval by topic (raw and adjusted), kind, frequency, position and loss at depth 1."""
    from matplotlib.figure import Figure

    parts = ("by_topic", "by_topic_adjusted", "by_kind", "by_frequency", "by_position", "by_loss_at_depth_1")
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    for axes, part in zip(figure.subplots(2, 3).flat, parts, strict=True):
        rows = figures[part]
        for place, row in enumerate(rows.values()):
            axes.plot(row["interval"], [place, place], "-", color="C0")
            axes.plot(row["mean"], place, "o", color="C0")
        axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axes.invert_yaxis()
        axes.axvline(figures["mean_depth"], color="0.8", zorder=0)
        axes.set_title(part.replace("_", " "), fontsize=9)
        axes.set_xlabel("loops per token", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
