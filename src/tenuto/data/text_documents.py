"""Documents of text: shipped corpora, files, folders, JSON lines or hub sets; a split by document."""

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

FILES = Path(__file__).parent / "files"
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
        check_shipped(found)
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


def check_shipped(files: Iterable[Path]) -> None:
    """ValueError where a file is not the one that the SHA256SUMS beside it records."""
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
