"""What an encoder-decoder writes for sources of ids, and how often it is the target, token for token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .data.sequences_batches import PAD, UNK, SequenceDataset, padded

SAMPLE = 256


def inputs_of(sources: Sequence[np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Sources of ids, each with its <eos>, as input_ids and attention_mask [B, S]."""
    return {
        "input_ids": padded(sources, PAD).to(device),
        "attention_mask": padded([np.ones_like(one) for one in sources], 0).to(device),
    }


@torch.inference_mode()
def written(model, inputs: dict[str, torch.Tensor], limit: int, **settings) -> list[list[int]]:
    """The ids that the model writes for each source, up to the first <eos>, which is kept, and `limit` at most.

    settings: arguments of `generate` and knobs of a forward; without any the likeliest token is taken always.
    """
    config = model.config
    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=limit,
        decoder_start_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        use_cache=model.decoder.cached,
        **settings,
    )
    return [until_end(row, config.eos_token_id) for row in out[:, 1:].tolist()]


def until_end(ids: list[int], end: int) -> list[int]:
    """The ids up to the first `end`, which is kept."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def exact_share(model, data: SequenceDataset, sample: int = SAMPLE, batch: int = 64) -> float:
    """Share of right answers, written greedily, to `sample` pairs at most, spread evenly over the set (0..1).

    A target with a word that the vocabulary lacks is never right. The model is left in the mode it was in.
    """
    places = np.linspace(0, len(data) - 1, min(sample, len(data))).astype(int)
    mode, right = model.training, 0
    model.eval()
    for start in range(0, len(places), batch):
        sources, targets = zip(*(data[int(one)][0] for one in places[start : start + batch]), strict=True)
        # what is longer than the longest target is wrong, whatever follows
        said = written(model, inputs_of(sources, model.device), max(map(len, targets)))
        for ids, target in zip(said, targets, strict=True):
            right += ids == target.tolist() and UNK not in ids
    model.train(mode)
    return right / len(places)
