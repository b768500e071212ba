"""Tasks with a known need of depth (Csordas, Irie and Schmidhuber 2021, arXiv:2110.07732): nested arithmetic
modulo ten, ListOps, compositional table lookup; generated exactly, as functions of a seed.

    arithmetic       ( ( 4 * 7 ) + 2 )          answer 0, depth 2: levels of operators
    listops          [MAX 2 [SM 9 4 ] 1 ]       answer 3, depth 2; MIN MAX MED SM (sum modulo ten), 2 to 4 arguments
    lookup           101 d a b                  b(a(d(101))), depth 3: functions applied
    lookup-backward  b a d 101                  the same, read from the right

The paper's code counts a digit as a level, so that its arithmetic of depth 5 is depth 4 here, and it balances ListOps
by the depth of the chain of arguments that were selected. Here the label is the depth of the expression, and from
depth 2 on every problem is drawn such that it is needed: some digit of the deepest level can change the answer.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

DIGITS = tuple("0123456789")
SYMBOLS = tuple(f"{k:03b}" for k in range(8))
# The eight functions: place k holds the image of symbol k. Drawn once, written down so that they stay.
TABLES = {
    name: tuple(map(int, images))
    for name, images in zip(
        "abcdefgh",
        ("37524160", "74031652", "47526301", "12063745", "30527416", "06341725", "40536271", "05317246"),
        strict=True,
    )
}


def _median(values: Sequence[int]) -> int:
    # the mean of the middle two is rounded down
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "+": lambda values: sum(values) % 10,
    "*": lambda values: math.prod(values) % 10,
    "[MIN": min,
    "[MAX": max,
    "[MED": _median,
    "[SM": lambda values: sum(values) % 10,
}
VOCABULARY = ("<pad>", "<bos>", "=", "(", ")", "]", *OPERATORS, *DIGITS, *SYMBOLS, *TABLES)
PAD, BOS, EQUALS = 0, 1, 2
_IDS = {token: k for k, token in enumerate(VOCABULARY)}

TASKS = ("arithmetic", "listops", "lookup", "lookup-backward")
# depths of training (and validation) and of the test sets
DEPTHS: dict[str, tuple[range, range]] = {
    "arithmetic": (range(1, 6), range(7, 9)),
    "listops": (range(1, 6), range(7, 9)),
    "lookup": (range(1, 6), range(9, 11)),
    "lookup-backward": (range(1, 6), range(9, 11)),
}
# operators, fewest and most arguments, chance that an argument beside the deepest one is no digit, most tokens
_GRAMMARS = {
    "arithmetic": (("+", "*"), 2, 2, 0.25, 61),
    "listops": (("[MIN", "[MAX", "[MED", "[SM"), 2, 4, 0.15, 72),
}

# A search that finds nothing it can keep in this many draws in a row gives up.
PATIENCE = 50_000


class Problem(NamedTuple):
    """An expression, its answer (one token of the vocabulary) and its depth."""

    tokens: list[str]
    answer: str
    depth: int

    @property
    def text(self) -> str:
        return " ".join(self.tokens)


def answers(task: str) -> tuple[str, ...]:
    """The tokens that answer a task, in the order of their class indices; ValueError if there is no such task."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    return SYMBOLS if task.startswith("lookup") else DIGITS


def label_id(answer: str) -> int:
    """The class index of an answer: 0 to 9 of a digit, 0 to 7 of a symbol; ValueError if it is neither."""
    if answer not in DIGITS and answer not in SYMBOLS:
        raise ValueError(f"{answer!r} is not an answer: expected a digit or a three-bit symbol")
    return (SYMBOLS if answer in SYMBOLS else DIGITS).index(answer)


def solve(tokens: Sequence[str]) -> tuple[str, int]:
    """The answer and the depth of an expression of any of the tasks; ValueError if it is malformed."""
    if set(tokens) & set(SYMBOLS):
        first, *functions = tokens if tokens[0] in SYMBOLS else tokens[::-1]
        if first not in SYMBOLS or not functions or not set(functions) <= set(TABLES):
            raise ValueError(f"malformed lookup {' '.join(tokens)!r}: expected one symbol, then functions")
        value = SYMBOLS.index(first)
        for name in functions:
            value = TABLES[name][value]
        return SYMBOLS[value], len(functions)
    stack: list[str | tuple[int, int]] = []
    for place, token in enumerate(tokens, 1):
        if token in DIGITS:
            stack.append((int(token), 0))
        elif token in ("(", *OPERATORS):
            stack.append(token)
        else:
            operator, arguments = _close(stack, token)
            if len(arguments) < 2:
                raise ValueError(
                    f"malformed expression at token {place} of {len(tokens)}: {token!r} does not close"
                    " '( X + Y', '( X * Y' or an operator of lists with two arguments or more"
                )
            value = OPERATORS[operator]([value for value, _ in arguments])
            stack.append((value, 1 + max(depth for _, depth in arguments)))
    if len(stack) != 1 or isinstance(stack[0], str):
        raise ValueError(f"malformed expression: the end is reached with {len(stack)} parts, not one value")
    value, depth = stack[0]
    return DIGITS[value], depth


def _close(stack: list, token: str) -> tuple[str, list[tuple[int, int]]]:
    """Take the bracket that `token` closes off the stack: operator and (value, depth) of each argument, or none."""
    if token == ")" and len(stack) >= 4 and stack[-4] == "(" and stack[-2] in ("+", "*"):
        (_, first, operator, second), stack[-4:] = stack[-4:], []
        return operator, [one for one in (first, second) if isinstance(one, tuple)]
    arguments = []
    while token == "]" and stack and isinstance(stack[-1], tuple):
        arguments.append(stack.pop())
    if token == "]" and stack and stack[-1].startswith("["):
        return stack.pop(), arguments
    return "", []


def _write(operator: str, parts: list[list]) -> list:
    if operator in ("+", "*"):
        return ["(", *parts[0], operator, *parts[1], ")"]
    return [operator, *(token for part in parts for token in part), "]"]


def _subtree(draw: Callable[[], float], task: str, height: int) -> tuple[list[str], int]:
    """An expression of at most `height` levels, and its value."""
    operators, fewest, most, grow, _ = _GRAMMARS[task]
    if height == 0 or draw() >= grow:
        value = int(draw() * 10)
        return [DIGITS[value]], value
    operator = operators[int(draw() * len(operators))]
    count = fewest + int(draw() * (most - fewest + 1))
    arguments = [_subtree(draw, task, height - 1) for _ in range(count)]
    return _write(operator, [part for part, _ in arguments]), OPERATORS[operator]([v for _, v in arguments])


def _open(draw: Callable[[], float], task: str, depth: int) -> tuple[list, Sequence[int]]:
    """An expression whose innermost value is left open: tokens with one None, and the answer for each value put there.

    It grows from the open place outwards. A level that would make all answers equal is drawn again, so the open digit
    always matters.
    """
    tokens: list = [None]
    if task.startswith("lookup"):
        image = range(8)
        for _ in range(depth):
            name = VOCABULARY[int(draw() * 8) - 8]
            tokens.append(name)
            image = [TABLES[name][value] for value in image]
        return tokens[::-1] if task == "lookup-backward" else tokens, image
    image = range(10)
    operators, fewest, most, _, _ = _GRAMMARS[task]
    for height in range(depth):
        while True:
            operator = operators[int(draw() * len(operators))]
            count = fewest + int(draw() * (most - fewest + 1))
            others = [_subtree(draw, task, height) for _ in range(count - 1)]
            values = [value for _, value in others]
            outcome = {value: OPERATORS[operator]([*values, value]) for value in set(image)}
            if len(set(outcome.values())) > 1:
                break
        parts = [part for part, _ in others]
        parts.insert(int(draw() * count), tokens)
        tokens, image = _write(operator, parts), [outcome[value] for value in image]
    return tokens, image


@cache
def _listed(task: str, depth: int) -> list[Problem] | None:
    """All problems of this depth where they are few: single operations, and up to four functions. Else None."""
    if task == "arithmetic" and depth == 1:
        texts = (["(", x, operator, y, ")"] for operator in "+*" for x in DIGITS for y in DIGITS)
    elif task.startswith("lookup") and depth <= 4:
        step = -1 if task == "lookup-backward" else 1
        texts = ([x, *names][::step] for names in product(TABLES, repeat=depth) for x in SYMBOLS)
    else:
        return None
    return [Problem(tokens, *solve(tokens)) for tokens in texts]


def part_of(problem: Problem) -> Literal["train", "validation"]:
    """The side of the split that a problem is on: a function of its text alone, so of no seed or size.

    A tenth of the texts is for validation. Single sums, products and lookups are all for training: they are the facts
    that the rest is made of. Both orders of a lookup are on the same side.
    """
    tokens = problem.tokens[::-1] if problem.tokens[0] in TABLES else problem.tokens
    if problem.depth == 1 and not tokens[0].startswith("["):
        return "train"
    digest = hashlib.sha256(" ".join(tokens).encode()).digest()
    return "validation" if int.from_bytes(digest[:4], "big") % 10 == 0 else "train"


def _spread(count: int, limits: Sequence[float]) -> list[int]:
    """Cut `count` into shares as even as the limits allow; the first ones take the remainder."""
    shares = [0] * len(limits)
    while count:
        free = [k for k, limit in enumerate(limits) if shares[k] < limit]
        if not free:
            raise ValueError(f"{count} more problems are wanted than the {sum(shares)} that exist")
        even = max(1, count // len(free))
        for k in free[:count]:
            more = int(min(even, limits[k] - shares[k]))
            shares[k] += more
            count -= more
    return shares


def generate(
    task: str,
    count: int,
    depths: Iterable[int],
    seed: int = 0,
    part: Literal["train", "validation"] | None = None,
) -> list[Problem]:
    """`count` distinct problems in random order: equally many of each depth, and of each answer within a depth.

    Where fewer exist (single operations, up to four functions) all of them are taken, balanced or not, and the other
    depths make up for it. `part` keeps one side of the split. The problems of a depth depend on their number, the
    seed and the part, not on the other depths. Raises ValueError if the arguments cannot be met, RuntimeError if a
    depth gives no new problem in `PATIENCE` draws in a row (arithmetic of depth 2 has the fewest that are not listed).
    """
    names, depths = answers(task), sorted(set(depths))
    if count < 0 or not depths or depths[0] < 1:
        raise ValueError(
            f"count must be at least 0 and depths at least 1, got count={count}, depths={depths}"
        )
    if part not in (None, "train", "validation"):
        raise ValueError(f"part must be 'train', 'validation' or None, not {part!r}")
    stock: dict[int, list[Problem]] = {}
    for depth in depths:
        if (listed := _listed(task, depth)) is not None:
            stock[depth] = [one for one in listed if part in (None, part_of(one))]
    shares = _spread(count, [len(stock[d]) if d in stock else math.inf for d in depths])
    problems = []
    for depth, share in zip(depths, shares, strict=True):
        draw = random.Random(f"{task} {depth} {part} {seed}").random
        if depth in stock:
            groups = [[one for one in stock[depth] if one.answer == name] for name in names]
            for group, size in zip(groups, _spread(share, [len(group) for group in groups]), strict=True):
                # the lists are kept: nobody shall share their tokens
                chosen = sorted(group, key=lambda _: draw())[:size]
                problems += [one._replace(tokens=[*one.tokens]) for one in chosen]
        else:
            wanted = _spread(share, [math.inf] * len(names))
            problems += _drawn(draw, task, depth, wanted, part)
    draw = random.Random(f"{task} {seed}").random
    return sorted(problems, key=lambda _: draw())


def _drawn(draw: Callable[[], float], task: str, depth: int, wanted: list[int], part: str | None):
    """Distinct problems of one depth, `wanted[k]` with answer number k."""
    names = answers(task)
    limit = _GRAMMARS[task][-1] if task in _GRAMMARS else math.inf
    kept: dict[str, Problem] = {}
    left, idle = sum(wanted), 0
    while left:
        if idle == PATIENCE:
            missing = {name: number for name, number in zip(names, wanted, strict=True) if number}
            raise RuntimeError(
                f"found {len(kept)} {task} problems of depth {depth} and then no new one in {PATIENCE} draws"
                f" (answers still wanted: {missing}); ask for fewer problems or leave out this depth"
            )
        idle += 1
        tokens, image = _open(draw, task, depth)
        if len(tokens) > limit:
            continue
        # The answer is drawn first, then a value of the open place that gives it: where most values of a deep digit
        # lead to the same answer, that answer would otherwise be a good guess without looking so deep.
        reached = sorted({answer for answer in image if wanted[answer]})
        if not reached:
            continue
        answer = reached[int(draw() * len(reached))]
        fitting = [value for value, outcome in enumerate(image) if outcome == answer]
        tokens[tokens.index(None)] = names[fitting[int(draw() * len(fitting))]]
        problem = Problem(tokens, names[answer], depth)
        text = problem.text
        if text in kept or part not in (None, part_of(problem)):
            continue
        kept[text] = problem
        wanted[answer] -= 1
        left, idle = left - 1, 0
    return list(kept.values())


def splits(
    task: str,
    seed: int = 0,
    train: int = 50_000,
    validation: int = 2_000,
    test: int = 1_000,
    train_depths: Iterable[int] | None = None,
    test_depths: Iterable[int] | None = None,
) -> dict[str, list[Problem]]:
    """Problems for "train", "validation" (the same depths) and "test-<depth>" (`test` of each), without overlap.

    The depths are those of `DEPTHS` unless given; where single operations are facts (see `part_of`), validation has
    none of them. Raises ValueError if a depth is both trained and tested.
    """
    answers(task)
    shallow = sorted(set(DEPTHS[task][0] if train_depths is None else train_depths))
    deep = sorted(set(DEPTHS[task][1] if test_depths is None else test_depths))
    if both := set(shallow) & set(deep):
        raise ValueError(
            f"train_depths and test_depths share {sorted(both)}: a test depth must not be trained"
        )
    held = [depth for depth in shallow if depth > 1 or task == "listops"]
    return {
        "train": generate(task, train, shallow, seed, "train"),
        "validation": generate(task, validation, held, seed, "validation") if held else [],
        **{f"test-{depth}": generate(task, test, [depth], seed) for depth in deep},
    }


def majority_rate(problems: Sequence[Problem]) -> float:
    """The share of the commonest answer, 0 to 1: what a constant answer gets right."""
    if not problems:
        raise ValueError("a majority rate needs at least one problem")
    return Counter(one.answer for one in problems).most_common(1)[0][1] / len(problems)


def encode(problem: Problem, answer: bool = True) -> list[int]:
    """Token ids `<bos> expression =`, with the answer's id at the end if asked for; ValueError for unknown tokens."""
    try:
        return [_IDS[token] for token in ("<bos>", *problem.tokens, "=", *[problem.answer] * answer)]
    except KeyError as error:
        raise ValueError(f"cannot encode token {error}: it is not in the vocabulary") from None


def decode(ids: Iterable[int]) -> list[str]:
    """The tokens of these ids, without padding."""
    return [VOCABULARY[k] for k in ids if k != PAD]


class AlgorithmicDataset(Dataset):
    """Problems as token ids: `<bos> expression = answer` for "causal", without the answer for "classification".

    An item is asked for by index, or by (index, draw) as `pairs.Curriculum` does; there is no augmentation, so the
    draw is not looked at. `operators` holds the depths and `lengths` the number of tokens, [N]. With `even` the
    problems of scarcer depths come several times, so that a uniform draw is uniform over the depths.
    """

    def __init__(self, problems: Sequence[Problem], head="causal", even=False):
        if head not in ("causal", "classification"):
            raise ValueError(f"unknown head {head!r}: choose 'causal' or 'classification'")
        if even:
            groups: dict[int, list[Problem]] = {}
            for one in problems:
                groups.setdefault(one.depth, []).append(one)
            most = max(map(len, groups.values()), default=0)
            problems = [group[k % len(group)] for group in groups.values() for k in range(most)]
        self.problems, self.head = problems, head
        self.causal = head == "causal"
        self.operators = np.array([one.depth for one in problems])
        self.lengths = np.array([len(one.tokens) + 2 + self.causal for one in problems])

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, key: int | tuple[int, int]) -> dict:
        problem = self.problems[key[0] if isinstance(key, tuple) else key]
        return {"ids": encode(problem, answer=self.causal), "label": label_id(problem.answer)}

    def collate(self, items: list[dict]) -> dict[str, torch.Tensor]:
        """Items -> batch padded on the right.

        input_ids, attention_mask (1 at tokens): [B, T]; labels: [B, T], the answer's id at the answer and -100
        elsewhere (the model shifts them), or class indices [B] for "classification".
        """
        length = max(len(item["ids"]) for item in items)
        ids = torch.tensor([item["ids"] + [PAD] * (length - len(item["ids"])) for item in items])
        if self.causal:
            labels = torch.full_like(ids, -100)
            for row, item in enumerate(items):
                labels[row, len(item["ids"]) - 1] = item["ids"][-1]
        else:
            labels = torch.tensor([item["label"] for item in items])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def tokenizer():
    """The tasks' word-level tokenizer, for saving beside a checkpoint."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel(dict(_IDS), unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>")
