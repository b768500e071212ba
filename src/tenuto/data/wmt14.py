"""WMT'14 English-German from a user's files or the Hub: punctuation made plain, filtered, with a joint BPE.

After Transformer-Clinic's script (Liu et al. 2020), which SUT used. Departures: text stays untokenised, so BPE is
byte-level and learnt on raw text where the script's reads Moses' tokens, and no token is unknown; it has as many tokens
as SUT's dictionary, whose 32,764 merges stood beside some 4,400 letters, not 256 bytes; punctuation is made
plain by the table below where Moses' normalize-punctuation also moves commas about quotes and rewrites numbers.
Lengths (at most 80) and ratio (at most 1.5) are counted in BPE tokens. References of newstest2014 stay as published.
"""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .parallel import Corpus, encode_lines, joint_tokenizer, read_pairs, within
from .sequences import find_file, lines_of

# Europarl, Common Crawl and News Commentary; versions of the last in the order of preference
TRAIN = (
    ("europarl-v7.de-en",),
    ("commoncrawl.de-en",),
    ("news-commentary-v9.de-en", "news-commentary-v12.de-en", "news-commentary-v11.de-en"),
)
VOCAB_SIZE = 37_200  # what gives SUT's published sizes
HUB = {"train": "train", "newstest2013": "validation", "newstest2014": "test"}  # WMT'14 in `datasets`
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("\u201e\u201c\u201d\u00ab\u00bb\u201f", '"'),
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u00b4\u0060\u2039\u203a", "'"),
        **dict.fromkeys("\u2013\u2014\u2212\u2010\u2011", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\t", " "),
        **dict.fromkeys("\u00ad\u200b\u200e\u200f\ufeff", ""),
        "\u2026": "...",
    }
)


def plain(line: str) -> str:
    """The line with plain quotes, dashes, dots and blanks, without control characters."""
    line = "".join(letter for letter in line.translate(_PLAIN) if letter.isprintable())
    return " ".join(line.split())


def prepare(source: str | Path, output: str | Path, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Reads WMT'14 and writes what the recipes name.

    source: a folder with the published files, at any depth, plain or .gz; or "hf:" and the name or path of a set of
    `datasets` with the splits train, validation and test of rows {translation: {en, de}}. In `output`: train,
    newstest2013 and newstest2014 as NAME.{en,de}.gz, and the tokenizer. Returns the numbers of pairs.
    FileNotFoundError or ValueError with one sentence if a file is missing or misaligned.
    """
    output, from_hub = Path(output), str(source).startswith("hf:")
    counts, sets = _hub(str(source)) if from_hub else _published(Path(source).expanduser())
    # what is translated is made plain throughout; the references of the test stay as published
    pairs = {
        name: [(plain(one), two if name == "newstest2014" else plain(two)) for one, two in some]
        for name, some in sets.items()
    }
    pairs["train"] = [pair for pair in pairs["train"] if all(pair)]
    words = joint_tokenizer(pairs["train"], "bpe", vocab_size)
    sides = [encode_lines([pair[side] for pair in pairs["train"]], words).lengths - 1 for side in (0, 1)]
    fits = within(*sides, 80, 1.5)
    pairs["train"] = [pair for pair, good in zip(pairs["train"], fits, strict=True) if good]
    output.mkdir(parents=True, exist_ok=True)
    words.save_pretrained(output / "tokenizer")
    for name, some in pairs.items():
        for side, language in enumerate(("en", "de")):
            _write(output / f"{name}.{language}.gz", (pair[side] for pair in some))
    return {"read": counts, **{name: len(some) for name, some in pairs.items()}, "tokens": len(words)}


def _published(folder: Path) -> tuple[dict[str, int], dict[str, list[tuple[str, str]]]]:
    """Pairs read by file, and the sets, of the files of the shared task."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    train, counts = [], {}
    for names in TRAIN:
        files = [find_file(folder, *(f"{name}.{side}" for name in names)) for side in ("en", "de")]
        pairs = _aligned(files, [list(lines_of(file)) for file in files])
        counts[files[0].name.removesuffix(".gz").removesuffix(".en")] = len(pairs)
        train += pairs
    valid = [find_file(folder, f"newstest2013.{side}") for side in ("en", "de")]
    test = [
        find_file(folder, "newstest2014-deen-src.en.sgm", "newstest2014.en"),
        find_file(folder, "newstest2014-deen-ref.de.sgm", "newstest2014.de"),
    ]
    return counts, {
        "train": train,
        "newstest2013": _aligned(valid, [list(lines_of(file)) for file in valid]),
        "newstest2014": _aligned(test, [list(_segments(file)) for file in test]),
    }


def _hub(source: str) -> tuple[dict[str, int], dict[str, list[tuple[str, str]]]]:
    """The same of a set of `datasets`; one that has several languages has ours as "de-en"."""
    local = Path(source.removeprefix("hf:")).expanduser().exists()
    common = {"fields": ["translation.en", "translation.de"], "subset": None if local else "de-en"}
    sets = {name: read_pairs(Corpus(source, split=split, **common)) for name, split in HUB.items()}
    return {source: len(sets["train"])}, sets


def _aligned(files: Sequence[Path], sides: Sequence[list[str]]) -> list[tuple[str, str]]:
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{files[0]} has {len(sides[0])} lines and {files[1]} {len(sides[1])}.")
    return list(zip(*sides, strict=True))


def _segments(file: Path) -> Iterable[str]:
    """The lines of a text file, or the segments of an SGML one."""
    if ".sgm" not in file.name:
        return lines_of(file)
    found = re.findall(r"<seg[^>]*>(.*?)</seg>", "\n".join(lines_of(file)), re.DOTALL)
    return (html.unescape(one).strip() for one in found)


def _write(file: Path, lines: Iterable[str]) -> None:
    # without a time of writing, equal text gives equal files
    draft = file.with_suffix(".part")
    with draft.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as out:
        for line in lines:
            out.write(f"{line}\n".encode())
    draft.replace(file)
