"""From logical-inference pairs to batches: token ids, augmentation, curriculum, padding, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from . import logical_inference as logic

_SWAPPED = [logic.RELATIONS.index({"<": ">", ">": "<"}.get(one, one)) for one in logic.RELATIONS]
_VARIABLES = np.array([logic.VOCABULARY.index(one) for one in logic.VARIABLES])


class PairDataset(Dataset):
    """Pairs as token ids `<bos> left #SEP# right`, with segments 0 and 1, and the relation as label.

    An item is asked for by index, or by (index, draw): then the augmentations are drawn from `draw`, so that the
    same draw gives the same item in a resumed run.
    """

    def __init__(self, pairs: Sequence[logic.Pair], head: str, swap=False, rename=False):
        self.swap, self.rename, self.text = swap, rename, head == "text-to-text"
        words = {token: number for number, token in enumerate(logic.VOCABULARY)}
        self.sides = [
            tuple(np.array([words[token] for token in side.split()]) for side in (one.left, one.right))
            for one in pairs
        ]
        self.labels = [logic.label_id(one.relation) for one in pairs]
        self.operators = np.array([one.operators for one in pairs])
        self.lengths = np.array([len(left) + len(right) + 2 for left, right in self.sides])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | tuple[int, int]) -> dict:
        index, draw = key if isinstance(key, tuple) else (key, None)
        (left, right), label = self.sides[index], self.labels[index]
        if draw is not None and (self.swap or self.rename):
            random = np.random.default_rng(draw)
            if self.swap and random.random() < 0.5:
                left, right, label = right, left, _SWAPPED[label]
            if self.rename:
                table = np.arange(len(logic.VOCABULARY))
                table[_VARIABLES] = random.permutation(_VARIABLES)
                left, right = table[left], table[right]
        ids = np.concatenate([[logic.BOS], left, [logic.SEP], right])
        segments = np.zeros_like(ids)
        segments[len(left) + 1 :] = 1
        return {"ids": ids, "segments": segments, "label": label}

    def collate(self, items: list[dict]) -> dict[str, torch.Tensor]:
        """Items -> padded batch: input_ids, attention_mask, token_type_ids [B, T]; labels [B] or, as text, [B, 1]."""
        length = max(len(item["ids"]) for item in items)
        ids = np.full((len(items), length), logic.PAD)
        mask, segments = np.zeros_like(ids), np.zeros_like(ids)
        for row, item in enumerate(items):
            n = len(item["ids"])
            ids[row, :n], segments[row, :n], mask[row, :n] = item["ids"], item["segments"], 1
        labels = torch.tensor([item["label"] for item in items])
        if self.text:
            labels = (labels + FIRST_RELATION).unsqueeze(1)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "token_type_ids": torch.from_numpy(segments),
            "labels": labels,
        }


FIRST_RELATION = logic.VOCABULARY.index(logic.RELATION_NAMES[0])


class Curriculum(Sampler):
    """The whole run laid out in advance: `steps` batches of `batch` (index, draw) keys.

    Batches hold pairs of like length (little padding). Until `until` (a share of the run) only pairs of at most
    `start` operators, rising evenly to all, are drawn. Every chunk of batches is a function of the seed and its
    number alone: a resumed run sees the same ones.
    """

    chunk = 50

    def __init__(self, data: PairDataset, steps: int, batch: int, seed: int, start: int, until: float):
        self.data, self.steps, self.batch, self.seed = data, steps, batch, seed
        self.start, self.until = start, until
        self.most = int(data.operators.max())

    def __len__(self) -> int:
        return self.steps * self.batch

    def admitted(self, share: float) -> int:
        """The largest number of operators drawn when `share` of the run is over."""
        if share >= self.until or self.start >= self.most:
            return self.most
        return min(self.most, self.start + int(share / self.until * (self.most - self.start + 1)))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.steps, self.chunk):
            random = np.random.default_rng([self.seed, first])
            batches = min(self.chunk, self.steps - first)
            allowed = np.flatnonzero(self.data.operators <= self.admitted(first / self.steps))
            size = batches * self.batch
            drawn = random.choice(allowed, size, replace=size > len(allowed))
            drawn = drawn[np.argsort(self.data.lengths[drawn], kind="stable")]
            order = random.permutation(batches)
            draws = random.integers(2**62, size=size)
            for place, index in enumerate(drawn.reshape(batches, self.batch)[order].ravel()):
                yield int(index), int(draws[place])


def tokenizer():
    """The task's word-level tokenizer, for saving beside a checkpoint."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {token: number for number, token in enumerate(logic.VOCABULARY)}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", sep_token="#SEP#"
    )
