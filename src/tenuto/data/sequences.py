"""Compositional tasks: token sequences to token sequences, by part of a published split.

    scan      jump twice                      I_JUMP I_JUMP                          Lake and Baroni 2018
    cogs      Emma rolled a teacher .         roll . agent ( x _ 1 , Emma ) AND ...  Kim and Linzen 2020
    pcfg      append A1 B2 , C3               A1 B2 C3                               Hupkes et al. 2020
    listops   [MAX 2 [SM 9 4 ] 1 ]            3                                      Nangia and Bowman 2018
    cfq       Did M1 's sister edit M0        SELECT count ( * ) WHERE { ... }       Keysers et al. 2020

SCAN and COGS are shipped. The others are a user's folder in the published layout, plain or .gz, in which the files may
lie anywhere; ListOps is generated.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import algorithmic
from .text_documents import FILES, check_shipped

SHIPPED = ("scan", "cogs")
# one in so many of the training part is for validation, where a task publishes no validation part
HELD_OUT = 20
SPLITS = {
    "scan": (
        "simple",
        "length",
        "addprim_jump",
        "addprim_turn_left",
        "template_around_right",
        "template_jump_around_right",
    ),
    "cogs": ("published",),
    "pcfg": ("pcfgset", "productivity", "systematicity"),
    "listops": ("depth", "d20s"),
    "cfq": ("mcd1", "mcd2", "mcd3", "random"),
}
# distinct trees of each part, in the order of drawing
D20S = {"train": 90_000, "validation": 2_000, "test": 10_000}
_PCFG_FUNCTIONS = frozenset(
    "copy reverse shift swap_first_last repeat echo append prepend remove_first remove_second".split()
)


class Example(NamedTuple):
    """A pair of token sequences; kind: what accuracy is told apart by (type, length, functions or depth)."""

    source: list[str]
    target: list[str]
    kind: str | int


def split_of(task: str, split: str | None) -> str:
    """The split named, or the task's first; ValueError if it has none of this name."""
    if task not in SPLITS:
        raise ValueError(f"There is no task {task!r}; choose one of {', '.join(SPLITS)}.")
    if split not in (None, *SPLITS[task]):
        raise ValueError(f"{task} has no split {split!r}; its splits are {', '.join(SPLITS[task])}.")
    return split or SPLITS[task][0]


def parts(task: str, split: str | None = None) -> list[str]:
    """The names of a split's parts: "train", "validation" and the tests."""
    split = split_of(task, split)
    tests = ["test"]
    if task == "cogs":
        tests = ["test", "gen"]
    elif split == "depth":
        tests = [f"test-{depth}" for depth in algorithmic.DEPTHS["listops"][1]]
    return ["train", "validation", *tests]


def read(task: str, part: str, split: str | None = None, path: str | Path | None = None) -> list[Example]:
    """One part of a split. FileNotFoundError or ValueError with one sentence if something is missing or malformed.

    Where nothing is published for validation (SCAN; PCFG but for `pcfgset`), a twentieth of the training part is, by
    the hash of the source; sources of one or two tokens, the primitives, are all for training.
    """
    split = split_of(task, split)
    if part not in parts(task, split):
        raise ValueError(f"{task} {split} has no part {part!r}; it has {', '.join(parts(task, split))}.")
    if path is None and task not in (*SHIPPED, "listops"):
        raise ValueError(f"{task} is not shipped; path names the folder of your copy.")
    folder = FILES / task if path is None else Path(path).expanduser()
    if path is not None and not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} of {task}.")
    if path is None and task in SHIPPED:
        check_shipped(folder.glob("*.gz"))
    return _READERS[task](folder, split, part)


def find_file(folder: Path, *names: str) -> Path:
    """The file of the first of these names that the folder holds, at any depth, plain or .gz."""
    for name in names:
        found = [one for ending in ("", ".gz") for one in folder.rglob(name + ending)]
        if found:
            return min(found, key=lambda one: (len(one.parts), one))
    raise FileNotFoundError(f"{folder} has no file {names[0]} (or {names[0]}.gz).")


def lines_of(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, plain or .gz, without their \\n; nothing else ends a line."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                raise ValueError(f"{file}, line {number}: this is not UTF-8.") from None


def _side(examples: list[Example], part: str) -> list[Example]:
    """The training or the validation side of a published training part."""

    def held(one: Example) -> bool:
        digest = hashlib.sha256(" ".join(one.source).encode()).digest()
        return len(one.source) > 2 and int.from_bytes(digest[:4]) % HELD_OUT == 0

    return [one for one in examples if held(one) == (part == "validation")]


def _scan(folder: Path, split: str, part: str) -> list[Example]:
    file = find_file(folder, f"tasks_{'test' if part == 'test' else 'train'}_{split}.txt")
    examples = []
    for number, line in enumerate(lines_of(file), 1):
        command, middle, actions = line.partition(" OUT: ")
        if not middle or not command.startswith("IN: "):
            raise ValueError(f"{file}, line {number}: expected 'IN: command OUT: actions'.")
        target = actions.split()
        examples.append(Example(command.removeprefix("IN: ").split(), target, len(target)))
    return examples if part == "test" else _side(examples, part)


def _cogs(folder: Path, split: str, part: str) -> list[Example]:
    file = find_file(folder, f"{'dev' if part == 'validation' else part}.tsv")
    examples = []
    for number, line in enumerate(lines_of(file), 1):
        fields = line.split("\t")
        if len(fields) != 3:
            raise ValueError(f"{file}, line {number}: expected sentence, logical form and type, with tabs.")
        examples.append(Example(fields[0].split(), fields[1].split(), fields[2]))
    return examples


def _pcfg(folder: Path, split: str, part: str) -> list[Example]:
    stem = part if part == "test" else "train"
    if split == "pcfgset" and part == "validation":
        stem = "dev"
    sides = [
        [
            line.split()
            for line in lines_of(find_file(folder, f"{split}/{stem}.{side}", f"{split}.{stem}.{side}"))
        ]
        for side in ("src", "tgt")
    ]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{folder}: {split} {stem} has {len(sides[0])} sources and {len(sides[1])} targets.")
    examples = [
        Example(source, target, sum(token in _PCFG_FUNCTIONS for token in source))
        for source, target in zip(*sides, strict=True)
    ]
    return examples if split == "pcfgset" or part == "test" else _side(examples, part)


def _listops(folder: Path, split: str, part: str) -> list[Example]:
    if split == "depth":
        return [Example(one.tokens, [one.answer], one.depth) for one in algorithmic.splits("listops")[part]]
    published = []
    if folder.is_dir():
        published = [_bracketed(line) for line in lines_of(find_file(folder, "test_d20s.tsv"))]
    if part == "test" and published:
        return published
    place = list(D20S).index(part)
    first = sum(list(D20S.values())[:place])
    # of short trees there are few: some that are generated stand among the published ones
    asked = {tuple(one.source) for one in published}
    return [one for one in _d20s()[first : first + D20S[part]] if tuple(one.source) not in asked]


@cache
def _d20s() -> list[Example]:
    draw, trees = random.Random("listops d20s").random, {}
    while len(trees) < sum(D20S.values()):
        tokens: list[str] = []
        value, depth = _tree(draw, 1, tokens)
        trees.setdefault(" ".join(tokens), Example(tokens, [str(value)], depth))
    return list(trees.values())


def _tree(draw: Callable[[], float], depth: int, tokens: list[str]) -> tuple[int, int]:
    """Draws a tree as Nangia and Bowman do and writes it down: its value and its depth.

    Below depth 20 an operator with probability 1/4, of two to five arguments, else a digit.
    """
    if depth >= 20 or draw() >= 0.25:
        value = int(draw() * 10)
        tokens.append(str(value))
        return value, 0
    operator = ("[MIN", "[MAX", "[MED", "[SM")[int(draw() * 4)]
    tokens.append(operator)
    arguments = [_tree(draw, depth + 1, tokens) for _ in range(2 + int(draw() * 4))]
    tokens.append("]")
    value = algorithmic.OPERATORS[operator]([value for value, _ in arguments])
    return value, 1 + max(below for _, below in arguments)


def _bracketed(line: str) -> Example:
    answer, _, written = line.partition("\t")
    tokens = [token for token in written.split() if token not in ("(", ")")]
    level = deepest = 0
    for token in tokens:
        level += token.startswith("[") - (token == "]")
        deepest = max(deepest, level)
    return Example(tokens, [answer], deepest)


def _cfq(folder: Path, split: str, part: str) -> list[Example]:
    file = find_file(folder, "dataset.json")
    names = (f"{split}.json", f"{split}_split.json")
    chosen = _json(find_file(folder, *names))
    key = {"train": "trainIdxs", "validation": "devIdxs", "test": "testIdxs"}[part]
    if not isinstance(chosen, dict) or key not in chosen:
        raise ValueError(f"{folder}: the split {split} has no field {key}.")
    samples, examples = _json(file), []
    for place in chosen[key]:
        try:
            question = samples[place]["questionPatternModEntities"]
            query = samples[place]["sparqlPatternModEntities"]
        except (IndexError, KeyError, TypeError):
            raise ValueError(f"{file}: sample {place} of {split} is missing or has no pattern.") from None
        target = conjuncts(sparql_tokens(query), inverse=split in ("mcd2", "mcd3"))
        spaced = "".join(f" {letter} " if letter in string.punctuation else letter for letter in question)
        examples.append(Example(spaced.split(), target, "all"))
    return examples


def _json(file: Path):
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as data:
        try:
            return json.load(data)
        except ValueError as error:
            raise ValueError(f"{file}: this is not JSON ({error}).") from None


def sparql_tokens(query: str) -> list[str]:
    """A query's tokens: `count(*)` taken apart, the prefix `ns:` dropped, `m.` of an entity written `m_`."""
    tokens = []
    for token in query.replace("count(*)", "count ( * )").split():
        token = token.removeprefix("ns:")
        tokens.append("m_" + token[2:] if token.startswith("m.") else token)
    return tokens


# Predicates of MCD2 and MCD3 that are written as their inverse, subject and object exchanged (Zheng and Lapata).
INVERSES = {
    "film.film.directed_by": "film.director.film",
    "film.film.edited_by": "film.editor.film",
    "film.film.executive_produced_by": "film.producer.films_executive_produced",
    "film.film.written_by": "film.writer.film",
    "film.film.produced_by|ns:film.film.production_companies": (
        "film.producer.film|ns:film.production_company.films"
    ),
    "film.film.distributors/ns:film.film_film_distributor_relationship.distributor": (
        "film.film_distributor.films_distributed/ns:film.film_film_distributor_relationship.film"
    ),
    "influence.influence_node.influenced_by": "influence.influence_node.influenced",
    "people.person.employment_history/ns:business.employment_tenure.company": (
        "business.employer.employees/ns:business.employment_tenure.person"
    ),
    "organization.organization.founders": "organization.organization_founder.organizations_founded",
    "organization.organization.acquired_by/ns:business.acquisition.acquiring_company": (
        "organization.organization.companies_acquired/ns:business.acquisition.company_acquired"
    ),
}


def conjuncts(tokens: Sequence[str], inverse: bool = False) -> list[str]:
    """The tokens of a CFQ query with its conjuncts grouped and sorted, as Zheng and Lapata train on.

    Triples (subject, predicate, object) are gathered by (subject, predicate), then by (predicate, objects), then by
    (objects, subjects), lists compared in the order of occurrence; a group is written subjects, predicates, objects,
    each sorted. Groups and filters are sorted together and joined by ` . `. inverse: see INVERSES. ValueError if the
    query is not `... { conjunct . conjunct }`.
    """
    text = " ".join(tokens)
    head, opened, body = text.partition(" {")
    if not opened or not text.endswith("}"):
        raise ValueError(f"{text[:60]!r} is not a query: expected conjuncts in braces.")
    objects, filters = defaultdict(list), []
    for conjunct in body.removesuffix("}").strip().removesuffix(" .").split(" . "):
        words = conjunct.split()
        if words[:1] == ["FILTER"]:
            filters.append(" ".join(words))
            continue
        if len(words) != 3:
            raise ValueError(f"{conjunct!r} is no conjunct: expected subject, predicate, object or FILTER.")
        subject, predicate, other = words
        if inverse and predicate in INVERSES:
            subject, predicate, other = other, INVERSES[predicate], subject
        objects[subject, predicate].append(other)
    subjects = defaultdict(list)
    for (subject, predicate), found in objects.items():
        subjects[predicate, tuple(found)].append(subject)
    predicates = defaultdict(list)
    for (predicate, found), group in subjects.items():
        predicates[found, tuple(group)].append(predicate)
    groups = [
        " ".join((*sorted(group), *sorted(names), *sorted(found)))
        for (found, group), names in predicates.items()
    ]
    return f"{head} {{ {' . '.join(sorted(groups + filters))} }}".split()


_READERS = {"scan": _scan, "cogs": _cogs, "pcfg": _pcfg, "listops": _listops, "cfq": _cfq}
