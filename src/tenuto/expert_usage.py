"""Which expert serves which token: co-occurrence counts and pointwise mutual information (SUT, Table 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .answers import inputs_of
from .data import parallel
from .data.logical_inference import VOCABULARY
from .data.pairs import PairDataset
from .data.sequences_batches import padded
from .evaluate import BATCH, Loaded, load, question, test_sets
from .translate import test_pairs

# a token of a large vocabulary that was read fewer times than this is not called specific to an expert: by chance
# alone it goes to few
SEEN = 20
LISTED = 100


def expert_usage(checkpoint: str | Path, names: Sequence[str] = (), limit: int = 2000) -> dict[str, Any]:
    """Counts of (token, expert) for every router over up to `limit` pairs, evenly spaced over the sets.

    Of a checkpoint of sequences or parallel text the sets are its parts, validation when none is named; it reads the
    targets as well (a decoder's token is the one that it reads, not the one it predicts), and the routers are named
    "encoder.attention", "decoder.attention", "decoder.cross", "decoder.feed_forward", ... Of one of logical inference
    they are the encoder's, without the prefix. Distinct layers have routers of their own: "encoder.2.attention".

    Each router has: usage [E] (shares of the choices), entropy (of the usage, 1 = uniform), largest (the largest share
    over an even one), dead (experts never chosen), faint (below a tenth of an even share), information (what a token
    says about its expert: mutual information in nats), counts {token: [E]} (the commonest and the specific tokens),
    specific: for each expert its tokens of the highest PMI = log p(token, expert) / (p(token) p(expert)) above 0, in
    nats; share: of the token's choices.
    """
    loaded = load(checkpoint)
    data = loaded.recipe.data
    of_pairs = data.sequences is not None or data.parallel is not None
    sets = test_pairs(loaded, names or ["validation"]) if of_pairs else test_sets(loaded.recipe, names)
    pairs = [one for group in sets.values() for one in group]
    # evenly spaced, so that every set has its share
    pairs = pairs[:: -(-len(pairs) // limit)]
    if of_pairs:
        vocabulary, least = token_names(loaded.tokenizer), SEEN
        batches = _read_pairs(loaded, pairs)
    else:
        vocabulary, least = VOCABULARY, 1
        batches = _read_logic(loaded, pairs)
    counts: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    for name, first, ids, experts in batches:
        total, size = _experts(loaded.model.config, name), len(vocabulary)
        table = counts.setdefault(name, np.zeros((size, total), int))
        np.add.at(table, (ids[:, None].repeat(experts.shape[1], 1), experts), 1)
        if first:
            seen[name] = seen.get(name, 0) + np.bincount(ids, minlength=size)
    if not counts:
        raise ValueError(f"{loaded.folder} has no routers: its model is dense.")
    routers = {name: _describe(table, vocabulary, seen[name] >= least) for name, table in counts.items()}
    return {"pairs": len(pairs), "sets": list(sets), "routers": routers}


def token_names(words) -> list[str]:
    """The tokens of a vocabulary as one reads them, no two alike; a blank before a word is shown as `▁`."""
    written = words.convert_ids_to_tokens(list(range(len(words))))
    if type(words.backend_tokenizer.decoder).__name__ != "ByteLevel":
        return written
    names = [words.decode([one]) for one in range(len(words))]
    # a part of a character has no text of its own
    return [
        raw if "\ufffd" in name or not name else name.replace(" ", "▁")
        for raw, name in zip(written, names, strict=True)
    ]


# of each application of a router: its name, whether it is the first to these tokens, their ids [N], the experts [N, k]
Choices = Iterator[tuple[str, bool, np.ndarray, np.ndarray]]


@torch.inference_mode()
def _read_pairs(loaded: Loaded, pairs: Sequence[tuple]) -> Choices:
    model, words = loaded.model, loaded.tokenizer
    sides = [parallel.encode_lines([one[side] for one in pairs], words) for side in (0, 1)]
    order = np.argsort(np.maximum(*(side.lengths for side in sides)), kind="stable")
    for start in range(0, len(pairs), 64):
        places = order[start : start + 64]
        sources, targets = ([side[int(one)] for one in places] for side in sides)
        batch = inputs_of(sources, model.device)
        labels = padded(targets, -100).to(model.device)
        out = model(**batch, labels=labels, output_routing=True)
        for side, ids in (("encoder", batch["input_ids"]), ("decoder", model.shift_right(labels))):
            yield from _choices(f"{side}.", getattr(model, side), out.routing[side], ids)


@torch.inference_mode()
def _read_logic(loaded: Loaded, pairs: Sequence) -> Choices:
    data = PairDataset(pairs, loaded.recipe.head)
    order = np.argsort(data.lengths, kind="stable")
    for start in range(0, len(pairs), BATCH):
        batch = question(loaded, data, order[start : start + BATCH])
        out = loaded.model(**batch, output_routing=True)
        if data.text:
            routing, stack = out.routing["encoder"], loaded.model.encoder
        else:
            routing, stack = out.routing, loaded.model.stack
        yield from _choices("", stack, routing, batch["input_ids"])


def _choices(prefix: str, stack, routing: Sequence[tuple], ids_BT: torch.Tensor) -> Choices:
    ids = ids_BT.flatten().cpu().numpy()
    # a tied block is one router at every step, distinct blocks are one each
    apart = hasattr(stack, "blocks")
    for step, name, places, experts, _ in routing:
        module = f"{prefix}{step}.{name}" if apart else f"{prefix}{name}"
        yield module, apart or step == 1, ids[places.cpu().numpy()], experts.cpu().numpy()


def expert_loop_information(routing: Sequence[tuple], experts: int, part: str = "feed_forward") -> float:
    """Mutual information of expert and loop in nats, of the experts of a part ("feed_forward", "attention") of a looped
    model's core.

        I = sum_el p(e, l) log p(e, l) / (p(e) p(l))         0: loops choose alike; at most log E, log L

    routing: the records of `output_routing=True` (of several batches: concatenated). Every choice of a token at a
    loop counts once. Each layer has experts of its own: of several layers the mean, weighted by choices. ValueError
    without routers.
    """
    tables: dict[str, dict[int, torch.Tensor]] = {}
    for loop, module, _, chosen, _ in routing:
        if module.startswith("core.") and module.endswith(part):
            loops = tables.setdefault(module, {})
            counts = torch.bincount(chosen.flatten(), minlength=experts)
            loops[loop] = loops[loop] + counts if loop in loops else counts
    if not tables:
        raise ValueError(
            f"The records hold no {part} router of a core: it has one expert, or the model is not looped."
        )
    information = total = 0.0
    for loops in tables.values():
        counts = torch.stack(list(loops.values())).double()
        joint = counts / counts.sum()
        apart = joint.sum(0) * joint.sum(1, keepdim=True)
        information += float(counts.sum() * torch.special.xlogy(joint, joint / apart.clamp(min=1e-300)).sum())
        total += float(counts.sum())
    return information / total


def _experts(config, module: str) -> int:
    return config.ffn_experts if module.endswith("feed_forward") else config.attention_experts


def _describe(table: np.ndarray, vocabulary: Sequence[str], common: np.ndarray) -> dict[str, Any]:
    """A router's figures from its counts [V, E]; common [V]: which tokens may be called specific."""
    joint = table / table.sum()
    token, expert = joint.sum(1, keepdims=True), joint.sum(0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        pmi = np.log(joint / (token * expert))
    usage, experts = expert[0], table.shape[1]
    alive = usage[usage > 0]
    read = table.sum(1)
    ranked = {}
    for number in range(experts):
        order = np.argsort(-np.nan_to_num(pmi[:, number], nan=-np.inf))
        ranked[number] = [int(row) for row in order if common[row] and pmi[row, number] > 0][:5]
    specific = {
        number: [
            {
                "token": vocabulary[row],
                "pmi": round(float(pmi[row, number]), 3),
                "count": int(table[row, number]),
                "share": round(float(table[row, number] / read[row]), 4),
            }
            for row in rows
        ]
        for number, rows in ranked.items()
    }
    listed = {row for rows in ranked.values() for row in rows}
    listed |= set(np.argsort(-read, kind="stable")[:LISTED].tolist())
    return {
        "usage": usage.round(4).tolist(),
        "entropy": round(float(-(alive * np.log(alive)).sum() / np.log(experts)), 4),
        "largest": round(float(usage.max() * experts), 3),
        "dead": [number for number, share in enumerate(usage) if share == 0],
        "faint": [number for number, share in enumerate(usage) if 0 < share < 0.1 / experts],
        "information": round(float(np.where(joint > 0, joint * np.where(joint > 0, pmi, 0.0), 0.0).sum()), 4),
        "counts": {vocabulary[row]: table[row].tolist() for row in sorted(listed) if read[row]},
        "specific": specific,
    }
