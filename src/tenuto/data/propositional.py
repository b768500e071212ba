"""Propositional logic over six variables: exact semantics, and Bowman's generator of pairs.

A set of truth assignments is a 64-bit integer: bit w stands for the assignment in which variable
number k (of a..f) is true if and only if bit k of w is set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, NamedTuple

VARIABLES = ("a", "b", "c", "d", "e", "f")
FORMULA_TOKENS = ("(", ")", *VARIABLES, "and", "or", "not")
RELATIONS = ("=", "<", ">", "^", "|", "v", "#")
EVERYTHING = (1 << 64) - 1

# A search that finds nothing it can keep in this many draws in a row gives up.
PATIENCE = 100_000


class Pair(NamedTuple):
    """Two sentences, the relation between them and the larger of their two operator counts."""

    relation: str
    left: str
    right: str
    operators: int


class Formula(NamedTuple):
    """What one sentence means (`worlds`, a 64-bit mask) and how it is built.

    `depth` is 0 for a variable and one more than the deepest operand's for `not`, `and` and `or`;
    `operators` counts all three, `binaries` only `and` and `or`; `negated_binary` tells whether
    some `not` has an `and` or an `or` in its scope.
    """

    worlds: int
    depth: int
    operators: int
    binaries: int
    negated_binary: bool


class _Right(NamedTuple):
    operator: str
    operand: Formula


_LEAVES = {
    name: Formula(sum(1 << w for w in range(64) if w >> k & 1), 0, 0, 0, False)
    for k, name in enumerate(VARIABLES)
}
_WORLDS = tuple(_LEAVES[name].worlds for name in VARIABLES)


def _reduce(first: object, second: object, third: object) -> Formula | _Right | None:
    if first == "(" and type(third) is Formula:
        if second == "not":
            negated = third.negated_binary or third.binaries > 0
            worlds = EVERYTHING ^ third.worlds
            return Formula(worlds, third.depth + 1, third.operators + 1, third.binaries, negated)
        if second == "and" or second == "or":
            return _Right(second, third)
    if first == "(" and type(second) is Formula and type(third) is _Right:
        right = third.operand
        conjunction = third.operator == "and"
        return Formula(
            second.worlds & right.worlds if conjunction else second.worlds | right.worlds,
            max(second.depth, right.depth) + 1,
            second.operators + right.operators + 1,
            second.binaries + right.binaries + 1,
            second.negated_binary or right.negated_binary,
        )
    return None


def parse(sentence: str) -> Formula:
    """Parse a sentence of any depth; raises ValueError naming the token where it goes wrong."""
    tokens = sentence.split()
    stack: list[object] = []
    opened: list[int] = []
    for place, token in enumerate(tokens, 1):
        if token == ")":
            node = _reduce(*stack[-3:]) if len(stack) >= 3 else None
            if node is None:
                raise ValueError(
                    f"malformed sentence at token {place} of {len(tokens)}: this ')' does not close"
                    " '( not X', '( and X', '( or X', '( X ( and Y )' or '( X ( or Y )'"
                )
            del stack[-3:]
            stack.append(node)
            opened.pop()
        elif token in _LEAVES:
            stack.append(_LEAVES[token])
        elif token in FORMULA_TOKENS:
            stack.append(token)
            if token == "(":
                opened.append(place)
        else:
            raise ValueError(
                f"malformed sentence at token {place} of {len(tokens)}: {token!r} is not one of"
                f" {' '.join(FORMULA_TOKENS)}"
            )
    if opened:
        raise ValueError(
            f"malformed sentence at token {opened[-1]} of {len(tokens)}: this '(' is never closed"
        )
    if len(stack) != 1 or type(stack[0]) is not Formula:
        raise ValueError(
            f"malformed sentence at token {len(tokens)} of {len(tokens)}: the end is reached"
            f" with {len(stack)} parts that do not make one formula"
        )
    return stack[0]


def worlds(sentence: str) -> int:
    """The 64-bit mask of the assignments that satisfy the sentence; ValueError if malformed."""
    return parse(sentence).worlds


def depth(sentence: str) -> int:
    """The formula depth: 0 for a variable, one more for each operator; ValueError if malformed."""
    return parse(sentence).depth


def operators(sentence: str) -> int:
    """The number of `and`, `or` and `not` in the sentence; ValueError if malformed."""
    return parse(sentence).operators


def compare(left: int, right: int) -> str:
    """The relation between two masks; ValueError if either is empty or holds every assignment."""
    if left in (0, EVERYTHING) or right in (0, EVERYTHING):
        side = "left" if left in (0, EVERYTHING) else "right"
        raise ValueError(f"no relation is defined: the {side} sentence is a tautology or a contradiction")
    if left == right:
        return "="
    shared = left & right
    if shared == left:
        return "<"
    if shared == right:
        return ">"
    covers = left | right == EVERYTHING
    if shared == 0:
        return "^" if covers else "|"
    return "v" if covers else "#"


def relation(left: str, right: str) -> str:
    """The relation between two sentences, one of `RELATIONS`.

    Raises ValueError if either is malformed, a tautology or a contradiction.
    """
    return compare(worlds(left), worlds(right))


def _sentence(draw: Callable[[], float], names: list[int], size: int) -> tuple[str, int, int]:
    # `and` and `or` have 2/9 each; the remaining 5/9, and every size under 2, give a variable.
    choice = draw() * 9 if size > 1 else 9.0
    if choice < 4:
        left, left_worlds, left_count = _sentence(draw, names, size // 2)
        right, right_worlds, right_count = _sentence(draw, names, size // 2)
        count = left_count + right_count + 1
        if choice < 2:
            text, mask = f"( {left} ( and {right} ) )", left_worlds & right_worlds
        else:
            text, mask = f"( {left} ( or {right} ) )", left_worlds | right_worlds
    else:
        name = names[int(draw() * len(names))]
        text, mask, count = VARIABLES[name], _WORLDS[name], 0
    if draw() * 3 < 1:
        return f"( not {text} )", EVERYTHING ^ mask, count + 1
    return text, mask, count


def _draw_pair(draw: Callable[[], float], size: int, variables: int) -> Pair | None:
    pool = list(range(len(VARIABLES)))
    names = [pool.pop(int(draw() * len(pool))) for _ in range(variables)]
    left, left_worlds, left_count = _sentence(draw, names, size)
    right, right_worlds, right_count = _sentence(draw, names, size)
    # Bowman drops the pair if either side is true everywhere or nowhere.
    if left_worlds in (0, EVERYTHING) or right_worlds in (0, EVERYTHING):
        return None
    return Pair(compare(left_worlds, right_worlds), left, right, max(left_count, right_count))


def most_operators(max_size: int) -> int:
    """The largest operator count of a sentence that the generator can make at this size."""
    return 3 * 2 ** (max_size.bit_length() - 1) - 2


def generate(
    pairs: int,
    seed: int,
    max_size: int = 12,
    variables_per_pair: int = 4,
    balance: Literal["labels"] | None = None,
    min_operators: int = 0,
    max_operators: int | None = None,
) -> list[Pair]:
    """Draw that many labelled pairs, independently (so a pair may come twice), by Bowman's grammar.

    `max_size` halves at each binary operator and 1 forces a variable: 12 gives at most 3 binary
    levels, 24 gives 4. `balance="labels"` keeps equally many pairs of each relation (the first
    relations get the remainder), in random order. The operator limits apply to `Pair.operators`.
    Raises ValueError if the arguments cannot be met, RuntimeError if no pair that is still wanted
    turns up in `PATIENCE` draws in a row.
    """
    if max_size < 1 or not 1 <= variables_per_pair <= len(VARIABLES) or pairs < 0:
        raise ValueError(
            "pairs must be at least 0, max_size at least 1 and variables_per_pair 1 to 6; got"
            f" pairs={pairs}, max_size={max_size}, variables_per_pair={variables_per_pair}"
        )
    if balance not in (None, "labels"):
        raise ValueError(f"balance must be None or 'labels', not {balance!r}")
    ceiling = most_operators(max_size)
    highest = ceiling if max_operators is None else max_operators
    if not 0 <= min_operators <= min(highest, ceiling):
        raise ValueError(
            f"no pair has {min_operators} to {highest} operators at max_size={max_size}, where a"
            f" sentence has 0 to {ceiling}"
        )
    draw = random.Random(seed).random
    share, rest = divmod(pairs, len(RELATIONS))
    wanted = {name: share + (k < rest) for k, name in enumerate(RELATIONS)}
    kept: list[Pair] = []
    idle = 0
    while len(kept) < pairs:
        pair = _draw_pair(draw, max_size, variables_per_pair)
        if (
            pair is None
            or not min_operators <= pair.operators <= highest
            or (balance and not wanted[pair.relation])
        ):
            idle += 1
            if idle == PATIENCE:
                missing = {name: n for name, n in wanted.items() if n} if balance else "any"
                raise RuntimeError(
                    f"found {len(kept)} of {pairs} pairs and then none in {PATIENCE} draws"
                    f" (relations still wanted: {missing}); widen the range of operators, raise"
                    " max_size or drop balance"
                )
            continue
        idle = 0
        wanted[pair.relation] -= 1
        kept.append(pair)
    # The rarest relations are found last, so a balanced list would end in them.
    return sorted(kept, key=lambda _: draw()) if balance else kept


def generate_bins(
    seed: int,
    pairs: int = 500_000,
    max_size: int = 12,
    variables_per_pair: int = 4,
    last_bin: int = 12,
    train_share: float = 0.85,
) -> dict[Literal["train", "test"], dict[int, list[Pair]]]:
    """Generate a whole data set as Bowman's: draw, sort into bins, drop repeats, split.

    Bins go by operators, the last one holding `last_bin` and more; within a bin the first draw of
    a pair stays, and the first `train_share` of them are training. The defaults are Bowman's and
    leave about 249,000 distinct pairs of 500,000. Returns part -> bin -> pairs.
    """
    bins: dict[int, dict[Pair, None]] = {n: {} for n in range(last_bin + 1)}
    for pair in generate(pairs, seed, max_size, variables_per_pair):
        bins[min(last_bin, pair.operators)][pair] = None
    train, test = {}, {}
    for n, distinct in bins.items():
        cut = int(train_share * len(distinct))
        train[n], test[n] = list(distinct)[:cut], list(distinct)[cut:]
    return {"train": train, "test": test}
