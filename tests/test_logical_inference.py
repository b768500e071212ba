"""Logical inference: published counts, exact semantics, the generator, and error analysis."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import product
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.data import logical_inference as li
from tenuto.data import propositional

pytestmark = pytest.mark.filterwarnings("error")

TRAIN = (30, 2319, 12451, 23252, 30373, 34152, 32952, 26671, 18962, 12634, 8181, 4894, 4831)
TEST = (6, 410, 2198, 4104, 5361, 6027, 5816, 4707, 3347, 2230, 1444, 864, 853)
MAJORITY = (83.3, 58.8, 55.0, 54.7, 53.6, 53.9, 53.6, 51.4, 51.6, 51.4, 51.3, 50.6, 48.2)
LABELS = {"#": 53.1, "<": 11.0, ">": 11.0, "|": 10.7, "v": 10.6, "=": 1.9, "^": 1.7}
SPLITS = {"A": (128_969, 6_560, 53.9), "B": (87_948, 47_581, 53.4), "C": (51_896, 83_633, 53.5)}

quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)
formulas = st.recursive(
    st.sampled_from(li.VARIABLES),
    lambda inner: st.one_of(
        inner.map("( not {} )".format),
        st.builds("( {} ( and {} ) )".format, inner, inner),
        st.builds("( {} ( or {} ) )".format, inner, inner),
    ),
    max_leaves=10,
)
contingent = formulas.filter(lambda s: li.worlds(s) not in (0, propositional.EVERYTHING))
pairs_of_formulas = st.builds(
    lambda left, right: li.Pair(
        li.relation(left, right), left, right, max(li.operators(left), li.operators(right))
    ),
    contingent,
    contingent,
)


def truth_table(sentence):
    # Moving the operator out of its bracket makes the sentence a Python expression.
    source = sentence.replace("( and ", "and ( ").replace("( or ", "or ( ")
    code = compile(source, "sentence", "eval")
    rows = product((False, True), repeat=6)
    return [eval(code, {}, dict(zip("abcdef", row, strict=True))) for row in rows]


def slow_relation(left, right):
    rows = list(zip(truth_table(left), truth_table(right), strict=True))
    inside, contains = all(r for x, r in rows if x), all(x for x, r in rows if r)
    disjoint, covering = not any(x and r for x, r in rows), all(x or r for x, r in rows)
    if inside and contains:
        return "="
    if inside or contains:
        return "<" if inside else ">"
    if disjoint:
        return "^" if covering else "|"
    return "v" if covering else "#"


@pytest.fixture(scope="module")
def published_test():
    return {n: li.load_bin("test", n) for n in li.BINS}


@pytest.fixture(scope="module")
def generated():
    return li.generate_bins(seed=0)


def test_import_needs_no_framework():
    code = (
        "import sys, tenuto.data.logical_inference\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_published_counts_and_majority_rates(published_test):
    assert tuple(len(li.load_bin("train", n)) for n in li.BINS) == TRAIN
    assert tuple(len(published_test[n]) for n in li.BINS) == TEST
    rates = tuple(round(100 * li.majority_rate(published_test[n]), 1) for n in li.BINS)
    assert rates == MAJORITY


def test_every_test_label_and_operator_count_is_exact(published_test):
    for n, pairs in published_test.items():
        for pair in pairs:
            left, right = li.parse(pair.left), li.parse(pair.right)
            assert li.compare(left.worlds, right.worlds) == pair.relation
            assert max(left.operators, right.operators) == pair.operators
            assert min(pair.operators, 12) == n


def test_semantics_agree_with_truth_tables(published_test):
    for n in li.BINS:
        for pair in published_test[n][:40]:
            assert slow_relation(pair.left, pair.right) == pair.relation


@quick
@given(formulas)
def test_worlds_and_counts_agree_with_truth_tables(sentence):
    # Row w of the table gives a the highest bit, the mask gives a the lowest.
    mask = li.worlds(sentence)
    rows = [bool(mask >> int(f"{w:06b}"[::-1], 2) & 1) for w in range(64)]
    assert rows == truth_table(sentence)
    assert li.operators(sentence) == sum(t in ("and", "or", "not") for t in sentence.split())


@pytest.mark.parametrize(
    ("sentence", "deep", "negated"),
    [
        ("a", 0, False),
        ("( not a )", 1, False),
        ("( a ( and ( not b ) ) )", 2, False),
        ("( not ( a ( or b ) ) )", 2, True),
        ("( not ( not ( a ( or b ) ) ) )", 3, True),
        ("( ( not ( not ( a ( or b ) ) ) ) ( and ( c ( or d ) ) ) )", 4, True),
    ],
)
def test_depth_and_negation_scope(sentence, deep, negated):
    assert li.depth(sentence) == deep
    assert li.parse(sentence).negated_binary is negated


def test_sentences_deeper_than_the_call_stack_parse():
    levels = 5001
    assert li.depth("( not " * levels + "a" + " )" * levels) == levels


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("", "token 0 of 0"),
        ("a b", "token 2 of 2.*2 parts"),
        ("not a", "token 2 of 2"),
        ("( and a )", "token 4 of 4"),
        ("( a )", r"token 3 of 3: this '\)'"),
        ("( a and b )", "token 5 of 5"),
        ("( a ( and b ) ) )", "token 8 of 8"),
        ("( not ( a ( and b ) )", r"token 1 of 9: this '\(' is never closed"),
        ("( a ( xor b ) )", "token 4 of 7: 'xor' is not one of"),
        ("( a ( and g ) )", "token 5 of 7: 'g'"),
    ],
)
def test_malformed_sentences_say_where(sentence, message):
    for function in (li.worlds, li.depth, li.operators):
        with pytest.raises(ValueError, match=message):
            function(sentence)


@pytest.mark.parametrize("sentence", ["( a ( or ( not a ) ) )", "( a ( and ( not a ) ) )"])
def test_no_relation_to_a_tautology_or_contradiction(sentence):
    with pytest.raises(ValueError, match="left sentence is a tautology"):
        li.relation(sentence, "a")
    with pytest.raises(ValueError, match="right sentence is a tautology"):
        li.relation("a", sentence)


def test_length_protocol():
    p = li.protocol("length")
    assert (len(p.train), len(p.validation)) == (121_977, 13_552)
    assert {name: len(pairs) for name, pairs in p.test.items()} == {str(n): TEST[n] for n in range(7, 13)}
    # The tenth line of train0 is the first validation pair; the first nine are training.
    first = li.load_bin("train", 0)
    assert p.validation[0] == first[9] and [*p.train[:10]] == first[:9] + first[10:11]
    assert max(pair.operators for pair in p.train) == 6


@pytest.mark.parametrize("name", SPLITS)
def test_systematic_splits(name):
    remaining, held_out, majority = SPLITS[name]
    p = li.protocol(name)
    assert len(p.train) + len(p.validation) == remaining
    assert len(p.validation) == remaining // 10
    assert list(p.test) == [name] and len(p.test[name]) == held_out
    assert round(100 * li.majority_rate(p.test[name]), 1) == majority
    needle = {"A": ["( and ( not a ) )"], "B": ["( and ( not "]}.get(name, ["( and ( not ", "( or ( not "])
    for pairs, expected in ((p.train, False), (p.validation, False), (p.test[name], True)):
        for pair in pairs:
            assert any(s in pair.left or s in pair.right for s in needle) is expected


def test_loading_refuses_a_changed_file(tmp_path):
    for name in ("SHA256SUMS", "test0.tsv.gz", "test1.tsv.gz"):
        shutil.copy(li.FILES / name, tmp_path)
    assert li.load_bin("test", 0, tmp_path) == li.load_bin("test", 0)
    shutil.copy(tmp_path / "test1.tsv.gz", tmp_path / "test0.tsv.gz")
    with pytest.raises(ValueError, match=r"^test0\.tsv\.gz is not the published file: .*[0-9a-f]"):
        li.load_bin("test", 0, tmp_path)


def test_loading_errors_are_clear():
    with pytest.raises(ValueError, match="no bin 'train', 13"):
        li.load_bin("train", 13)
    with pytest.raises(ValueError, match="no bin 'dev', 1"):
        li.load_bin("dev", 1)
    with pytest.raises(ValueError, match="unknown protocol 'D'"):
        li.protocol("D")
    with pytest.raises(ValueError, match=r"mine\.tsv, line 2: expected a relation"):
        li.read_pairs(["#\ta\tb\n", "? a b\n"], "mine.tsv")


def test_vocabulary_and_both_encodings():
    assert len(set(li.VOCABULARY)) == len(li.VOCABULARY) == 3 + 11 + 7
    assert li.VOCABULARY[:3] == ("<pad>", "<bos>", "#SEP#")
    assert not set(li.RELATIONS) & set(li.VOCABULARY)
    pair = li.Pair("v", "( not a )", "( b ( or c ) )", 1)
    plain, text = li.encode(pair), li.encode(pair, "text-to-text", bos=True)
    joined = "( not a ) #SEP# ( b ( or c ) )".split()
    assert li.decode(plain.source) == joined
    assert li.decode(text.source) == ["<bos>", *joined]
    assert plain.target == [5] == [li.label_id("v")]
    assert li.decode(text.target) == ["cover"]


def test_encoding_errors_are_clear():
    with pytest.raises(ValueError, match="cannot encode token '#SEP#'"):
        li.encode(li.Pair("=", "a #SEP# b", "a", 0))
    with pytest.raises(ValueError, match="unknown relation '=='"):
        li.encode(li.Pair("==", "a", "a", 0))
    with pytest.raises(ValueError, match="unknown form 'seq'"):
        li.encode(li.Pair("=", "a", "a", 0), "seq")


@quick
@given(pairs_of_formulas)
def test_swapping(pair):
    swapped = li.swap(pair)
    assert li.swap(swapped) == pair
    assert li.relation(swapped.left, swapped.right) == swapped.relation


@quick
@given(pairs_of_formulas, st.permutations(li.VARIABLES))
def test_renaming_keeps_relation_and_can_be_undone(pair, permutation):
    renamed = li.rename(pair, permutation)
    assert li.relation(renamed.left, renamed.right) == pair.relation == renamed.relation
    inverse = [li.VARIABLES[permutation.index(name)] for name in li.VARIABLES]
    assert li.rename(renamed, inverse) == pair


def test_renaming_needs_a_permutation():
    pair = li.Pair("#", "a", "( not b )", 1)
    assert li.rename(pair, "bacdef") == li.Pair("#", "b", "( not a )", 1)
    with pytest.raises(ValueError, match="permutation of a b c d e f, got 'aacdef'"):
        li.rename(pair, "aacdef")


def test_published_bins_are_cut_at_85_percent():
    for train, test in zip(TRAIN, TEST, strict=True):
        assert train == int(0.85 * (train + test))


def test_generated_bins_match_the_published_ones(generated):
    for n in li.BINS:
        train, test = generated["train"][n], generated["test"][n]
        # Two independent draws of a count differ by sqrt(2 n) in one standard deviation.
        assert abs(len(train) - TRAIN[n]) <= 4 * sqrt(2 * TRAIN[n])
        assert len(train) == int(0.85 * (len(train) + len(test)))
        assert len({*train, *test}) == len(train) + len(test)
        assert all(min(12, pair.operators) == n for pair in test)
    assert len(generated["train"][0]) == TRAIN[0]


def test_generated_labels_match_the_published_ones(generated, published_test):
    counts = Counter(p.relation for bins in generated.values() for b in bins.values() for p in b)
    for name, share in LABELS.items():
        assert abs(100 * counts[name] / counts.total() - share) < 0.35
    for n in range(2, 13):
        spread = 100 * sqrt(0.25 / len(published_test[n]) + 0.25 / len(generated["test"][n]))
        found = 100 * li.majority_rate(generated["test"][n])
        assert abs(found - MAJORITY[n]) < 4 * spread


def test_generated_pairs_are_exact_and_reproducible():
    pairs = li.generate(300, seed=3)
    assert pairs == li.generate(300, seed=3) != li.generate(300, seed=4)
    for pair in pairs:
        assert li.relation(pair.left, pair.right) == pair.relation
        assert pair.operators == max(li.operators(pair.left), li.operators(pair.right))
        assert len({t for t in f"{pair.left} {pair.right}".split() if t in li.VARIABLES}) <= 4
    assert slow_relation(pairs[0].left, pairs[0].right) == pairs[0].relation


def binary_levels(sentence):
    text = re.sub(r"\b[a-f]\b", "0", sentence)
    while "(" in text:
        text = re.sub(r"\( not (\d) \)", r"\1", text)
        text = re.sub(r"\( (\d) \( (?:and|or) (\d) \) \)", lambda m: str(int(max(m.groups())) + 1), text)
    return int(text)


@pytest.mark.parametrize(("size", "levels"), [(1, 0), (3, 1), (12, 3), (24, 4)])
def test_size_bounds_the_binary_levels(size, levels):
    pairs = li.generate(1500, seed=1, max_size=size, variables_per_pair=6)
    found = max(binary_levels(s) for pair in pairs for s in (pair.left, pair.right))
    assert found == levels
    assert max(pair.operators for pair in pairs) <= propositional.most_operators(size)


def test_operator_range_and_label_balance():
    pairs = li.generate(150, 2, balance="labels", min_operators=4, max_operators=9)
    counts = Counter(pair.relation for pair in pairs)
    assert [counts[name] for name in li.RELATIONS] == [22, 22, 22, 21, 21, 21, 21]
    assert all(4 <= pair.operators <= 9 for pair in pairs)
    assert len({pair.relation for pair in pairs[-40:]}) > 3


def test_impossible_requests_are_refused(monkeypatch):
    monkeypatch.setattr(propositional, "PATIENCE", 5000)
    # Two single variables are equal or independent, so five relations never come.
    with pytest.raises(RuntimeError, match=r"found 4 of 14 .* none in 5000 draws .*'<': 2"):
        li.generate(14, 0, balance="labels", max_operators=0)
    with pytest.raises(ValueError, match="no pair has 23 to 22 operators at max_size=12"):
        li.generate(1, 0, min_operators=23)
    with pytest.raises(ValueError, match="no pair has 5 to 4 operators"):
        li.generate(1, 0, min_operators=5, max_operators=4)
    with pytest.raises(ValueError, match="variables_per_pair=7"):
        li.generate(1, 0, variables_per_pair=7)
    with pytest.raises(ValueError, match="balance must be None or 'labels'"):
        li.generate(1, 0, balance="size")


def test_error_tables():
    pairs = [
        li.Pair("=", "a", "a", 0),
        li.Pair("#", "a", "( not b )", 1),
        li.Pair("|", "( not ( a ( or b ) ) )", "a", 2),
        li.Pair("|", "b", "( not ( a ( or b ) ) )", 2),
    ]
    answers = ["=", "=", "|", "#"]
    table = li.breakdown(pairs, answers)
    assert json.loads(json.dumps(table)) == table
    assert table["accuracy"] == 0.5 and table["majority"] == 0.5 and table["pairs"] == 4
    assert table["confusion"]["#"] == dict.fromkeys(li.RELATIONS, 0) | {"=": 1}
    assert table["confusion"]["|"]["|"] == table["confusion"]["|"]["#"] == 1
    assert {k: v["accuracy"] for k, v in table["operators"].items()} == {
        "0": 1.0,
        "1": 0.0,
        "2": 0.5,
    }
    assert {k: v["pairs"] for k, v in table["depth"].items()} == {"0": 1, "1": 1, "2": 2}
    assert table["negation"]["over a binary operator"]["pairs"] == 2
    assert {k: v["pairs"] for k, v in table["negated_operands"].items()} == {"0": 4}
    assert list(table["relation"]) == ["=", "|", "#"]
    assert li.breakdown(pairs, [li.label_id(name) for name in answers]) == table
    by_length = li.accuracy_by(pairs, answers, lambda pair: len(pair.left))
    assert by_length["1"] == {"pairs": 3, "right": 1, "accuracy": 1 / 3, "majority": 1 / 3}


def test_negated_operands_are_counted_in_both_sentences():
    pairs = [
        li.Pair("#", "( a ( and ( not b ) ) )", "( ( not a ) ( or ( not ( b ( and ( not c ) ) ) ) ) )", 5),
        li.Pair("#", "( ( not a ) ( and b ) )", "b", 2),
    ]
    table = li.accuracy_by(pairs, ["#", "="], "negated_operands")
    assert {k: v["right"] for k, v in table.items()} == {"3": 1, "0": 0} and list(table) == ["0", "3"]


def test_operator_groups_sort_as_numbers():
    pairs = [li.Pair("#", "a", "b", n) for n in random.Random(0).sample(range(20), 20)]
    assert list(li.accuracy_by(pairs, ["#"] * 20, "operators")) == [str(n) for n in range(20)]


def test_prediction_errors_are_clear():
    pair = li.Pair("=", "a", "a", 0)
    with pytest.raises(ValueError, match="got 2 predictions for 1 pairs"):
        li.errors_by_relation([pair], ["=", "="])
    with pytest.raises(ValueError, match="must be 0 to 6, got -1"):
        li.errors_by_relation([pair], [-1])
    with pytest.raises(ValueError, match="unknown relation 'equal'"):
        li.errors_by_relation([pair], ["equal"])
    with pytest.raises(ValueError, match="unknown key 'size'"):
        li.accuracy_by([pair], ["="], "size")
    with pytest.raises(ValueError, match="at least one pair"):
        li.majority_rate([])
