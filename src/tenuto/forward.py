"""One forward pass of a causal model over rows of tokens, with depth knobs, and what each row cost."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from .clock import now


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
    before = now(device)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, **knobs)
    seconds = now(device) - before
    depths, ledger = getattr(out, "depths", None), getattr(out, "compute", None)
    steps = [None] * len(rows) if depths is None else (depths * mask).sum(-1).tolist()
    macs = [None] * len(rows) if ledger is None else ledger.per_sequence.tolist()
    costs = [Cost(len(row), *spent) for row, *spent in zip(rows, steps, macs, strict=True)]
    return out.logits, costs, seconds


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32, or as they are where that is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def batches(rows: Sequence, size: int, title: str | None) -> Iterable[Sequence]:
    """The rows, `size` at a time, with a bar on stderr; title None: no bar."""
    bar = Console(stderr=True)
    starts = range(0, len(rows), size)
    hidden = title is None or not bar.is_terminal
    for start in track(starts, title or "", console=bar, transient=True, disable=hidden):
        yield rows[start : start + size]
