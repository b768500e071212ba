"""Text for causal language models: sources, a split by document, tokenizers, packed rows, a seeded mix of topics."""

from __future__ import annotations

import fnmatch
import glob
import gzip
import hashlib
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

FILES = Path(__file__).parent / "files"
SPECIAL = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)

# What is held out of the shipped corpora: whole novels, and the published test set.
HELD_OUT = {
    "prose": ["mary-shelley_frankenstein*", "jane-austen_pride-and-prejudice*"],
    "math": ["test.jsonl.gz:*"],
}
EVERY = 20
TEXT_ENDINGS = (".txt", ".md", ".jsonl")
NOT_LIBRARY = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}
# How chats name the speaker and the message of a turn.
TURN_KEYS = (("role", "content"), ("from", "value"), ("speaker", "text"))


class Document(NamedTuple):
    """A text, its topic, and a name that is the same on every machine: it decides the part."""

    text: str
    topic: str
    name: str


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    path: "prose" or "math" (shipped), "code" (the Python standard library on this machine), a file, a folder (its
    .txt, .md and .jsonl files, also .gz) or a glob (`src/**/*.py`), or "hf:" and a name or path that `datasets` can
    stream. topic: by default the name of the corpus, file or folder. limit_bytes: stop there, in the middle of a
    document if need be; counted in each part. held_out: the validation part, as patterns of document names or as n
    for every n-th document by the hash of its name (0: none); by default what HELD_OUT says, or 20.
    blank_lines: a run of blank lines in a text file ends a document; else a file is one document.
    field, template: what is read of a JSON line or a row: one field, or several as in "{question}\\n{answer}". A
    field that is a list of turns (texts, [speaker, text] or {"role", "content"}) becomes a line a turn.
    subset, split: the configuration and the split of an "hf:" set.
    """

    path: str
    topic: str | None = None
    limit_bytes: int | None = None
    held_out: int | list[str] | None = None
    blank_lines: bool = False
    field: str = "text"
    template: str | None = None
    subset: str | None = None
    split: str = "train"


def held_out(source: Source, name: str) -> bool:
    """Whether the document of this name belongs to the validation part of the source."""
    rule = source.held_out
    if rule is None:
        rule = HELD_OUT.get(source.path, EVERY)
    if isinstance(rule, int):
        return rule > 0 and int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % rule == 0
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in rule)


def read_documents(
    source: Source | str, part: Literal["train", "validation"] | None = None
) -> Iterator[Document]:
    """The documents of a source, or of one part of it, in a fixed order; documents of blanks alone are left out.

    Lone surrogates, which no UTF-8 has, become "?". FileNotFoundError or ValueError with one sentence if something
    is missing, malformed (file and line are named) or empty.
    """
    source = Source(source) if isinstance(source, str) else source
    if part not in (None, "train", "validation"):
        raise ValueError(f"There is no part {part!r}; choose 'train' or 'validation'.")
    topic, texts = _open(source)
    left = math.inf if source.limit_bytes is None else source.limit_bytes
    found = False
    for name, text in texts:
        if left <= 0:
            break
        if not text.strip() or (part and held_out(source, name) != (part == "validation")):
            continue
        data = text.encode("utf-8", "replace")
        if len(data) > left:
            data = data[: int(left)]
        left -= len(data)
        found = True
        yield Document(data.decode("utf-8", "ignore"), topic, name)
    if not found:
        rest = f" in its {part} part; held_out says what that is" if part else ""
        raise ValueError(f"{source.path} has no text{rest}.")


def _open(source: Source) -> tuple[str, Iterator[tuple[str, str]]]:
    """The topic of a source, and the names and texts of its documents."""
    path = source.path
    if path.startswith("hf:"):
        rows = _hub_rows(source)
        return source.topic or _stem(path.removeprefix("hf:")), (
            (name, _text_of(row, source.field, source.template, name)) for name, row in rows
        )
    if path == "code":
        root, found = Path(sysconfig.get_paths()["stdlib"]), []
        for folder, folders, files in os.walk(root):
            folders[:] = set(folders) - NOT_LIBRARY
            found += [Path(folder, file) for file in files if file.endswith(".py")]
    elif path in HELD_OUT:
        root = FILES / path
        found = list(root.glob("*.gz"))
        _check(found)
    else:
        root, found = _find(path)
    template = "{question}\n{answer}" if path == "math" else source.template

    def texts():
        for file in sorted(found, key=lambda one: one.relative_to(root).as_posix()):
            name = file.relative_to(root).as_posix()
            if file.name.removesuffix(".gz").endswith(".jsonl"):
                for number, row in _json_lines(file):
                    where = f"{name}:{number}"
                    yield where, _text_of(row, source.field, template, f"{file}, line {number}")
            elif source.blank_lines:
                for number, piece in enumerate(re.split(r"\n(?:[ \t\r]*\n)+", _read(file)), 1):
                    yield f"{name}:{number}", piece
            else:
                yield name, _read(file)

    return source.topic or (path if path in (*HELD_OUT, "code") else _stem(path)), texts()


def _stem(path: str) -> str:
    plain = [
        piece for piece in Path(path).parts if not glob.has_magic(piece) and piece not in (".", "..", "/")
    ]
    return plain[-1].split(".")[0] if plain else path


def _find(path: str) -> tuple[Path, list[Path]]:
    """The files of a path or glob, and the folder that their names start from."""
    place = Path(path).expanduser()
    if place.is_file():
        return place.parent, [place]
    if place.is_dir():
        files = [one for one in place.rglob("*") if one.name.removesuffix(".gz").endswith(TEXT_ENDINGS)]
        root, wanted = place, f"{', '.join(TEXT_ENDINGS)} file, plain or .gz, in the folder"
    elif glob.has_magic(path):
        files = [Path(one) for one in glob.glob(str(place), recursive=True)]
        first = next(k for k, piece in enumerate(place.parts) if glob.has_magic(piece))
        root, wanted = Path(*place.parts[:first]), "file that matches"
    else:
        shipped = ", ".join([*HELD_OUT, "code"])
        raise FileNotFoundError(f"There is no file or folder {path}; shipped corpora are {shipped}.")
    files = [one for one in files if one.is_file()]
    if not files:
        raise FileNotFoundError(f"There is no {wanted} {path}.")
    return root, files


def _check(files: Iterable[Path]) -> None:
    for file in files:
        sums = (file.parent / "SHA256SUMS").read_text().strip().split("\n")
        recorded = dict(reversed(line.split()) for line in sums)
        if hashlib.sha256(file.read_bytes()).hexdigest() != recorded.get(file.name):
            raise ValueError(
                f"{file} is not the shipped file: its SHA-256 is not the recorded one; restore it."
            )


def _read(file: Path) -> str:
    data = file.read_bytes()
    try:
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: byte {error.start} fits nothing.") from None


def _json_lines(file: Path) -> Iterator[tuple[int, object]]:
    # lines of bytes end at \n alone; those of str may end at U+2028, which JSON allows inside a string
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: this is not JSON ({error}).") from None


def _hub_rows(source: Source) -> Iterator[tuple[str, dict]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"{source.path} is read with the package `datasets`; install it.") from None
    name = source.path.removeprefix("hf:")
    local = Path(name).expanduser()
    where = {"path": name}
    if local.is_file():
        where = {"path": str(local.parent), "data_files": local.name}
    rows = load_dataset(**where, name=source.subset, split=source.split, streaming=True)
    for number, row in enumerate(rows, 1):
        yield f"{local.name}/{source.split}:{number}", row


def _text_of(row: object, field: str, template: str | None, where: str) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with fields, found {str(row)[:60]!r}.")
    try:
        if template is None:
            return _joined(row[field])
        return template.format_map({key: _joined(row[key]) for key in row if f"{{{key}}}" in template})
    except KeyError as error:
        fields = ", ".join(row) or "none"
        raise ValueError(f"{where}: there is no field {error}; the fields are {fields}.") from None
    except TypeError as error:
        raise ValueError(f"{where}: {error}.") from None


def _joined(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(_turn, value))
    if isinstance(value, str | int | float):
        return str(value)
    raise TypeError(f"expected text or a list of turns, found {str(value)[:60]!r}")


def _turn(turn: object) -> str:
    if isinstance(turn, dict):
        keys = next((keys for keys in TURN_KEYS if keys[0] in turn and keys[1] in turn), ())
        turn = [turn[key] for key in keys]
    if isinstance(turn, list) and len(turn) == 2:
        return f"{turn[0]}: {turn[1]}"
    if isinstance(turn, str):
        return turn
    raise TypeError(f"a turn is a text, [speaker, text] or role and content, found {str(turn)[:60]!r}")


def _alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, 0 to 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *_alphabet()))}


def _wrap(core):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def byte_tokenizer():
    """One token a byte: <pad>, <bos>, <eos> are 0, 1, 2 and byte b is 3 + b.

    It adds no <bos> by itself, so decode(encode(text)) == text; `encode_documents` and prompts add it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.BPE(BYTE_VOCABULARY, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _wrap(core)


def train_bpe(texts: Iterable[str], vocab_size: int, min_frequency: int = 2, single_digits: bool = True):
    """A byte-level BPE tokenizer trained on the texts; <pad>, <bos>, <eos> are 0, 1, 2; it adds none by itself.

    It has fewer than `vocab_size` tokens if no pair is left that occurs `min_frequency` times. single_digits: numbers
    are spelt digit by digit. ValueError if `vocab_size` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < len(BYTE_VOCABULARY):
        raise ValueError(f"vocab_size must be at least {len(BYTE_VOCABULARY)}, got {vocab_size}.")
    core = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return _wrap(core)


def load_tokenizer(name_or_path: str):
    """The tokenizer "byte", or that of a folder, a GGUF file or a model as AutoTokenizer finds it; ValueError if none.

    One that has no padding pads with its end: rows are full, but a collator asks for it.
    """
    from transformers import AutoTokenizer

    if name_or_path == "byte":
        return byte_tokenizer()
    place, file = Path(name_or_path), {}
    if place.suffix == ".gguf":
        place, file = place.parent, {"gguf_file": place.name}
    try:
        words = AutoTokenizer.from_pretrained(place if file else name_or_path, **file)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no tokenizer {name_or_path}; say 'byte' or a folder with one.") from error
    if words.pad_token is None:
        words.pad_token = words.eos_token
    return words


def _ends(tokenizer) -> tuple[int, int, int]:
    """Ids of padding, beginning and end; a tokenizer that lacks the first two uses its end for them."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("The tokenizer has no end-of-text token (eos_token); set one.")
    first, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    return end if pad is None else pad, end if first is None else first, end


def encode_documents(texts: Iterable[str], tokenizer, chunk: int = 1 << 20) -> Iterator[np.ndarray]:
    """Ids of each text, [tokens] int32, from <bos> to <eos>; a text that spells a special token is still text.

    `chunk` characters are tokenised at a time, by as many threads as TOKENIZERS_PARALLELISM allows.
    """
    _, first, end = _ends(tokenizer)
    # bytes need no tokenizer, which is far slower
    plain = tokenizer.get_vocab() == BYTE_VOCABULARY

    def finish(batch):
        if plain:
            ids = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIAL) for text in batch]
        else:
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            ids = tokenizer(batch, return_attention_mask=False, **options)["input_ids"]
        for one in ids:
            yield np.concatenate([[first], one, [end]]).astype(np.int32)

    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= chunk:
            yield from finish(batch)
            batch, size = [], 0
    if batch:
        yield from finish(batch)


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
    pad = _ends(tokenizer)[0]
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
    key = hashlib.sha256(repr((core.to_str(), _ends(tokenizer))).encode())
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
