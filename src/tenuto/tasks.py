"""What a recipe's data are for the trainer: data sets, batches, tokenizer, measures of the validation part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler, Subset

from .answers import exact_share
from .data import algorithmic, parallel, sequences, text
from .data.logical_inference import protocol
from .data.pairs import Curriculum, PairDataset, tokenizer
from .data.sequences_batches import Batches, SequenceDataset, word_tokenizer
from .data.text_documents import read_documents
from .data.text_tokenizers import load_tokenizer, train_bpe
from .recipe import Parallel, Recipe, Sequences, Text


@dataclass
class Task:
    """train, validation: data sets. sampler: (steps, batch, seed) -> the run's items in order. collate: items ->
    batch, None for the trainer's own. measure: (predictions, labels) -> figures, None where the loss is all there is.
    vocabulary: number of tokens. answers: model -> figures of what it writes for a sample of the validation part, as
    shares; None where nothing is written.
    """

    train: Dataset
    validation: Dataset
    sampler: Callable[[int, int, int], Sampler]
    collate: Callable | None
    tokenizer: Any
    measure: Callable[[np.ndarray, np.ndarray], dict[str, float]] | None
    vocabulary: int
    answers: Callable[[Any], dict[str, float]] | None = None


def task_of(recipe: Recipe) -> Task:
    """The task that the recipe names; ValueError or FileNotFoundError with one sentence if its data are wrong."""
    if recipe.data.text is not None:
        return _text(recipe.data.text)
    if recipe.data.algorithmic is not None:
        return _algorithmic(recipe)
    if recipe.data.sequences is not None:
        return _sequences(recipe.data.sequences)
    if recipe.data.parallel is not None:
        return _parallel(recipe.data.parallel)
    return _logic(recipe)


def _curriculum(recipe: Recipe, data: Dataset):
    schedule = recipe.schedule
    return lambda steps, batch, seed: Curriculum(
        data, steps, batch, seed, schedule.operators_from, schedule.operators_until
    )


def _logic(recipe: Recipe) -> Task:
    most, pairs = recipe.data.max_operators, protocol(recipe.data.protocol)
    kept = [one for one in pairs.train if one.operators <= most]
    valid = [one for one in pairs.validation if one.operators <= most]
    data = PairDataset(kept, recipe.head, recipe.data.swap, recipe.data.rename)
    # sorted by length: batches of the evaluation are then almost free of padding
    valid.sort(key=lambda one: len(one.left) + len(one.right))

    def accuracy(predictions, labels):
        return {"accuracy": float((predictions.argmax(-1) == labels).mean())}

    valid = PairDataset(valid, recipe.head)
    words = tokenizer()
    return Task(data, valid, _curriculum(recipe, data), data.collate, words, accuracy, len(words))


def _algorithmic(recipe: Recipe) -> Task:
    made = problems(recipe)
    data = algorithmic.AlgorithmicDataset(made["train"], "causal", even=True)
    valid = algorithmic.AlgorithmicDataset(
        sorted(made["validation"], key=lambda one: len(one.tokens)), "causal"
    )

    def accuracy(predictions, labels):
        # the label's place is one after the place that predicts it
        return {
            "accuracy": float((predictions[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100].mean())
        }

    words = algorithmic.tokenizer()
    return Task(data, valid, _curriculum(recipe, data), data.collate, words, accuracy, len(words))


def problems(recipe: Recipe) -> dict[str, list[algorithmic.Problem]]:
    """The recipe's problems by part: train, validation, test-<depth>."""
    wanted = recipe.data.algorithmic
    return algorithmic.splits(
        wanted.task, train=wanted.train, train_depths=wanted.train_depths, test_depths=wanted.test_depths
    )


def tokenizer_of(wanted: Text):
    """The tokenizer that a recipe's text names; "bpe" is trained on the training part."""
    if wanted.tokenizer != "bpe":
        return load_tokenizer(wanted.tokenizer)

    def texts() -> Iterator[str]:
        for source in wanted.sources:
            # a few megabytes of each source say enough about pairs of bytes
            yield from (one.text for one in islice(read_documents(source, "train"), 2000))

    return train_bpe(texts(), wanted.vocab_size)


def vocabulary(recipe: Recipe) -> int:
    """Number of tokens of the recipe's tokenizer, without training one."""
    wanted = recipe.data.text
    if wanted is None:
        return len(algorithmic.VOCABULARY)
    return wanted.vocab_size if wanted.tokenizer == "bpe" else len(load_tokenizer(wanted.tokenizer))


def held_out(wanted: Text, words) -> tuple[text.Packed, np.ndarray]:
    """The held-out part, and the indices of its rows that are evaluated: `validation_rows`, topics in turn."""
    packed = text.read_corpus(wanted.sources, words, wanted.length, "validation", wanted.cache)
    return packed, balanced_rows(packed, wanted.validation_rows)


def balanced_rows(packed: text.Packed, count: int) -> np.ndarray:
    """Indices of `count` rows, spread evenly over each topic's; topics in turn, so that all have alike many."""
    topic = packed.row_topic
    by_topic = [np.flatnonzero(topic == one) for one in np.unique(topic)]
    share = -(-count // len(by_topic))
    spread = [rows[np.linspace(0, len(rows) - 1, min(share, len(rows))).astype(int)] for rows in by_topic]
    turns = [rows[turn] for turn in range(share) for rows in spread if turn < len(rows)]
    return np.array(turns[:count])


def _text(wanted: Text) -> Task:
    words = tokenizer_of(wanted)
    train = text.PackedDataset(text.read_corpus(wanted.sources, words, wanted.length, "train", wanted.cache))
    packed, rows = held_out(wanted, words)
    return Task(
        train,
        Subset(text.PackedDataset(packed), rows.tolist()),
        lambda steps, batch, seed: text.Mix(train, steps, batch, seed, wanted.mix),
        None,
        words,
        None,
        len(words),
    )


def _sequences(wanted: Sequences) -> Task:
    def read(part: str) -> list[sequences.Example]:
        found = sequences.read(wanted.task, part, wanted.split, wanted.path)
        most = wanted.max_length
        return [one for one in found if most is None or max(len(one.source), len(one.target)) <= most]

    train = read("train")[: wanted.train]
    words = word_tokenizer(side for one in train for side in (one.source, one.target))
    task = _pairs(words, encode_examples(train, words), encode_examples(read("validation"), words), wanted)
    # of the loss of a target a wrong word is a small part, of exact match all
    task.answers = lambda model: {"exact": exact_share(model, task.validation)}
    return task


def encode_examples(examples: Sequence[sequences.Example], words) -> SequenceDataset:
    """Ids of both sides, each with its <eos>; ValueError if there is no example."""
    if not examples:
        raise ValueError("There is no example within max_length.")
    return parallel.encode_pairs([(" ".join(one.source), " ".join(one.target)) for one in examples], words)


def _parallel(wanted: Parallel) -> Task:
    def read(corpora: Sequence[parallel.Corpus]) -> list[tuple[str, str]]:
        return [pair for one in corpora for pair in parallel.read_pairs(one, wanted.folder)]

    train = read(wanted.train)
    words = parallel.joint_tokenizer(train, wanted.tokenizer, wanted.vocab_size, wanted.cache)
    limits = (words, wanted.max_length, wanted.max_ratio, wanted.cache)
    return _pairs(
        words,
        parallel.encode_pairs(train, *limits),
        parallel.encode_pairs(read(wanted.validation), *limits),
        wanted,
    )


def _pairs(words, train: SequenceDataset, valid: SequenceDataset, wanted: Sequences | Parallel) -> Task:
    def sampler(steps: int, batch: int, seed: int) -> Batches:
        return Batches(train.lengths, steps, batch, seed, wanted.batch_tokens)

    return Task(train, valid.by_length(), sampler, train.collate, words, None, len(words))
