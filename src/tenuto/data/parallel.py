"""Parallel text for translation: sentence pairs, a joint BPE, a filter by length, tokenised text kept in a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path

import numpy as np

from .sequences import lines_of
from .sequences_batches import Ragged, SequenceDataset
from .text_tokenizers import BOS, EOS, PAD, load_tokenizer, train_bpe


@dataclass(frozen=True)
class Corpus:
    """Where sentence pairs come from.

    source, target: two files, line n of one being line n of the other, plain or .gz; or `source` alone: a file of
    lines with tabs, or "hf:" and a name or path that `datasets` can stream. fields: which columns (from 0) of the
    lines, or which fields of a row ("translation.en"), are source and target. subset, split: the configuration and
    the split of an "hf:" set. limit: pairs read. times: how often each pair is there.
    """

    source: str
    target: str | None = None
    fields: list[str] = field(default_factory=lambda: ["0", "1"])
    subset: str | None = None
    split: str = "train"
    limit: int | None = None
    times: int = 1


def read_pairs(corpus: Corpus, folder: str | Path = ".") -> list[tuple[str, str]]:
    """The sentence pairs of a corpus, blanks at the ends taken off, pairs with an empty side left out.

    Files are looked for in `folder`. FileNotFoundError or ValueError with one sentence if something is missing,
    misaligned or empty.
    """
    pairs = []
    for source, target in islice(_open(corpus, Path(folder).expanduser()), corpus.limit):
        source, target = source.strip(), target.strip()
        if source and target:
            pairs += [(source, target)] * corpus.times
    if not pairs:
        raise ValueError(f"{corpus.source} has no sentence pair.")
    return pairs


def _open(corpus: Corpus, folder: Path) -> Iterator[tuple[str, str]]:
    if len(corpus.fields) != 2:
        raise ValueError(f"{corpus.source}: fields are two, of source and target; got {corpus.fields}.")
    if corpus.source.startswith("hf:"):
        return _rows(corpus)
    files = [folder / name for name in (corpus.source, corpus.target) if name is not None]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"There is no file {file}.")
    return _two(*files) if corpus.target is not None else _columns(corpus, *files)


def _two(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    for number, pair in enumerate(zip_longest(lines_of(source), lines_of(target)), 1):
        if None in pair:
            longer, shorter = (target, source) if pair[0] is None else (source, target)
            raise ValueError(f"{shorter} ends before line {number} of {longer}: they are not aligned.")
        yield pair


def _columns(corpus: Corpus, file: Path) -> Iterator[tuple[str, str]]:
    if not all(name.isdigit() for name in corpus.fields):
        raise ValueError(f"{file}: fields of lines with tabs are numbers from 0, got {corpus.fields}.")
    first, second = map(int, corpus.fields)
    for number, line in enumerate(lines_of(file), 1):
        columns = line.split("\t")
        if len(columns) <= max(first, second):
            raise ValueError(f"{file}, line {number}: expected {max(first, second) + 1} columns with tabs.")
        yield columns[first], columns[second]


def _rows(corpus: Corpus) -> Iterator[tuple[str, str]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"{corpus.source} is read with the package `datasets`; install it.") from None
    place, files = corpus.source.removeprefix("hf:"), {}
    local = Path(place).expanduser()
    if local.is_file():
        place, files = str(local.parent), {"data_files": local.name}
    rows = load_dataset(place, name=corpus.subset, split=corpus.split, streaming=True, **files)
    for number, row in enumerate(rows, 1):
        pair = []
        for name in corpus.fields:
            value = row
            for key in name.split("."):
                if not isinstance(value, dict) or key not in value:
                    raise ValueError(f"{corpus.source}, row {number}: there is no field {name}.")
                value = value[key]
            pair.append(str(value))
        yield pair[0], pair[1]


def joint_tokenizer(
    pairs: Sequence[tuple[str, str]], name: str, vocab_size: int, cache: str | Path | None = None
):
    """The tokenizer of both sides: "bpe", byte-level and trained on the pairs, or a folder with one.

    Its <pad>, <bos>, <eos> are 0, 1, 2. cache: a folder in which a trained one is kept under the hash of its text.
    """
    if name != "bpe":
        words = load_tokenizer(name)
        found = words.pad_token_id, words.bos_token_id, words.eos_token_id
        if found != (PAD, BOS, EOS):
            raise ValueError(f"The tokenizer {name} has <pad>, <bos>, <eos> at {found}; 0, 1, 2 are needed.")
        return words
    if cache is None:
        return train_bpe(chain.from_iterable(pairs), vocab_size)
    file = Path(cache) / f"{_digest(pairs, f'bpe {vocab_size}')}.tokenizer"
    if not file.is_dir():
        words = train_bpe(chain.from_iterable(pairs), vocab_size)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = _draft(file)
        words.save_pretrained(draft)
        try:
            draft.rename(file)
        except OSError:
            # another process was faster, with the same tokenizer
            if not file.is_dir():
                raise
    return load_tokenizer(str(file))


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    words,
    max_length: int | None = None,
    max_ratio: float | None = None,
    cache: str | Path | None = None,
) -> SequenceDataset:
    """Ids of both sides, each with its <eos>, for a tokenizer of `joint_tokenizer`.

    max_length: pairs with more tokens on a side are left out; max_ratio: so are those where one side has more than so
    many times the tokens of the other. cache: a folder in which the ids are kept, under the hash of text and
    tokenizer. ValueError if nothing is left.
    """
    file = None
    if cache is not None:
        file = Path(cache) / f"{_digest(pairs, words.backend_tokenizer.to_str())}.pairs.npz"
    if file is not None and file.exists():
        with np.load(file) as kept:
            sides = [Ragged(kept[f"ids{side}"], kept[f"ends{side}"]) for side in (0, 1)]
    else:
        sides = [encode_lines([pair[side] for pair in pairs], words) for side in (0, 1)]
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = _draft(file)
            with draft.open("wb") as out:
                np.savez(out, ids0=sides[0].ids, ends0=sides[0].ends, ids1=sides[1].ids, ends1=sides[1].ends)
            draft.replace(file)
    source, target = (side.lengths - 1 for side in sides)
    kept = within(source, target, max_length, max_ratio)
    if not kept.any():
        raise ValueError(f"None of {len(pairs)} pairs is within max_length and max_ratio.")
    if not kept.all():
        sides = [side.take(np.flatnonzero(kept)) for side in sides]
    return SequenceDataset(*sides)


def within(
    source: np.ndarray, target: np.ndarray, max_length: int | None, max_ratio: float | None
) -> np.ndarray:
    """Whether pairs of these lengths [N] are within the limits: [N] bool."""
    longer, shorter = np.maximum(source, target), np.minimum(source, target)
    kept = np.ones(len(source), bool)
    if max_length is not None:
        kept &= longer <= max_length
    if max_ratio is not None:
        kept &= longer <= max_ratio * shorter
    return kept


def encode_lines(lines: Sequence[str], words, chunk: int = 10_000) -> Ragged:
    """Ids of each line, <eos> at its end; a line that spells a special token is still text."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    options["return_attention_mask"] = False

    def encoded() -> Iterator[list[int]]:
        for first in range(0, len(lines), chunk):
            for ids in words(list(lines[first : first + chunk]), **options)["input_ids"]:
                yield [*ids, words.eos_token_id]

    return Ragged.of(encoded())


def _digest(pairs: Sequence[tuple[str, str]], rule: str) -> str:
    key = hashlib.sha256(rule.encode())
    for text in chain.from_iterable(pairs):
        data = text.encode()
        key.update(len(data).to_bytes(8) + data)
    return key.hexdigest()[:32]


def _draft(file: Path) -> Path:
    """A name to write under until the file is whole: another process may look for it meanwhile."""
    return file.with_suffix(f".{np.random.default_rng().integers(2**62)}.part")
