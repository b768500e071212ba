"""Text for causal language models: documents packed into rows, and a seeded mix of topics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .text_documents import Source, read_documents
from .text_tokenizers import PAD, encode_documents, ends_of


@dataclass(frozen=True)
class Packed:
    """R rows of T tokens cut from D documents laid end to end.

    input_ids [R, T] int32. document [R, T] int32: the index of the token's document, -1 at padding. document_topic
    [D] int8: index into `topics`. document_bytes [D] int64: the UTF-8 bytes of its text, without <bos> and <eos>.
    """

    input_ids: np.ndarray
    document: np.ndarray
    document_topic: np.ndarray
    document_bytes: np.ndarray
    topics: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def position_ids(self) -> np.ndarray:
        """[R, T] int32, from 0 at the start of every document and of every row: attention begins there."""
        return _positions(self.document)

    @property
    def labels(self) -> np.ndarray:
        """[R, T] int32: input_ids, but -100 at padding and where a document begins after another.

        Unshifted: the model predicts labels[t] from t - 1, so no document predicts the next one's first token.
        """
        return _labels(self.input_ids, self.document)

    @property
    def topic(self) -> np.ndarray:
        """[R, T] int8: index into `topics`, -1 at padding."""
        return np.where(self.document < 0, np.int8(-1), self.document_topic[self.document])

    @property
    def row_topic(self) -> np.ndarray:
        """[R] int8: the topic of each row's first token."""
        return self.document_topic[self.document[:, 0]]

    def bytes_per_token(self, topic: str | None = None) -> float:
        """Bytes of text for each token of the corpus (or of one topic), <eos> counted and <bos> not.

        Loss in nats / ln 2 / this is bits per byte. The first token of a row, which nothing predicts, counts as an
        average one.
        """
        size_D = np.bincount(self.document[self.document >= 0], minlength=len(self.document_bytes))
        # the first token of a document is never predicted
        size_D = np.maximum(size_D - 1, 0)
        if not self.document_bytes.any():
            raise ValueError("The bytes of the documents are unknown; give document_bytes to pack.")
        chosen_D = ... if topic is None else self.document_topic == self.topics.index(topic)
        return float(self.document_bytes[chosen_D].sum() / size_D[chosen_D].sum())

    def bits_per_byte(self, loss: float, topic: str | None = None) -> float:
        """A mean loss in nats per token as bits per byte of text."""
        return loss / math.log(2) / self.bytes_per_token(topic)


def _starts(document_RT: np.ndarray) -> np.ndarray:
    """True at the first token of every document after another in the row: [R, T]."""
    start_RT = np.zeros(document_RT.shape, bool)
    start_RT[:, 1:] = document_RT[:, 1:] != document_RT[:, :-1]
    return start_RT


def _positions(document_RT: np.ndarray) -> np.ndarray:
    place_T = np.arange(document_RT.shape[1], dtype=np.int32)
    first_RT = np.where(_starts(document_RT), place_T, np.int32(0))
    return place_T - np.maximum.accumulate(first_RT, axis=1)


def _labels(ids_RT: np.ndarray, document_RT: np.ndarray) -> np.ndarray:
    return np.where(_starts(document_RT) | (document_RT < 0), np.int32(-100), ids_RT)


def pack(
    documents_ids: Iterable[Sequence[int] | np.ndarray],
    length: int,
    pad: int = PAD,
    topic: str = "text",
    document_bytes: Sequence[int] | None = None,
) -> Packed:
    """Documents of one topic, each from <bos> to <eos>, laid end to end and cut into rows of `length` tokens.

    A document that does not fit goes on in the next row, where its positions begin at 0 again. No token is lost: the
    last row is filled with `pad`, which has labels -100 and positions from 0 like a document of its own, so that
    nothing attends to it. ValueError if `length` < 2 or there is no token.
    """
    if length < 2:
        raise ValueError(f"A row needs at least 2 tokens, so that one predicts another; length is {length}.")
    documents = [np.asarray(ids, np.int32) for ids in documents_ids]
    sizes_D = np.array([len(ids) for ids in documents], np.int64)
    if not sizes_D.sum():
        raise ValueError("The corpus is empty: there is no token to pack.")
    if document_bytes is not None and len(document_bytes) != len(documents):
        raise ValueError(f"Got {len(document_bytes)} document_bytes for {len(documents)} documents.")
    index = np.repeat(np.arange(len(documents), dtype=np.int32), sizes_D)
    tail = (0, -len(index) % length)
    return Packed(
        np.pad(np.concatenate(documents), tail, constant_values=pad).reshape(-1, length),
        np.pad(index, tail, constant_values=-1).reshape(-1, length),
        np.zeros(len(documents), np.int8),
        np.array(np.zeros(len(documents)) if document_bytes is None else document_bytes, np.int64),
        (topic,),
    )


def join(parts: Sequence[Packed]) -> Packed:
    """The rows of several packed corpora, one after the other; documents are numbered through."""
    topics = tuple(dict.fromkeys(name for part in parts for name in part.topics))
    documents, document_topics, first = [], [], 0
    for part in parts:
        documents.append(np.where(part.document < 0, np.int32(-1), part.document + np.int32(first)))
        index_K = np.array([topics.index(name) for name in part.topics], np.int8)
        document_topics.append(index_K[part.document_topic])
        first += len(part.document_bytes)
    return Packed(
        np.concatenate([part.input_ids for part in parts]),
        np.concatenate(documents),
        np.concatenate(document_topics),
        np.concatenate([part.document_bytes for part in parts]),
        topics,
    )


def read_corpus(
    sources: Sequence[Source | str],
    tokenizer,
    length: int,
    part: Literal["train", "validation"] | None = None,
    cache: Path | str | None = None,
) -> Packed:
    """Reads, tokenises and packs one part of the sources; every row is of one topic.

    In the validation part, sources that hold nothing out (held_out 0) are left out. cache: a folder in which the ids
    of each topic are kept, under the hash of its texts and the tokenizer.
    """
    topics: dict[str, list[str]] = {}
    for source in sources:
        source = Source(source) if isinstance(source, str) else source
        if part == "validation" and source.held_out == 0:
            continue
        for text, topic, _ in read_documents(source, part):
            topics.setdefault(topic, []).append(text)
    if not topics:
        raise ValueError("The corpus is empty: no source has a validation part." if sources else "No source.")
    pad = ends_of(tokenizer)[0]
    return join(
        [
            pack(
                _kept_ids(texts, tokenizer, cache), length, pad, topic, [len(text.encode()) for text in texts]
            )
            for topic, texts in topics.items()
        ]
    )


def _kept_ids(texts: list[str], tokenizer, cache: Path | str | None) -> Iterable[np.ndarray]:
    core = getattr(tokenizer, "backend_tokenizer", None)
    if cache is None or core is None:
        return encode_documents(texts, tokenizer)
    key = hashlib.sha256(repr((core.to_str(), ends_of(tokenizer))).encode())
    for text in texts:
        data = text.encode()
        key.update(len(data).to_bytes(8) + data)
    file = Path(cache) / f"{key.hexdigest()[:32]}.npz"
    if not file.exists():
        ids = list(encode_documents(texts, tokenizer))
        file.parent.mkdir(parents=True, exist_ok=True)
        # renamed when whole: another process may look for it meanwhile
        unfinished = file.with_suffix(f".{np.random.default_rng().integers(2**62)}.part")
        with unfinished.open("wb") as out:
            np.savez(out, ids=np.concatenate(ids), sizes=[len(one) for one in ids])
        unfinished.replace(file)
    with np.load(file) as kept:
        return np.split(kept["ids"], np.cumsum(kept["sizes"])[:-1])


class PackedDataset(Dataset):
    """The rows of a packed corpus: index -> {"input_ids", "position_ids", "labels"}, each [T] int64."""

    def __init__(self, packed: Packed):
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids_1T, document_1T = self.packed.input_ids[[index]], self.packed.document[[index]]
        return {
            "input_ids": torch.from_numpy(ids_1T[0]).long(),
            "position_ids": torch.from_numpy(_positions(document_1T)[0]).long(),
            "labels": torch.from_numpy(_labels(ids_1T, document_1T)[0]).long(),
        }


class Mix(Sampler):
    """The whole run laid out in advance: `steps` batches of `batch` rows, mixed by topic.

    weights: topic -> share of the rows, in any unit; by default all topics alike. Every batch has its share to within
    one row, and exactly in expectation. Rows of a topic are drawn in a new order each time all have been drawn. A
    batch is a function of the seed and its number alone: a resumed or longer run sees the same ones.
    """

    def __init__(
        self,
        data: PackedDataset,
        steps: int,
        batch: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
    ):
        topics, row_topic = data.packed.topics, data.packed.row_topic
        weights = dict.fromkeys(topics, 1.0) if weights is None else weights
        if unknown := sorted(set(weights) - set(topics)):
            raise ValueError(f"Weight for unknown topic {unknown[0]!r}; the topics are {', '.join(topics)}.")
        share_K = np.array([weights.get(topic, 0.0) for topic in topics], float)
        if not (np.isfinite(share_K).all() and (share_K >= 0).all() and share_K.any()):
            raise ValueError(f"Weights must be 0 or more, and one of them more; got {dict(weights)}.")
        self.steps, self.batch, self.seed = steps, batch, seed
        self.rows = [np.flatnonzero(row_topic == k) for k in range(len(topics))]
        self.orders: dict[int, tuple[int, np.ndarray]] = {}
        # The slots of a batch stand at 0 + u, 1 + u, ... with one random u; a topic takes those between its edges.
        edge_K = np.cumsum(share_K) / share_K.sum() * batch
        # whatever the rounding, the last slot has a topic
        edge_K[np.flatnonzero(share_K)[-1] :] = batch
        u_S = np.random.default_rng(seed).random(steps)
        below_SK = np.ceil(edge_K - u_S[:, None]).clip(0, batch).astype(np.int64)
        self.counts = np.diff(below_SK, axis=1, prepend=0)
        self.first = np.cumsum(self.counts, axis=0) - self.counts

    def __len__(self) -> int:
        return self.steps * self.batch

    def _order(self, topic: int, epoch: int) -> np.ndarray:
        if self.orders.get(topic, (None,))[0] != epoch:
            random = np.random.default_rng([self.seed, 1, topic, epoch])
            self.orders[topic] = epoch, random.permutation(self.rows[topic])
        return self.orders[topic][1]

    def rows_of(self, step: int) -> np.ndarray:
        """The row indices of one batch: [batch]."""
        drawn = []
        for topic, (first, count) in enumerate(zip(self.first[step], self.counts[step], strict=True)):
            for draw in range(first, first + count):
                epoch, place = divmod(draw, len(self.rows[topic]))
                drawn.append(self._order(topic, epoch)[place])
        return np.random.default_rng([self.seed, 2, step]).permutation(drawn)

    def __iter__(self) -> Iterator[int]:
        for step in range(self.steps):
            yield from self.rows_of(step).tolist()
