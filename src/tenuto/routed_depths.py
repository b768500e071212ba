"""Which tokens the routed layers take: their share by topic, kind, frequency and position, and what each says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import load
from .language import Corpus, Measured, corpus_of, measure
from .text_depths import KINDS, POSITIONS, bands, grouped, spearman, token_kinds

PARTS = {
    "by_topic": "Topics",
    "by_kind": "Kinds of token",
    "by_frequency": "Frequency of the token",
    "by_position": "Position in the document",
}


def executed_of(checkpoint: str | Path, limit: int | None = None, **knobs) -> dict[str, Any]:
    """`executed_by` on a checkpoint's held-out text; knobs: capacity, threshold, selection."""
    loaded = load(checkpoint)
    corpus = corpus_of(loaded, limit=limit)
    return executed_by(loaded, corpus, measure(loaded.model, corpus, "depths", **knobs))


def executed_by(loaded, corpus: Corpus, said: Measured, losses: np.ndarray | None = None) -> dict[str, Any]:
    """Share of the routed layers that a token ran, by topic, kind, frequency and position, with what each says.

    losses [R, T]: the dense model's, for the rank correlation of that share with the loss of the next token.
    """
    config, ids = loaded.model.config, corpus.inputs["input_ids"].numpy()
    counts = np.bincount(ids[corpus.document >= 0], minlength=config.vocab_size)
    # place t reads token t and predicts t + 1
    here = ~np.isnan(said.losses[:, 1:])
    routed = len(config.routed_layers)
    share = (said.depths[:, :-1][here] - config.num_hidden_layers + routed) / routed
    document, topic = corpus.document[:, :-1][here], corpus.group[:, :-1][here]
    position = (
        corpus.inputs["position_ids"].numpy()[:, :-1][here]
        if "position_ids" in corpus.inputs
        else np.broadcast_to(np.arange(ids.shape[1] - 1), here.shape)[here]
    )
    place = np.searchsorted([high for _, high in POSITIONS[:-1]], position, side="right")
    places = [f"{low}-{high - 1}" for low, high in POSITIONS[:-1]] + [f"{POSITIONS[-1][0]} and later"]
    fifths = [f"fifth {number + 1} of 5, rarest first" for number in range(5)]
    figures: dict[str, Any] = {
        "tokens": len(share),
        "documents": len(np.unique(document)),
        "share": round(float(share.mean()), 4),
        "by_topic": grouped(share, topic, corpus.groups, document),
        "by_kind": grouped(share, token_kinds(ids, loaded.tokenizer)[:, :-1][here], KINDS, document),
        "by_frequency": grouped(share, bands(counts, ids[:, :-1], 5)[here], fifths, document),
        "by_position": grouped(share, place, places, document),
    }
    figures["says"] = {part: says(figures[part]) for part in PARTS}
    if losses is not None:
        figures["correlation_with_loss"] = spearman(share, losses[:, 1:][here])
    return figures


def says(rows: dict[str, dict[str, Any]]) -> str:
    """One sentence on the group that runs most of the routed layers and the one that runs least; groups of less than
    1% of the tokens are left out.
    """
    least_tokens = sum(row["tokens"] for row in rows.values()) / 100
    rows = {name: row for name, row in rows.items() if row["tokens"] >= least_tokens}
    if len(rows) < 2:
        return "There is one group only: nothing to compare."
    most, least = (pick(rows, key=lambda name: rows[name]["mean"]) for pick in (max, min))
    low, high = rows[most]["interval"][0], rows[least]["interval"][1]
    numbers = f"most for “{most}” ({rows[most]['mean']:.1%}), least for “{least}” ({rows[least]['mean']:.1%})"
    if low > high:
        return f"The layers run {numbers}."
    return f"No clear difference: the layers run {numbers}, and the 95% intervals overlap."
