"""Algorithmic tasks: answers against Python itself, depths, splits, balance, batches."""

import hashlib
import random
import statistics
from collections import Counter

import pytest
import torch

from tenuto.data import algorithmic as al
from tenuto.data.pairs import Curriculum

pytestmark = pytest.mark.filterwarnings("error")

NESTED = ("arithmetic", "listops")
LOOKUPS = ("lookup", "lookup-backward")
CALLS = {
    "MIN": lambda *values: min(values),
    "MAX": lambda *values: max(values),
    "MED": lambda *values: int(statistics.median(values)),
    "SM": lambda *values: sum(values) % 10,
}


def by_python(tokens):
    # "[MIN 3 [SM 1 2 ] ]" becomes "MIN(3,SM(1,2,),),", which Python takes for a tuple of one value
    if tokens[0].startswith("["):
        source = "".join({"]": "),"}.get(t, t[1:] + "(" if t[0] == "[" else t + ",") for t in tokens)
        return str(eval(source, {}, CALLS)[0])
    return str(eval("".join(tokens)) % 10)


def by_hand(tokens):
    order = tokens if tokens[0] in al.SYMBOLS else tokens[::-1]
    value = order[0]
    for name in order[1:]:
        value = f"{al.TABLES[name][int(value, 2)]:03b}"
    return value


def levels(tokens):
    """Depths of the digits: how many brackets are open at each, by counting alone."""
    height, found = 0, {}
    for place, token in enumerate(tokens):
        height += (token[0] in "([") - (token in (")", "]"))
        if token in al.DIGITS:
            found[place] = height
    assert height == 0
    return found


@pytest.fixture(scope="module")
def made():
    return {task: al.splits(task, 3, train=1000, validation=100, test=50) for task in al.TASKS}


def everything(parts):
    return [one for problems in parts.values() for one in problems]


@pytest.mark.parametrize("task", al.TASKS)
def test_answers_and_depths(made, task):
    for one in everything(made[task]):
        if task in LOOKUPS:
            assert one.answer == by_hand(one.tokens)
            assert one.depth == sum(token in al.TABLES for token in one.tokens) == len(one.tokens) - 1
            assert (one.tokens[0] in al.SYMBOLS) == (task == "lookup")
        else:
            assert one.answer == by_python(one.tokens)
            assert one.depth == max(levels(one.tokens).values())
        assert al.solve(one.tokens) == (one.answer, one.depth)
        assert one.answer in al.answers(task)


@pytest.mark.parametrize("task", NESTED)
def test_the_deepest_level_matters(made, task):
    problems = [one for one in everything(made[task]) if one.depth > 1]
    for one in random.sample(problems, 100):
        deepest = [place for place, level in levels(one.tokens).items() if level == one.depth]
        assert any(
            by_python([*one.tokens[:place], digit, *one.tokens[place + 1 :]]) != one.answer
            for place in deepest
            for digit in al.DIGITS
        )


def test_known_answers():
    known = {
        "( ( 4 * 7 ) + 2 )": ("0", 2),
        "[MAX 2 [SM 9 4 ] 1 ]": ("3", 2),
        "[MED 1 4 ]": ("2", 1),
        "[MED 9 1 4 5 ]": ("4", 1),
        "[MIN 9 [MED 7 1 5 ] 8 6 ]": ("5", 2),
        "7": ("7", 0),
    }
    for text, solution in known.items():
        assert al.solve(text.split()) == solution
    assert al.TABLES["d"][0b101] == 0b111 and al.TABLES["a"][0b111] == 0b000 and al.TABLES["b"][0] == 0b111
    assert al.solve("101 d a b".split()) == al.solve("b a d 101".split())
    assert al.solve("101 d a b".split()) == ("111", 3)


def test_tables_are_eight_different_bijections():
    assert len(set(al.TABLES.values())) == 8
    assert all(sorted(table) == list(range(8)) for table in al.TABLES.values())


@pytest.mark.parametrize(
    "text",
    ["( 1 + 2", "( 1 2 )", "1 + 2", "( + 1 2 )", "[MIN 1 ]", "[MIN ( 1 ]", ") ]", "[SM 1 2 )", "1 2", "",
     "000", "a 000 b", "a b", "( 1 + 000 )", "1 <pad>"],
)  # fmt: skip
def test_malformed_expressions_are_refused(text):
    with pytest.raises(ValueError, match="malformed"):
        al.solve(text.split())


@pytest.mark.parametrize("task", al.TASKS)
def test_splits_are_distinct_and_disjoint(made, task):
    parts = made[task]
    shallow, deep = al.DEPTHS[task]
    assert list(parts) == ["train", "validation", *[f"test-{depth}" for depth in deep]]
    texts = [one.text for one in everything(parts)]
    assert len(texts) == len(set(texts)) == 1000 + 100 + 50 * len(deep)
    assert {one.depth for one in parts["train"]} == set(shallow)
    assert {one.depth for one in parts["validation"]} == set(shallow) - ({1} if task != "listops" else set())
    assert all({one.depth for one in parts[f"test-{depth}"]} == {depth} for depth in deep)
    # the side does not depend on seed or size: other draws stay on theirs
    other = al.splits(task, 4, train=250, validation=50, test=1)
    assert not {one.text for one in other["validation"]} & {one.text for one in parts["train"]}
    assert not {one.text for one in parts["validation"]} & {one.text for one in other["train"]}


def test_both_orders_of_a_lookup_are_on_the_same_side(made):
    forward, backward = (al.generate(task, 800, [3, 5], 0, "validation") for task in LOOKUPS)
    assert {al.part_of(al.Problem(one.tokens[::-1], one.answer, one.depth)) for one in forward} == {
        "validation"
    }
    assert {one.text for one in backward if one.depth == 3} & {" ".join(one.tokens[::-1]) for one in forward}


@pytest.mark.parametrize("task", al.TASKS)
def test_balance(made, task):
    kinds = len(al.answers(task))
    train = made[task]["train"]
    depths = Counter(one.depth for one in train)
    # one share for each depth, except where fewer problems exist
    scarce = {"arithmetic": {1: 200}, "listops": {}}.get(task, {1: 64})
    assert depths[2] == {"arithmetic": 200, "listops": 200}.get(task, 234)
    assert all(depths[depth] == number for depth, number in scarce.items())
    even = [number for depth, number in depths.items() if depth not in scarce]
    assert max(even) - min(even) <= 1
    for depth in set(depths) - set(scarce):
        counts = Counter(one.answer for one in train if one.depth == depth)
        assert len(counts) == kinds and max(counts.values()) - min(counts.values()) <= 1
    deep = next(iter(al.DEPTHS[task][1]))
    assert al.majority_rate(made[task][f"test-{deep}"]) == (0.1 if kinds == 10 else 0.14)


def test_majority_rate():
    assert al.majority_rate([al.Problem([], answer, 1) for answer in "1123"]) == 0.5
    with pytest.raises(ValueError, match="at least one"):
        al.majority_rate([])


@pytest.mark.parametrize("task", al.TASKS)
def test_determinism(made, task):
    again = al.splits(task, 3, train=1000, validation=100, test=50)
    assert again == made[task]
    assert al.generate(task, 20, [5], 1) != al.generate(task, 20, [5], 2)
    # a depth's problems do not depend on the others
    alone, beside = al.generate(task, 20, [9], 1), al.generate(task, 40, [8, 9], 1)
    assert {one.text for one in alone} == {one.text for one in beside if one.depth == 9}


def test_the_same_problems_in_every_release():
    text = "\n".join(
        f"{one.text} = {one.answer}" for task in al.TASKS for one in al.generate(task, 30, range(1, 7))
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "66ffb7d44a4de450"


def test_all_facts_are_in_training():
    for task, facts in (("arithmetic", 200), ("lookup", 64)):
        problems = al.generate(task, 500, [1, 2], 0, "train")
        assert sum(one.depth == 1 for one in problems) == facts
        with pytest.raises(ValueError, match="than the 0 that exist"):
            al.generate(task, 1, [1], 0, "validation")


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="more problems are wanted than the 64 that exist"):
        al.generate("lookup", 65, [1])
    with pytest.raises(ValueError, match="unknown task"):
        al.generate("sorting", 1, [1])
    with pytest.raises(ValueError, match="depths at least 1"):
        al.generate("listops", 1, [0])
    with pytest.raises(ValueError, match="part must be"):
        al.generate("listops", 1, [1], part="test")
    with pytest.raises(ValueError, match="must not be trained"):
        al.splits("listops", test_depths=[5, 6])


def test_an_exhausted_depth_is_reported(monkeypatch):
    monkeypatch.setattr(al, "PATIENCE", 300)
    monkeypatch.setattr(al, "_listed", lambda task, depth: None)
    with pytest.raises(
        RuntimeError, match="found 64 lookup problems of depth 1 and then no new one in 300 draws"
    ):
        al.generate("lookup", 72, [1])


@pytest.mark.parametrize("task", al.TASKS)
def test_encoding_and_tokenizer_round_trip(made, task):
    tokenizer = al.tokenizer()
    for one in made[task]["train"][:50]:
        ids = al.encode(one)
        words = ["<bos>", *one.tokens, "=", one.answer]
        assert al.decode(ids) == al.decode([*ids, al.PAD]) == words
        assert al.encode(one, answer=False) == ids[:-1]
        assert tokenizer(" ".join(words))["input_ids"] == ids
        assert tokenizer.decode(ids) == " ".join(words)
    with pytest.raises(ValueError, match="cannot encode token 'x'"):
        al.encode(al.Problem(["x"], "1", 1))
    assert len(tokenizer) == len(al.VOCABULARY) == len(set(al.VOCABULARY))
    assert al.VOCABULARY[al.PAD] == tokenizer.pad_token and al.VOCABULARY[al.BOS] == tokenizer.bos_token
    assert al.VOCABULARY[al.EQUALS] == "="


def test_label_ids():
    assert [al.label_id(digit) for digit in al.DIGITS] == list(range(10))
    assert [al.label_id(symbol) for symbol in al.SYMBOLS] == list(range(8))
    with pytest.raises(ValueError, match="not an answer"):
        al.label_id("10")


@pytest.mark.parametrize("task", al.TASKS)
def test_batches_label_the_answer_alone(made, task):
    data = al.AlgorithmicDataset(made[task]["train"])
    items = [data[k] for k in range(40)]
    batch = data.collate(items)
    longest = max(data.lengths[:40])
    assert all(tensor.shape == (40, longest) and tensor.dtype == torch.long for tensor in batch.values())
    for row, one in enumerate(data.problems[:40]):
        length = data.lengths[row]
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (longest - length)
        assert batch["input_ids"][row].tolist() == al.encode(one) + [al.PAD] * (longest - length)
        expected = [-100] * longest
        expected[length - 1] = al.VOCABULARY.index(one.answer)
        assert batch["labels"][row].tolist() == expected
        # shifted inside the model, the answer is predicted at the "="
        assert batch["input_ids"][row, length - 2] == al.EQUALS
    assert data[3] == data[3, 12345]


def test_batches_for_a_classifier(made):
    data = al.AlgorithmicDataset(made["lookup"]["train"], "classification")
    batch = data.collate([data[k] for k in range(8)])
    assert batch["labels"].tolist() == [int(one.answer, 2) for one in data.problems[:8]]
    assert batch["input_ids"].shape == (8, max(data.lengths[:8]))
    assert batch["input_ids"][0, : data.lengths[0]].tolist() == al.encode(data.problems[0], answer=False)
    with pytest.raises(ValueError, match="unknown head"):
        al.AlgorithmicDataset([], "text")


def test_even_repeats_the_scarce_depths(made):
    plain = al.AlgorithmicDataset(made["lookup"]["train"])
    even = al.AlgorithmicDataset(made["lookup"]["train"], even=True)
    counts = Counter(even.operators.tolist())
    assert set(counts.values()) == {max(Counter(plain.operators.tolist()).values())}
    assert {one.text for one in even.problems} == {one.text for one in plain.problems}
    assert len(al.AlgorithmicDataset([], even=True)) == 0


def test_the_curriculum_of_pairs_drives_it(made):
    data = al.AlgorithmicDataset(made["arithmetic"]["train"], even=True)
    keys = list(Curriculum(data, steps=200, batch=8, seed=0, start=1, until=0.5))
    assert keys == list(Curriculum(data, steps=200, batch=8, seed=0, start=1, until=0.5))
    depths = [int(data.operators[index]) for index, _ in keys]
    assert len(keys) == 1600 and set(depths[:400]) == {1} and set(depths[800:]) == {1, 2, 3, 4, 5}
    waste = [data.lengths[[index for index, _ in keys[k : k + 8]]] for k in range(0, 1600, 8)]
    assert sum(int((max(one) - one).sum()) for one in waste) < 0.05 * sum(int(one.sum()) for one in waste)
    batch = data.collate([data[key] for key in keys[:8]])
    assert (batch["labels"] != -100).sum() == 8
