"""From pairs of sequences to batches: a vocabulary of words, ids packed in arrays, batches of like lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)


def word_tokenizer(sequences: Iterable[Sequence[str]]):
    """A tokenizer of words apart by blanks: `SPECIAL`, then the words of the sequences, the commonest first."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    counts = Counter(word for sequence in sequences for word in sequence)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    core = Tokenizer(WordLevel({word: k for k, word in enumerate((*SPECIAL, *words))}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


class Ragged:
    """N sequences of ids in one array: ids [sum of lengths] int32, ends [N] int64; index -> ids."""

    def __init__(self, ids: np.ndarray, ends: np.ndarray):
        self.ids, self.ends = ids, ends
        self.lengths = np.diff(ends, prepend=0)

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Ragged:
        """The sequences, one after the other."""
        arrays = [np.asarray(one, np.int32) for one in sequences]
        ids = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        return cls(ids, np.cumsum([len(one) for one in arrays], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.ends[index] - self.lengths[index] : self.ends[index]]

    def take(self, places: np.ndarray) -> Ragged:
        """The sequences at these places."""
        lengths = self.lengths[places]
        ends = np.cumsum(lengths)
        # where each id of the new array stood in the old one
        shifts = self.ends[places] - ends
        return Ragged(self.ids[np.arange(lengths.sum()) + np.repeat(shifts, lengths)], ends)


class SequenceDataset(Dataset):
    """Pairs of id sequences, source and target, each with its <eos>.

    An item is asked for by index, or by a tuple of indices: a whole batch, then `collate` gets one item.
    """

    def __init__(self, source: Ragged, target: Ragged):
        self.source, self.target = source, target
        self.lengths = np.maximum(source.lengths, target.lengths)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.source[one], self.target[one]) for one in (key if isinstance(key, tuple) else (key,))]

    def by_length(self) -> SequenceDataset:
        """The same pairs, the shortest first: batches in order are then almost free of padding."""
        order = np.argsort(self.lengths, kind="stable")
        return SequenceDataset(self.source.take(order), self.target.take(order))

    def collate(self, items: list[list[tuple[np.ndarray, np.ndarray]]]) -> dict[str, torch.Tensor]:
        """Items -> batch padded on the right: input_ids, attention_mask [B, S]; labels [B, T], -100 at padding."""
        pairs = [pair for item in items for pair in item]
        ids = padded([source for source, _ in pairs], PAD)
        return {
            "input_ids": ids,
            "attention_mask": padded([np.ones_like(source) for source, _ in pairs], 0),
            "labels": padded([target for _, target in pairs], -100),
        }


def padded(sequences: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """[B, T] int64, `fill` after the end of each sequence."""
    grid = np.full((len(sequences), max(map(len, sequences))), fill, np.int64)
    for row, one in zip(grid, sequences, strict=True):
        row[: len(one)] = one
    return torch.from_numpy(grid)


class Batches(Sampler):
    """The whole run laid out in advance: `steps` x `batch` keys, pairs of like length together.

    Without `tokens` a key is the index of a pair, `batch` of them in a step. With `tokens` a key is a tuple of indices,
    a batch of at most so many tokens (pairs x the longest of their sequences, padding included), `batch` of them in a
    step. Every pair comes once an epoch (without `tokens` all but a random remainder). An epoch is a function of the
    seed and its number alone, so a resumed or longer run sees the same batches.
    """

    def __init__(self, lengths: np.ndarray, steps: int, batch: int, seed: int, tokens: int | None = None):
        self.lengths, self.steps, self.batch, self.seed, self.tokens = lengths, steps, batch, seed, tokens
        if tokens is None and len(lengths) < batch:
            raise ValueError(f"There are {len(lengths)} pairs to train on, fewer than a batch of {batch}.")

    def __len__(self) -> int:
        return self.steps * self.batch

    def epoch(self, number: int) -> list[np.ndarray]:
        """The batches of an epoch, each the indices of its pairs."""
        random = np.random.default_rng([self.seed, number])
        order = random.permutation(len(self.lengths))
        if self.tokens is None:
            order = order[: len(order) // self.batch * self.batch]
        order = order[np.argsort(self.lengths[order], kind="stable")]
        if self.tokens is None:
            cuts = np.arange(self.batch, len(order), self.batch)
        else:
            cuts = self._cuts(self.lengths[order])
        batches = np.split(order, cuts)
        return [batches[place] for place in random.permutation(len(batches))]

    def _cuts(self, rising: np.ndarray) -> list[int]:
        """Where batches begin but the first, of sequences whose lengths rise."""
        cuts, first = [], 0
        while True:
            # no more than this many fit, as long as the first of them
            after = min(len(rising), first + max(1, self.tokens // max(1, rising[first])))
            cost = rising[first:after] * np.arange(1, after - first + 1)
            # cost rises; a sequence longer than a batch has one of its own
            first += max(1, int(np.searchsorted(cost, self.tokens, side="right")))
            if first >= len(rising):
                return cuts
            cuts.append(first)

    def __iter__(self) -> Iterator[int | tuple[int, ...]]:
        left, number = len(self), 0
        while left:
            keys = self.epoch(number)
            if self.tokens is None:
                keys = np.concatenate(keys).tolist()
            else:
                keys = [tuple(one.tolist()) for one in keys]
            yield from keys[:left]
            left -= min(left, len(keys))
            number += 1
