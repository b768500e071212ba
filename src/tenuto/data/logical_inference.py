"""Logical inference (Bowman, Manning and Potts 2015): which of seven relations holds between two
propositional sentences, with the shipped data, its protocols, encodings and error analysis.
"""

from __future__ import annotations

import gzip
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from tenuto.data.propositional import (
    FORMULA_TOKENS,
    RELATIONS,
    VARIABLES,
    Formula,
    Pair,
    compare,
    depth,
    generate,
    generate_bins,
    operators,
    parse,
    relation,
    worlds,
)

__all__ = [
    "BINS",
    "BOS",
    "PAD",
    "RELATIONS",
    "RELATION_NAMES",
    "SEP",
    "SPLITS",
    "VARIABLES",
    "VOCABULARY",
    "Encoded",
    "Formula",
    "Pair",
    "Protocol",
    "accuracy_by",
    "breakdown",
    "compare",
    "decode",
    "depth",
    "encode",
    "errors_by_relation",
    "generate",
    "generate_bins",
    "label_id",
    "load_bin",
    "majority_rate",
    "operators",
    "parse",
    "protocol",
    "read_pairs",
    "relation",
    "rename",
    "swap",
    "worlds",
]

FILES = Path(__file__).parent / "files" / "logical_inference"
BINS = range(13)

# As target tokens the relations are spelled out: `v`, `#` or `|` could pass for something else.
RELATION_NAMES = (
    "equivalence",
    "forward-entailment",
    "reverse-entailment",
    "negation",
    "alternation",
    "cover",
    "independence",
)
VOCABULARY = ("<pad>", "<bos>", "#SEP#", *FORMULA_TOKENS, *RELATION_NAMES)
PAD, BOS, SEP = 0, 1, 2

_TOKEN_IDS = {token: k for k, token in enumerate(VOCABULARY)}
_FORMULA_IDS = {token: _TOKEN_IDS[token] for token in FORMULA_TOKENS}
_LABEL_IDS = {name: k for k, name in enumerate(RELATIONS)}

# A pair is held out of training if either sentence matches.
SPLITS: dict[str, re.Pattern[str]] = {
    "A": re.compile(r"\( and \( not a \) \)"),
    "B": re.compile(r"\( and \( not "),
    "C": re.compile(r"\( (and|or) \( not "),
}


class Encoded(NamedTuple):
    """Token ids of the source, and the target: one label id, or one relation token id."""

    source: list[int]
    target: list[int]


@dataclass(frozen=True)
class Protocol:
    """Training, validation and named test pairs of one experiment."""

    name: str
    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    test: dict[str, tuple[Pair, ...]]


def read_pairs(lines: Iterable[str], source: str = "input") -> list[Pair]:
    """Read lines of `relation TAB left TAB right`; ValueError names the source and the line.

    Operators are counted and relations looked up, but sentences are not parsed.
    """
    pairs = []
    for number, line in enumerate(lines, 1):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != 3 or fields[0] not in _LABEL_IDS:
            raise ValueError(
                f"{source}, line {number}: expected a relation ({' '.join(RELATIONS)}), a left and"
                f" a right sentence separated by tabs, found {line.rstrip()[:80]!r}"
            )
        label, left, right = fields
        # No other token contains `and`, `or` or `not`, so plain counting is exact.
        first = left.count("and") + left.count("or") + left.count("not")
        second = right.count("and") + right.count("or") + right.count("not")
        pairs.append(Pair(label, left, right, max(first, second)))
    return pairs


def load_bin(part: Literal["train", "test"], n: int, folder: Path | str = FILES) -> list[Pair]:
    """Load the published pairs with n operators (n = 12 holds 12 and more), in file order.

    Raises ValueError if there is no such bin or the file's SHA-256 is not the recorded one.
    """
    if part not in ("train", "test") or n not in BINS:
        raise ValueError(f"there is no bin {part!r}, {n}: choose 'train' or 'test', and 0 to 12")
    name = f"{part}{n}.tsv.gz"
    recorded = dict(reversed(line.split()) for line in (Path(folder) / "SHA256SUMS").read_text().splitlines())
    packed = (Path(folder) / name).read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != recorded.get(name):
        raise ValueError(
            f"{name} is not the published file: its SHA-256 is {found}, but SHA256SUMS records"
            f" {recorded.get(name, 'nothing')}; restore the file"
        )
    return read_pairs(gzip.decompress(packed).decode("ascii").splitlines(), name)


def _every_tenth(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    return [pair for i, pair in enumerate(pairs) if i % 10 != 9], pairs[9::10]


@cache
def protocol(name: Literal["length", "A", "B", "C"]) -> Protocol:
    """The published pairs arranged for one experiment; read once and kept.

    All start from train0..6, 135,529 pairs in file order. "length" tests on test7..test12, keys
    "7" to "12". "A", "B" and "C" test, under that key, on the pairs matching `SPLITS[name]`, and
    only the others remain. Validation is every tenth pair of what remains: the 10th, 20th, ...,
    that is zero-based index i with i % 10 == 9; training is the rest.
    """
    if name != "length" and name not in SPLITS:
        raise ValueError(f"unknown protocol {name!r}: choose 'length', 'A', 'B' or 'C'")
    pairs = [pair for n in range(7) for pair in load_bin("train", n)]
    if name == "length":
        test = {str(n): tuple(load_bin("test", n)) for n in range(7, 13)}
    else:
        held = [bool(SPLITS[name].search(p.left) or SPLITS[name].search(p.right)) for p in pairs]
        test = {name: tuple(pair for pair, out in zip(pairs, held, strict=True) if out)}
        pairs = [pair for pair, out in zip(pairs, held, strict=True) if not out]
    train, validation = _every_tenth(pairs)
    return Protocol(name, tuple(train), tuple(validation), test)


def label_id(relation: str) -> int:
    """The class index of a relation, 0 to 6 in the order of `RELATIONS`; ValueError if unknown."""
    if relation not in _LABEL_IDS:
        raise ValueError(f"unknown relation {relation!r}: choose one of {' '.join(RELATIONS)}")
    return _LABEL_IDS[relation]


def encode(
    pair: Pair,
    form: Literal["classification", "text-to-text"] = "classification",
    bos: bool = False,
) -> Encoded:
    """Encode a pair: the source is `left #SEP# right`, after `<bos>` if asked for.

    The target is one id: the class index for "classification", the relation's token for
    "text-to-text". Raises ValueError for a token outside the formulas.
    """
    if form not in ("classification", "text-to-text"):
        raise ValueError(f"unknown form {form!r}: choose 'classification' or 'text-to-text'")
    try:
        left = [_FORMULA_IDS[token] for token in pair.left.split()]
        right = [_FORMULA_IDS[token] for token in pair.right.split()]
    except KeyError as error:
        allowed = " ".join(FORMULA_TOKENS)
        raise ValueError(f"cannot encode token {error}: it is not one of {allowed}") from None
    label = label_id(pair.relation)
    if form == "text-to-text":
        label = _TOKEN_IDS[RELATION_NAMES[label]]
    return Encoded([BOS, *left, SEP, *right] if bos else [*left, SEP, *right], [label])


def decode(ids: Sequence[int]) -> list[str]:
    """The tokens of these ids, for reading; not for class indices."""
    return [VOCABULARY[k] for k in ids]


def swap(pair: Pair) -> Pair:
    """Exchange the two sentences; `<` and `>` change places, the other relations are symmetric."""
    mirrored = {"<": ">", ">": "<"}.get(pair.relation, pair.relation)
    return Pair(mirrored, pair.right, pair.left, pair.operators)


def rename(pair: Pair, permutation: Sequence[str]) -> Pair:
    """Rename a..f to the six names given, in that order, in both sentences; the relation stays.

    "bacdef" exchanges a and b. Raises ValueError if the names are not a permutation of a..f.
    """
    if sorted(permutation) != list(VARIABLES):
        raise ValueError(f"expected a permutation of a b c d e f, got {permutation!r}")
    new = dict(zip(VARIABLES, permutation, strict=True))
    left = " ".join([new.get(token, token) for token in pair.left.split()])
    right = " ".join([new.get(token, token) for token in pair.right.split()])
    return Pair(pair.relation, left, right, pair.operators)


def majority_rate(pairs: Sequence[Pair]) -> float:
    """The share of the commonest relation, 0 to 1: what a constant answer gets right."""
    if not pairs:
        raise ValueError("a majority rate needs at least one pair")
    return Counter(pair.relation for pair in pairs).most_common(1)[0][1] / len(pairs)


def _answers(pairs: Sequence[Pair], predictions: Sequence[str | int]) -> list[str]:
    if len(pairs) != len(predictions):
        raise ValueError(f"got {len(predictions)} predictions for {len(pairs)} pairs")
    answers = []
    for answer in predictions:
        index = label_id(answer) if isinstance(answer, str) else operator.index(answer)
        if not 0 <= index < len(RELATIONS):
            raise ValueError(f"a predicted class index must be 0 to 6, got {index}")
        answers.append(RELATIONS[index])
    return answers


def _negation(pair: Pair) -> str:
    scoped = parse(pair.left).negated_binary or parse(pair.right).negated_binary
    return "over a binary operator" if scoped else "over variables or absent"


_KEYS: Mapping[str, Callable[[Pair], str | int]] = {
    "relation": lambda pair: pair.relation,
    "operators": lambda pair: pair.operators,
    "depth": lambda pair: max(depth(pair.left), depth(pair.right)),
    "negation": _negation,
    "negated_operands": lambda pair: len(SPLITS["C"].findall(f"{pair.left} {pair.right}")),
}


def accuracy_by(
    pairs: Sequence[Pair],
    predictions: Sequence[str | int],
    key: Literal["relation", "operators", "depth", "negation", "negated_operands"]
    | Callable[[Pair], str | int],
) -> dict[str, dict[str, float]]:
    """Accuracy for each value of a key: value -> {"pairs", "right", "accuracy", "majority"}.

    "operators" and "depth" take the larger of the two sentences; "negation" asks whether some
    `not` in either has an `and` or `or` in its scope; "negated_operands" counts in both the second operands that are
    negations, the combination that split C keeps from training. Predictions are relations or class indices.
    """
    if not callable(key) and key not in _KEYS:
        raise ValueError(f"unknown key {key!r}: choose one of {', '.join(_KEYS)} or a function")
    value_of = key if callable(key) else _KEYS[key]
    groups: dict[str | int, list[tuple[Pair, bool]]] = {}
    for pair, answer in zip(pairs, _answers(pairs, predictions), strict=True):
        groups.setdefault(value_of(pair), []).append((pair, answer == pair.relation))
    order = RELATIONS.index if key == "relation" else None
    table: dict[str, dict[str, float]] = {}
    for value in sorted(groups, key=order):
        right = sum(correct for _, correct in groups[value])
        table[str(value)] = {
            "pairs": len(groups[value]),
            "right": right,
            "accuracy": right / len(groups[value]),
            "majority": majority_rate([pair for pair, _ in groups[value]]),
        }
    return table


def errors_by_relation(pairs: Sequence[Pair], predictions: Sequence[str | int]) -> dict[str, dict[str, int]]:
    """The confusion counts, true relation -> predicted relation -> pairs, all 49 cells."""
    table = {true: dict.fromkeys(RELATIONS, 0) for true in RELATIONS}
    for pair, answer in zip(pairs, _answers(pairs, predictions), strict=True):
        table[pair.relation][answer] += 1
    return table


def breakdown(pairs: Sequence[Pair], predictions: Sequence[str | int]) -> dict[str, object]:
    """Everything at once, ready for JSON: accuracy, majority rate, confusion, and one
    `accuracy_by` table for each key (relation, operators, depth, negation, negated_operands)."""
    answers = _answers(pairs, predictions)
    right = sum(pair.relation == answer for pair, answer in zip(pairs, answers, strict=True))
    return {
        "pairs": len(pairs),
        "accuracy": right / len(pairs) if pairs else 0.0,
        "majority": majority_rate(pairs) if pairs else 0.0,
        "confusion": errors_by_relation(pairs, answers),
        **{name: accuracy_by(pairs, answers, name) for name in _KEYS},
    }
