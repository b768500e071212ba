"""The knob of a text-to-text checkpoint: quality, depth of both sides, MACs and seconds of what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .evaluate import Loaded, full_depth, load
from .translate import Said, answer, paired_bootstrap, paired_exact, right_answers, test_pairs


def sweep_pairs(
    checkpoint: str | Path,
    thresholds: Sequence[float],
    names: Sequence[str] = (),
    repeats: int = 3,
    beams: int = 1,
    length_penalty: float = 1.0,
    limit: int | None = None,
) -> dict[str, Any]:
    """The knob on the sets `names`, the validation part when none is given: a setting is not chosen on a test. A name
    "a+b" is two sets taken together.

    limit: that many examples of each set, spread evenly over it. The decoder reads its own output. See `knob_pairs`.
    """
    loaded = load(checkpoint)
    if getattr(loaded.model.config, "policy", "fixed") == "fixed":
        raise ValueError(f"{loaded.folder} has a fixed depth; the knob needs policy stick_breaking.")
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1.")
    joined = {name: name.split("+") for name in names or ["validation"]}
    read = test_pairs(loaded, [*dict.fromkeys(part for parts in joined.values() for part in parts)])
    sets = {
        name: [pair for part in parts for pair in spread(read[part], limit)] for name, parts in joined.items()
    }
    return {
        "full_depth": full_depths(loaded.model),
        "beams": beams,
        "length_penalty": length_penalty,
        "repeats": repeats,
        "sets": {
            name: knob_pairs(loaded, pairs, thresholds, repeats, beams, length_penalty, name)
            for name, pairs in sets.items()
        },
    }


def spread(pairs: Sequence[tuple], limit: int | None) -> list[tuple]:
    """At most `limit` of the examples, evenly spaced."""
    if limit is None or limit >= len(pairs):
        return list(pairs)
    return [pairs[place] for place in np.linspace(0, len(pairs) - 1, limit).astype(int)]


def full_depths(model) -> dict[str, int]:
    """Steps of encoder and decoder when nobody stops."""
    config = model.config
    names = ("num_decoder_loops", "num_decoder_layers")
    decoder = next((getattr(config, name) for name in names if hasattr(config, name)), full_depth(model))
    return {"encoder": full_depth(model), "decoder": decoder}


def knob_pairs(
    loaded: Loaded,
    pairs: Sequence[tuple],
    thresholds: Sequence[float],
    repeats: int = 3,
    beams: int = 1,
    length_penalty: float = 1.0,
    name: str = "validation",
) -> dict[str, Any]:
    """One row for each threshold, and a first one at threshold 1: nobody stops, the states mix as in training.

    BLEU, or exact match of compositional tasks, and its difference from the first row on the same examples, with the
    95% interval of the paired bootstrap; steps and steps skipped (percent) of a source token, a written one, and both;
    MACs of one pass over sources and outputs, their share of the first row's, and the same per token (an output may
    be longer than at full depth); seconds of the search, each setting timed `repeats` times turn by turn, of which the
    fastest counts.
    """
    settings, full = [1.0, *thresholds], full_depths(loaded.model)
    said: list[list[Said]] = [[] for _ in settings]
    for turn in range(repeats):
        for runs, threshold in zip(said, settings, strict=True):
            title = f"{name}, turn {turn + 1} of {repeats}, threshold {threshold:g}"
            runs.append(answer(loaded, pairs, beams, length_penalty, title, threshold=threshold))
    base, fastest = said[0][0], [min(run.seconds for run in runs) for runs in said]
    rows = []
    for (one, *_), threshold, seconds in zip(said, settings, fastest, strict=True):
        costs = one.costs()
        sides = {"encoder": one.encoder_depths, "decoder": one.decoder_depths}
        skipped = {
            f"{side}_skipped": round(100 * (1 - float(np.concatenate(depths).mean()) / full[side]), 2)
            for side, depths in sides.items()
        }
        ran = sum(int(each.sum()) for depths in sides.values() for each in depths)
        most = sum(len(each) * full[side] for side, depths in sides.items() for each in depths)
        skipped["skipped"] = round(100 * (1 - ran / most), 2)
        rows.append(
            {
                "threshold": threshold,
                **beside(loaded, pairs, base, one),
                "encoder_depth": costs["encoder_depth"],
                "decoder_depth": costs["decoder_depth"],
                **skipped,
                "written_tokens": sum(map(len, one.decoder_depths)),
                "macs": one.macs,
                "macs_share": round(one.macs / base.macs, 4),
                "macs_per_token": costs["macs_per_token"],
                "macs_per_token_share": round(one.macs / one.tokens / (base.macs / base.tokens), 4),
                "seconds": round(seconds, 3),
                "seconds_share": round(seconds / fastest[0], 4),
            }
        )
    return {"examples": len(pairs), "measure": "bleu" if "bleu" in rows[0] else "exact", "rows": rows}


def beside(loaded: Loaded, pairs: Sequence[tuple], base: Said, one: Said) -> dict[str, Any]:
    """BLEU or exact match of `one`, and its paired difference from `base`."""
    targets = [pair[1] for pair in pairs]
    if loaded.recipe.data.parallel is not None:
        found = paired_bootstrap(base.texts, one.texts, targets)
        row = {"bleu": found["second"], "signature": found["signature"]}
    else:
        found = paired_exact(*(right_answers(said, targets) for said in (base, one)))
        row = {"exact": found["second"]}
    changed = np.mean([ours != theirs for ours, theirs in zip(one.texts, base.texts, strict=True)])
    return {
        **row,
        "difference": found["difference"],
        "difference_interval": found["interval"],
        "p": found["p"],
        "changed": round(100 * float(changed), 2),
    }
