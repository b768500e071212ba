"""Calibration: the threshold, or of a routed model the capacity, that meets a target on one half of the held-out
documents, judged on the other half; and the levels of routed layers, set anew from text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .data.text import Packed, read_corpus
from .data.text_documents import Source
from .evaluate import Loaded, load
from .language import Corpus, Measured, corpus_of, measure
from .language_sweep import at_depth, difference, halves

ASKED = (0.25, 0.5, 0.75, 0.9)
# every token in every layer: without gates, and with them
WHOLE = {"dense": {"selection": "dense"}, "capacity 1": {"selection": "threshold", "capacity": 1.0}}
TOKENS, LENGTH = 25_000, 512  # at most, of text that no recipe names; tokens of a row of it


def only_rows(corpus: Corpus, rows: np.ndarray) -> Corpus:
    """Some rows of a corpus."""
    return Corpus(
        {name: value[rows] for name, value in corpus.inputs.items()},
        corpus.document[rows], corpus.group[rows], corpus.groups, corpus.bytes_per_token,
    )  # fmt: skip


def calibrate(
    checkpoint: str | Path,
    max_loss_percent: float | None = None,
    max_steps_percent: float | None = None,
    limit: int | None = None,
    rounds: int = 7,
    save: bool = False,
) -> dict[str, Any]:
    """The lowest threshold whose loss stays within `max_loss_percent` of full depth's, or the highest whose token-steps
    stay within `max_steps_percent` of full depth's: found by bisection on one half, reported on the other.

    save: writes it into the checkpoint's config as halt_threshold. One of the two targets must be given.
    """
    if (max_loss_percent is None) == (max_steps_percent is None):
        raise ValueError("Give one target: --max_loss (max_loss_percent) or --max_steps (max_steps_percent).")
    loaded = load(checkpoint)
    model, config = loaded.model, loaded.model.config
    if hasattr(config, "routed_layers"):
        raise ValueError(f"{loaded.folder} routes tokens by capacity: there is no halting threshold to find.")
    if config.policy == "fixed":
        raise ValueError(f"{loaded.folder} has a fixed depth: there is no threshold to find.")
    # problems: those of the trained depths; the tests stay unseen
    names = [] if loaded.recipe.data.text is not None else ["validation"]
    corpus = corpus_of(loaded, names, limit)
    fit, test = (only_rows(corpus, rows) for rows in halves(corpus))
    if not len(fit.labels) or not len(test.labels):
        raise ValueError("The held-out part has too few documents to be cut in two; raise validation_rows.")
    full = measure(model, fit, **at_depth(config, config.num_loops))

    def allowed(said: Measured) -> bool:
        if max_loss_percent is not None:
            return said.loss <= full.loss * (1 + max_loss_percent / 100)
        return said.mean_depth <= config.num_loops * max_steps_percent / 100

    threshold = bisect(
        lambda one: allowed(measure(model, fit, threshold=one)), max_loss_percent is not None, rounds
    )
    base = measure(model, test, **at_depth(config, config.num_loops))
    said = measure(model, test, threshold=threshold)
    figures = {
        "threshold": round(threshold, 4),
        "target": {"max_loss_percent": max_loss_percent, "max_steps_percent": max_steps_percent},
        "loss_percent": round(100 * (said.loss / base.loss - 1), 3),
        **difference(test.document, said.losses, base.losses),
        "steps_percent": round(100 * said.mean_depth / config.num_loops, 2),
        "macs_percent": round(100 * said.macs / base.macs, 2),
        "met": bool(
            said.loss <= base.loss * (1 + max_loss_percent / 100)
            if max_loss_percent is not None
            else said.mean_depth <= config.num_loops * max_steps_percent / 100
        ),
        "saved": save,
    }
    if save:
        _set_in_config(loaded.folder, halt_threshold=figures["threshold"])
    return figures


def spread_thresholds(
    model,
    corpus: Corpus,
    shares: Sequence[float] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    rounds: int = 10,
) -> list[float]:
    """Thresholds, highest first, at which these shares of the loops between the first and the last are run."""
    depths: dict[float, float] = {}

    def mean_depth(threshold: float) -> float:
        if threshold not in depths:
            depths[threshold] = measure(model, corpus, threshold=threshold).mean_depth
        return depths[threshold]

    first, loops = model.config.min_steps, model.config.num_loops
    wanted = [first + share * (loops - first) for share in shares]
    found = {bisect(lambda one, most=most: mean_depth(one) <= most, False, rounds) for most in wanted}
    return sorted(found, reverse=True)


def _set_in_config(folder: Path, **fields: float) -> None:
    path = folder / "config.json"
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2) + "\n")
    draft.replace(path)


def bisect(allowed: Callable[[float], bool], lowest: bool, rounds: int) -> float:
    """The lowest (or highest) threshold in 0..1 that is allowed, `rounds` halvings exact; 1 (or 0) if none is found.

    A higher threshold stops fewer tokens, so that what is allowed lies at one end.
    """
    low, high = 0.0, 1.0
    for _ in range(rounds):
        middle = (low + high) / 2
        if allowed(middle) == lowest:
            high = middle
        else:
            low = middle
    return high if lowest else low


def _open_routed(checkpoint: str | Path) -> Loaded:
    loaded = load(checkpoint, trained=False)
    if not hasattr(loaded.model.config, "routed_layers"):
        raise ValueError(f"{loaded.folder} has no routed layers: there are no levels to set.")
    return loaded


def _held_out(packed: Packed, rows: np.ndarray) -> Corpus:
    """Rows as a corpus: few files make few documents, so up to eight rows that follow one another count as one."""
    stretch = np.arange(len(rows))[:, None] // max(1, min(8, len(rows) // 4))
    document = np.where(packed.document[rows] < 0, -1, stretch)
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "labels": packed.labels}
    size = {name: packed.bytes_per_token(name) for name in packed.topics}
    return Corpus(
        {name: torch.from_numpy(value[rows]).long() for name, value in inputs.items()},
        document, packed.topic[rows], list(packed.topics), size,
    )  # fmt: skip


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)]


def corpora(
    loaded: Loaded, files: Sequence[str] = (), limit: int | None = None
) -> tuple[str, Callable[[], None], Corpus]:
    """Of which text levels are set, what sets them, and the held-out text they are judged on, `limit` rows of it.

    Text: the files, all but the last tenth of each; without any the recipe's training and held-out parts, and without
    a recipe the shipped novels, at most `TOKENS` tokens. ValueError when there are too few tokens.
    """
    model, words, recipe = loaded.model, loaded.tokenizer, loaded.recipe
    if recipe is not None and not files:

        def set_levels() -> None:
            from .tasks import task_of
            from .trainer import calibrate_on

            calibrate_on(model, task_of(recipe))

        names = [] if recipe.data.text is not None else ["validation"]
        return "the recipe's training part", set_levels, corpus_of(loaded, names, limit)
    length = min(LENGTH, model.config.max_position_embeddings)
    most = max(1, TOKENS // length)
    if files:
        packed = read_corpus([Source(one, held_out=0) for one in files], words, length)
        fit, test = [], []
        for topic in range(len(packed.topics)):
            # a row with padding would have its pads scored
            rows = np.flatnonzero((packed.row_topic == topic) & (packed.document >= 0).all(1))
            cut = len(rows) - -(-len(rows) // 10)
            fit, test = [*fit, *rows[:cut]], [*test, *rows[cut:]]
        if not fit:
            raise ValueError(
                f"{', '.join(files)}: {int((packed.document >= 0).sum()):,} tokens are too few; calibration needs two"
                f" rows of {length}, one to set the levels and one to judge them."
            )
        parts = [(packed, np.array(fit)), (packed, np.array(test))]
        name = ", ".join(files)
    else:
        parts = []
        for part in ("train", "validation"):
            packed = read_corpus([Source("prose")], words, length, part)
            parts.append((packed, np.flatnonzero((packed.document >= 0).all(1))))
        name = "the shipped novels"
    (train, fit), (held, test) = parts
    fit, test = _spread(fit, most), _spread(test, most)[:limit]

    def set_levels() -> None:
        inputs = {"input_ids": train.input_ids[fit], "position_ids": train.position_ids[fit]}
        model.calibrate(
            **{key: torch.from_numpy(value).long().to(model.device) for key, value in inputs.items()}
        )

    return f"{len(fit) * length:,} tokens of {name}", set_levels, _held_out(held, test)


def shares_of(model, executed: np.ndarray) -> dict[str, float]:
    """Share of the tokens that each routed layer took, by its name."""
    return {str(layer): round(float(executed[:, layer].mean()), 4) for layer in model.config.routed_layers}


def set_levels(checkpoint: str | Path, files: Sequence[str] = (), limit: int | None = None) -> dict[str, Any]:
    """Sets the levels of a routed checkpoint's layers from text (`corpora`) and writes them into its weights.

    rows: for each capacity of `ASKED` what the layers took of held-out text, on average and each; and its loss.
    """
    loaded = _open_routed(checkpoint)
    text, setting, corpus = corpora(loaded, files, limit)
    setting()
    write_levels(loaded)
    rows = []
    for capacity in ASKED:
        title, knobs = f"capacity {capacity:g}", {"capacity": capacity, "selection": "threshold"}
        said = measure(loaded.model, corpus, title, **knobs)
        layers = shares_of(loaded.model, said.executed)
        realised = round(float(np.mean(list(layers.values()))), 4)
        rows.append(
            {"capacity": capacity, "realised": realised, "layers": layers, "loss": round(said.loss, 4)}
        )
    return {
        "levels_from": text,
        "held_out_tokens": int((corpus.document >= 0).sum()),
        "routed_layers": loaded.model.config.routed_layers,
        "rows": rows,
    }


def write_levels(loaded: Loaded) -> None:
    """Puts the model's levels into its checkpoint, which is replaced when the new one is whole."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = loaded.folder / "model.safetensors"
    with safe_open(path, "pt") as kept:
        notes = kept.metadata()
    levels = {name: one for name, one in loaded.model.state_dict().items() if name.endswith(".levels")}
    tensors = load_file(path) | {name: one.cpu() for name, one in levels.items()}
    draft = path.with_suffix(".part")
    save_file(tensors, draft, notes)
    draft.replace(path)


def calibrate_capacity(
    checkpoint: str | Path,
    max_loss_percent: float,
    files: Sequence[str] = (),
    limit: int | None = None,
    rounds: int = 7,
    save: bool = False,
) -> dict[str, Any]:
    """The smallest capacity whose loss stays within `max_loss_percent` of that of every token in every layer: found by
    bisection on one half of the held-out documents, reported on the other.

    Every token in every layer is selection="dense", or capacity 1, where gates still scale what a layer adds: whichever
    the model does better (`against`). save: writes the found one into the checkpoint's config as capacity. found: false
    when at capacity 1 the loss is above as well; nothing is saved then.
    """
    loaded = _open_routed(checkpoint)
    model, (_, _, corpus) = loaded.model, corpora(loaded, files, limit)
    fit, test = (only_rows(corpus, rows) for rows in halves(corpus))
    if not len(fit.labels) or not len(test.labels):
        raise ValueError(
            "The held-out part has too few documents to be cut in two; raise validation_rows, or give more --files."
        )
    losses = {name: measure(model, fit, **knobs).loss for name, knobs in WHOLE.items()}
    against = min(losses, key=losses.get)
    most = losses[against] * (1 + max_loss_percent / 100)

    def allowed(capacity: float) -> bool:
        said = measure(model, fit, f"capacity {capacity:g}", capacity=capacity, selection="threshold")
        return said.loss <= most

    capacity = bisect(allowed, True, rounds)
    found = capacity < 1 or allowed(1.0)
    base = measure(model, test, **WHOLE[against])
    said = measure(model, test, capacity=capacity, selection="threshold")
    layers = shares_of(model, said.executed)
    figures = {
        "capacity": round(capacity, 4),
        "target": {"max_loss_percent": max_loss_percent},
        "found": found,
        "against": against,
        "loss_percent": round(100 * (said.loss / base.loss - 1), 3),
        **difference(test.document, said.losses, base.losses),
        "capacity_realised": round(float(np.mean(list(layers.values()))), 4),
        "layers": layers,
        "macs_percent": round(100 * said.macs / base.macs, 2),
        "kv_percent": round(100 * int(said.row_kv_bytes.sum()) / int(base.row_kv_bytes.sum()), 2),
        "met": bool(said.loss <= base.loss * (1 + max_loss_percent / 100)),
        "saved": save and found,
    }
    if figures["saved"]:
        _set_in_config(loaded.folder, capacity=figures["capacity"])
    return figures
