"""Which expert serves which token: co-occurrence counts and pointwise mutual information (SUT, Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .data.logical_inference import VOCABULARY
from .data.pairs import PairDataset
from .evaluate import BATCH, load, question, test_sets


@torch.inference_mode()
def expert_usage(checkpoint: str | Path, names: Sequence[str] = (), limit: int = 2000) -> dict[str, Any]:
    """Counts of (token, expert) for every router of the encoder over up to `limit` pairs.

    Each router has: counts {token: [E]}, usage [E] (shares), entropy (of the usage, 1 = uniform), dead experts,
    specific: for each expert its tokens by PMI = log p(token, expert) / (p(token) p(expert)), in nats.
    """
    loaded = load(checkpoint)
    pairs = [one for group in test_sets(loaded.recipe, names).values() for one in group]
    # evenly spaced, so that every set has its share
    pairs = pairs[:: -(-len(pairs) // limit)]
    data = PairDataset(pairs, loaded.recipe.head)
    order = np.argsort(data.lengths, kind="stable")
    counts: dict[str, np.ndarray] = {}
    for start in range(0, len(pairs), BATCH):
        batch = question(loaded, data, order[start : start + BATCH])
        out = loaded.model(**batch, output_routing=True)
        routing = out.routing["encoder"] if data.text else out.routing
        ids = batch["input_ids"].flatten().cpu().numpy()
        for _, name, places, experts, _ in routing:
            total = _experts(loaded.model.config, name)
            table = counts.setdefault(name, np.zeros((len(VOCABULARY), total), int))
            tokens = ids[places.cpu().numpy()][:, None].repeat(experts.shape[1], 1)
            np.add.at(table, (tokens, experts.cpu().numpy()), 1)
    if not counts:
        raise ValueError(f"{loaded.folder} has no routers: its model is dense.")
    return {"pairs": len(pairs), "routers": {name: _describe(table) for name, table in counts.items()}}


def expert_loop_information(routing: Sequence[tuple], experts: int) -> float:
    """Mutual information of expert and loop in nats, of the feed-forward experts of a looped model's core.

        I = sum_el p(e, l) log p(e, l) / (p(e) p(l))         0: loops choose alike; at most log E, log L

    routing: the records of `output_routing=True` (of several batches: concatenated). Every choice of a token at a
    loop counts once. Each layer has experts of its own: of several layers the mean, weighted by choices. ValueError
    without routers.
    """
    tables: dict[str, dict[int, torch.Tensor]] = {}
    for loop, module, _, chosen, _ in routing:
        if module.startswith("core.") and module.endswith("feed_forward"):
            loops = tables.setdefault(module, {})
            counts = torch.bincount(chosen.flatten(), minlength=experts)
            loops[loop] = loops[loop] + counts if loop in loops else counts
    if not tables:
        raise ValueError(
            "The records hold no feed-forward router of a core: ffn_experts is 1, or it is not looped."
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


def _describe(table: np.ndarray) -> dict[str, Any]:
    joint = table / table.sum()
    token, expert = joint.sum(1, keepdims=True), joint.sum(0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        pmi = np.log(joint / (token * expert))
    usage = expert[0]
    alive = usage[usage > 0]
    specific = {}
    for number in range(table.shape[1]):
        seen = [row for row in np.argsort(-np.nan_to_num(pmi[:, number], nan=-np.inf)) if table[row, number]]
        specific[number] = [
            {
                "token": VOCABULARY[row],
                "pmi": round(float(pmi[row, number]), 3),
                "count": int(table[row, number]),
            }
            for row in seen[:5]
        ]
    return {
        "usage": usage.round(4).tolist(),
        "entropy": round(float(-(alive * np.log(alive)).sum() / np.log(len(usage))), 4),
        "dead": [number for number, share in enumerate(usage) if share == 0],
        "counts": {VOCABULARY[row]: table[row].tolist() for row in np.flatnonzero(table.sum(1))},
        "specific": specific,
    }
