"""From logical-inference pairs to batches: token ids, augmentation, curriculum, padding, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from . import logical_inference as logic


class PairDataset(Dataset):
    """Pairs as token ids `<bos> left #SEP# right`, with segments 0 and 1, and the relation as label.

    An item is asked for by index, or by (index, draw): then the augmentations are drawn from `draw`, so that the
    same draw gives the same item in a resumed run. `swap` exchanges the sentences of half of the draws, `rename`
    permutes the variables' names.
    """

    def __init__(self, pairs: Sequence[logic.Pair], head: str, swap=False, rename=False):
        self.pairs, self.head, self.swap, self.rename = pairs, head, swap, rename
        self.text = head == "text-to-text"
        self.operators = np.array([one.operators for one in pairs])
        self.lengths = np.array([len(one.left.split()) + len(one.right.split()) + 2 for one in pairs])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: int | tuple[int, int]) -> dict:
        index, draw = key if isinstance(key, tuple) else (key, None)
        pair = self.pairs[index]
        if draw is not None and (self.swap or self.rename):
            random = np.random.default_rng(draw)
            if self.swap and random.random() < 0.5:
                pair = logic.swap(pair)
            if self.rename:
                pair = logic.rename(pair, random.permutation(logic.VARIABLES).tolist())
        ids, target = logic.encode(pair, self.head, bos=True)
        return {"ids": ids, "label": target[0]}

    def collate(self, items: list[dict]) -> dict[str, torch.Tensor]:
        """Items -> padded batch.

        input_ids, attention_mask (1 at tokens), token_type_ids (1 from #SEP# on): [B, T]; labels: [B], or [B, 1] as
        text.
        """
        length = max(len(item["ids"]) for item in items)
        ids = torch.tensor([item["ids"] + [logic.PAD] * (length - len(item["ids"])) for item in items])
        mask = (ids != logic.PAD).long()
        labels = torch.tensor([item["label"] for item in items])
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": (ids == logic.SEP).long().cumsum(1) * mask,
            "labels": labels.unsqueeze(1) if self.text else labels,
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
