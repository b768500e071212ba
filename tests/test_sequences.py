"""Compositional tasks and parallel text: loaders, vocabularies, batches, training end to end, translation, BLEU."""

import gzip
import io
import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml

from tenuto.data import parallel, sequences
from tenuto.data.parallel import Corpus
from tenuto.data.sequences import Example
from tenuto.data.sequences_batches import EOS, UNK, Batches, Ragged, SequenceDataset, word_tokenizer
from tenuto.recipe import Parallel, Recipe, Sequences, load_recipe
from tenuto.tasks import task_of

ROOT = Path(__file__).parents[1]
SETS = ROOT.parent / "shared" / "data"


def needs(name: str) -> Path:
    folder = SETS / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not at hand")
    return folder


# --- compositional tasks


@pytest.mark.parametrize(
    ("split", "train", "test"),
    [
        ("simple", 16728, 4182),
        ("length", 16990, 3920),
        ("addprim_jump", 14670, 7706),
        ("addprim_turn_left", 21890, 1208),
        ("template_around_right", 15225, 4476),
        ("template_jump_around_right", 18528, 1173),
    ],
)
def test_scan_has_its_published_counts(split, train, test):
    """Shipped; validation and training are sides of the published training part, without a common command."""
    found = {part: sequences.read("scan", part, split) for part in sequences.parts("scan", split)}
    assert len(found["train"]) + len(found["validation"]) == train and len(found["test"]) == test
    commands = [{tuple(one.source) for one in found[part]} for part in ("train", "validation", "test")]
    assert not commands[0] & commands[1] and not commands[0] & commands[2]
    assert 0.03 < len(found["validation"]) / train < 0.07
    assert min(len(one.source) for one in found["validation"]) > 2
    if split == "length":
        assert max(one.kind for one in found["train"]) == 22 and min(one.kind for one in found["test"]) == 24
    if split == "addprim_jump":
        assert ("jump",) in commands[0] and not any("jump" in c for c in commands[0] if len(c) > 1)


def test_cogs_has_its_parts_and_types():
    """Shipped; 21 types of generalisation of 1,000 each."""
    assert [len(sequences.read("cogs", part)) for part in sequences.parts("cogs")] == [
        24155,
        3000,
        3000,
        21000,
    ]
    kinds = Counter(one.kind for one in sequences.read("cogs", "gen"))
    assert len(kinds) == 21 and set(kinds.values()) == {1000}


def test_a_shipped_file_that_was_changed_is_refused(tmp_path, monkeypatch):
    """The hashes are checked."""
    for file in (sequences.FILES / "cogs").iterdir():
        (tmp_path / "cogs").mkdir(exist_ok=True)
        (tmp_path / "cogs" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "cogs" / "dev.tsv.gz").write_bytes(gzip.compress(b"a\tb\tc\n"))
    monkeypatch.setattr(sequences, "FILES", tmp_path)
    with pytest.raises(ValueError, match="not the shipped file"):
        sequences.read("cogs", "train")


def test_pcfg_tests_are_read_and_the_missing_training_part_is_named():
    """The copy at hand has no training files."""
    folder = needs("pcfg_set")
    sizes = {
        (split, part): len(sequences.read("pcfg", part, split, folder))
        for split, part in (
            ("pcfgset", "validation"),
            ("pcfgset", "test"),
            ("productivity", "test"),
            ("systematicity", "test"),
        )
    }
    assert list(sizes.values()) == [4860, 9721, 11333, 10175]
    kinds = [one.kind for one in sequences.read("pcfg", "test", "productivity", folder)]
    assert min(kinds) == 9 and max(kinds) == 35
    with pytest.raises(FileNotFoundError, match=r"no file pcfgset/train\.src"):
        sequences.read("pcfg", "train", "pcfgset", folder)


def test_pcfg_in_its_published_layout(tmp_path):
    """Folders by split; the validation part of `productivity` is a side of its training part."""
    folder = tmp_path / "data" / "pcfgset" / "productivity"
    folder.mkdir(parents=True)
    sources = [f"append A{k} , reverse B{k} C1" for k in range(200)]
    (folder / "train.src").write_text("\n".join(sources) + "\n")
    (folder / "train.tgt").write_text("".join(f"A{k} C1 B{k}\n" for k in range(200)))
    train, valid = (
        sequences.read("pcfg", part, "productivity", tmp_path) for part in ("train", "validation")
    )
    assert len(train) + len(valid) == 200 and 3 <= len(valid) <= 25
    assert train[0] == Example(["append", "A0", ",", "reverse", "B0", "C1"], ["A0", "C1", "B0"], 2)


def test_published_listops_trees_are_left_out_of_training(monkeypatch, tmp_path):
    """Beside a published test file, what is generated holds none of its trees; the others stay, in order."""
    monkeypatch.setattr(sequences, "D20S", {"train": 300, "validation": 50, "test": 50})
    sequences._d20s.cache_clear()
    made = {part: sequences.read("listops", part, "d20s") for part in ("train", "validation")}
    taken = made["train"][::3] + made["validation"][:5]
    rows = "".join(f"{one.target[0]}\t{' '.join(one.source)}\n" for one in taken)
    (tmp_path / "test_d20s.tsv").write_text(rows)
    assert sequences.read("listops", "test", "d20s", tmp_path) == taken
    for part, some in made.items():
        left = sequences.read("listops", part, "d20s", tmp_path)
        assert left == [one for one in some if one not in taken] and len(left) < len(some)
    sequences._d20s.cache_clear()


def test_listops_is_generated_or_read(monkeypatch):
    """Answers agree with the solver of algorithmic.py; the published tests have the published mean length."""
    from tenuto.data import algorithmic

    monkeypatch.setattr(sequences, "D20S", {"train": 300, "validation": 50, "test": 50})
    sequences._d20s.cache_clear()
    found = [sequences.read("listops", part, "d20s") for part in ("train", "validation", "test")]
    sequences._d20s.cache_clear()
    assert [len(part) for part in found] == [300, 50, 50]
    texts = [" ".join(one.source) for part in found for one in part]
    assert len(set(texts)) == 400
    for one in (one for part in found for one in part):
        assert algorithmic.solve(one.source) == (one.target[0], one.kind)
    assert set(sequences.parts("listops", "depth")) == {"train", "validation", "test-7", "test-8"}
    published = sequences.read("listops", "test", "d20s", needs("listops"))
    assert len(published) == 10000 and max(len(one.source) for one in published) == 939
    assert all(algorithmic.solve(one.source)[0] == one.target[0] for one in published[:500])


QUERY = """SELECT count(*) WHERE {
?x0 ns:film.director.film M0 .
?x0 ns:film.editor.film M0 .
?x0 ns:film.director.film M1 .
?x0 ns:film.editor.film M1 .
FILTER ( ?x0 != M1 ) .
?x1 ns:film.director.film M0 .
?x1 ns:film.director.film M1 .
M2 ns:film.film.directed_by ?x1 .
?x0 ns:people.person.gender ns:m.05zppz
}"""


def test_conjuncts_are_grouped_and_sorted():
    """By (subject, predicate), (predicate, objects), (objects, subjects); mcd2 and mcd3 invert predicates too."""
    tokens = sequences.sparql_tokens(QUERY)
    assert tokens[:7] == ["SELECT", "count", "(", "*", ")", "WHERE", "{"] and "m_05zppz" in tokens
    assert " ".join(sequences.conjuncts(tokens)) == (
        "SELECT count ( * ) WHERE { ?x0 ?x1 film.director.film M0 M1 . ?x0 film.editor.film M0 M1 ."
        " ?x0 people.person.gender m_05zppz . FILTER ( ?x0 != M1 ) . M2 film.film.directed_by ?x1 }"
    )
    inverted = " ".join(sequences.conjuncts(tokens, inverse=True))
    assert "?x0 film.director.film film.editor.film M0 M1" in inverted
    assert "?x1 film.director.film M0 M1 M2" in inverted and "directed_by" not in inverted
    shuffled = QUERY.splitlines()
    shuffled[1], shuffled[2] = shuffled[2], shuffled[1]
    assert sequences.conjuncts(sequences.sparql_tokens("\n".join(shuffled))) == sequences.conjuncts(tokens)
    with pytest.raises(ValueError, match="not a query"):
        sequences.conjuncts(["SELECT", "?x0"])
    with pytest.raises(ValueError, match="no conjunct"):
        sequences.conjuncts("SELECT ?x0 WHERE { ?x0 a }".split())


def test_cfq_reads_a_users_copy(tmp_path):
    """dataset.json and splits/mcd1.json, as published."""
    samples = [
        {"questionPatternModEntities": f"Did M{k} 's sister edit M0", "sparqlPatternModEntities": QUERY}
        for k in range(4)
    ]
    (tmp_path / "dataset.json").write_text(json.dumps(samples))
    (tmp_path / "splits").mkdir()
    split = {"trainIdxs": [3, 1], "devIdxs": [0], "testIdxs": [2]}
    (tmp_path / "splits" / "mcd1.json").write_text(json.dumps(split))
    train = sequences.read("cfq", "train", "mcd1", tmp_path)
    assert [one.source[1] for one in train] == ["M3", "M1"]
    assert train[0].source == ["Did", "M3", "'", "s", "sister", "edit", "M0"]
    assert train[0].target == sequences.conjuncts(sequences.sparql_tokens(QUERY))
    with pytest.raises(ValueError, match="not shipped"):
        sequences.read("cfq", "train")
    (tmp_path / "splits" / "mcd1.json").write_text(json.dumps({**split, "testIdxs": [9]}))
    with pytest.raises(ValueError, match="sample 9"):
        sequences.read("cfq", "test", "mcd1", tmp_path)


def test_bad_names_and_lines_are_refused_in_one_sentence(tmp_path):
    """Task, split, part, folder, and a line that is not SCAN's."""
    (tmp_path / "tasks_train_simple.txt").write_text("IN: jump OUT: I_JUMP\njump I_JUMP\n")
    with pytest.raises(ValueError, match="line 2: expected 'IN: command OUT: actions'"):
        sequences.read("scan", "train", "simple", tmp_path)
    for words, message in (
        (("scam", "train"), "no task 'scam'"),
        (("scan", "train", "hard"), "no split 'hard'"),
        (("scan", "gen"), "no part 'gen'"),
        (("scan", "train", None, tmp_path / "none"), "no folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            sequences.read(*words)


# --- batches


def test_words_are_numbered_by_frequency():
    """Specials first; what was not seen is <unk>; a word spelt like a special is no special."""
    words = word_tokenizer([["b", "a", "b"], ["c", "a", "b"]])
    assert words.convert_ids_to_tokens(range(7)) == ["<pad>", "<bos>", "<eos>", "<unk>", "b", "a", "c"]
    ids = parallel.encode_lines(["c b", "a zebra"], words)
    assert [one.tolist() for one in (ids[0], ids[1])] == [[6, 4, EOS], [5, UNK, EOS]]
    assert words.decode([6, 4, 5]) == "c b a"


def ragged(lengths) -> Ragged:
    return Ragged.of(np.arange(n) + 3 for n in lengths)


def test_ragged_gives_back_what_it_was_given():
    """Index, take and an empty sequence."""
    lengths = [3, 0, 5, 1]
    one = ragged(lengths)
    assert [len(one[k]) for k in range(4)] == lengths and one.lengths.tolist() == lengths
    taken = one.take(np.array([2, 2, 0]))
    assert [taken[k].tolist() for k in range(3)] == [one[2].tolist(), one[2].tolist(), one[0].tolist()]


def test_token_batches_hold_every_pair_once_and_no_more_tokens_than_asked():
    """Padding is counted; a pair longer than a batch is alone; most batches are nearly full."""
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    lengths[7] = 500
    run = Batches(lengths, steps=10**6, batch=1, seed=3, tokens=256)
    batches = run.epoch(0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(2000))
    cost = [len(one) * lengths[one].max() for one in batches]
    assert sorted(cost)[-2] <= 256 and max(cost) == 500
    assert np.mean(cost) > 200
    # like lengths together: hardly any padding
    assert sum(lengths[one].sum() for one in batches) / sum(cost) > 0.97


@pytest.mark.parametrize("tokens", [None, 128])
def test_a_longer_or_resumed_run_sees_the_same_batches(tokens):
    """A batch is a function of the seed and its number; epochs differ, seeds differ."""
    lengths = np.random.default_rng(1).integers(1, 40, 90)
    short, long = (list(Batches(lengths, steps, 4, 5, tokens)) for steps in (10, 60))
    assert len(short) == 40 and len(long) == 240 and long[:40] == short
    assert list(Batches(lengths, 10, 4, 6, tokens)) != short
    run = Batches(lengths, 60, 4, 5, tokens)
    assert [one.tolist() for one in run.epoch(0)] != [one.tolist() for one in run.epoch(1)]
    if tokens is None:
        assert len(set(islice(run, 88))) == 88
        with pytest.raises(ValueError, match="fewer than a batch of 91"):
            Batches(lengths, 1, 91, 0)


def test_collate_pads_single_items_and_whole_batches_alike():
    """A tuple of indices is a batch; labels are -100 at padding, and end with <eos>."""
    data = SequenceDataset(ragged([2, 4, 3]), ragged([5, 1, 2]))
    one, other = data.collate([data[0], data[2]]), data.collate([data[(0, 2)]])
    for name in ("input_ids", "attention_mask", "labels"):
        assert one[name].tolist() == other[name].tolist()
    assert one["input_ids"].tolist() == [[3, 4, 0], [3, 4, 5]]
    assert one["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert one["labels"].tolist() == [[3, 4, 5, 6, 7], [3, 4, -100, -100, -100]]
    assert data.by_length().lengths.tolist() == [3, 4, 5]


# --- parallel text

ENGLISH = [f"A man number {k} rides a red-brown horse." for k in range(60)]
GERMAN = [f"Ein Mann Nummer {k} reitet ein rot-braunes Pferd." for k in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sixty pairs as two files (one .gz) and as lines with tabs."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "train.en").write_text("".join(f"{line}\n" for line in ENGLISH))
    (folder / "train.de.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in GERMAN).encode()))
    rows = [
        f"{k}\t{german}\t{english}\n" for k, (english, german) in enumerate(zip(ENGLISH, GERMAN, strict=True))
    ]
    (folder / "both.tsv").write_text("".join(rows))
    json_rows = [{"translation": {"en": e, "de": g}} for e, g in zip(ENGLISH, GERMAN, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in json_rows))
    return folder


def test_pairs_are_read_from_files_columns_and_datasets(folder):
    """The same pairs three ways; limit and times."""
    pairs = list(zip(ENGLISH, GERMAN, strict=True))
    assert parallel.read_pairs(Corpus("train.en", "train.de.gz"), folder) == pairs
    assert parallel.read_pairs(Corpus("both.tsv", fields=["2", "1"]), folder) == pairs
    assert (
        parallel.read_pairs(Corpus("both.tsv", fields=["2", "1"], limit=1, times=2), folder) == pairs[:1] * 2
    )
    pytest.importorskip("datasets")
    hub = Corpus(f"hf:{folder / 'rows.jsonl'}", fields=["translation.en", "translation.de"], limit=5)
    assert parallel.read_pairs(hub) == pairs[:5]
    with pytest.raises(ValueError, match=r"no field translation\.fr"):
        parallel.read_pairs(
            Corpus(f"hf:{folder / 'rows.jsonl'}", fields=["translation.en", "translation.fr"])
        )


def test_bad_pairs_are_refused_in_one_sentence(folder, tmp_path):
    """Misaligned files, missing columns, missing files, nothing left."""
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("eins\n")
    for corpus, message in (
        (Corpus("a", "b"), r"b ends before line 2 of .*a: they are not aligned"),
        (Corpus("a"), "line 1: expected 2 columns"),
        (Corpus("c"), "no file"),
        (Corpus("a", fields=["x", "y"]), "numbers from 0"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            parallel.read_pairs(corpus, tmp_path)
    words = parallel.joint_tokenizer([("a", "b")], "bpe", 300)
    with pytest.raises(ValueError, match="None of 1 pairs"):
        parallel.encode_pairs([("a b c d e f", "b")], words, max_ratio=2.0)


def test_joint_bpe_round_trips_filters_and_is_kept(folder, tmp_path):
    """Ids decode to the text; the filter counts tokens; the cache gives the same ids, and is keyed by the text."""
    pairs = parallel.read_pairs(Corpus("train.en", "train.de.gz"), folder)
    words = parallel.joint_tokenizer(pairs, "bpe", 400, tmp_path)
    assert words.get_vocab() == parallel.joint_tokenizer(pairs, "bpe", 400).get_vocab()
    data = parallel.encode_pairs(pairs, words, cache=tmp_path)
    assert [words.decode(data.target[k][:-1]) for k in (0, 59)] == [GERMAN[0], GERMAN[59]]
    assert data.source[0][-1] == EOS
    again = parallel.encode_pairs(pairs, words, cache=tmp_path)
    assert np.array_equal(data.source.ids, again.source.ids) and np.array_equal(
        data.target.ends, again.target.ends
    )
    assert len(list(tmp_path.glob("*.npz"))) == 1
    parallel.encode_pairs(pairs[:5], words, cache=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2 and not list(tmp_path.glob("*.part"))
    most = int(data.lengths.min())
    kept = parallel.encode_pairs(pairs, words, max_length=most - 1)
    assert 0 < len(kept) < 60 and kept.lengths.max() == most
    with pytest.raises(ValueError, match="0, 1, 2 are needed"):
        parallel.joint_tokenizer(pairs, str(_other_tokenizer(tmp_path)), 400)


def _other_tokenizer(folder: Path) -> Path:
    words = parallel.joint_tokenizer([("a", "b")], "bpe", 300)
    words.bos_token = "<eos>"
    words.save_pretrained(folder / "other")
    return folder / "other"


def test_multi30k_and_tatoeba_have_their_counts():
    """Where they are at hand."""
    assert len(parallel.read_pairs(Corpus("train.en.gz", "train.de.gz"), needs("multi30k_en_de"))) == 29000
    assert len(parallel.read_pairs(Corpus("tatoeba.en-de.tsv.gz"), needs("tatoeba_en_de"))) == 169813
    test = parallel.read_pairs(
        Corpus("newstest2014.tok.en.gz", "newstest2014.tok.de.gz"), needs("wmt14_en_de")
    )
    assert len(test) == 2737


def test_prepare_wmt14_joins_filters_and_trains_a_bpe(tmp_path):
    """From the published names, at any depth; sgml is unpacked; references stay as published."""
    from tenuto.data.wmt14 import plain, prepare

    source = tmp_path / "in"
    (source / "training").mkdir(parents=True)
    for name in ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en"):
        (source / "training" / f"{name}.en").write_text("".join(f"{line}\n" for line in [*ENGLISH, "short"]))
        (source / "training" / f"{name}.de").write_text(
            "".join(f"{line}\n" for line in [*GERMAN, "ein sehr langer Satz mit vielen, vielen Wörtern, ja"])
        )
    for side, line in (("en", "He said “no”.\n"), ("de", "Er sagte „nein“.\n")):
        (source / f"newstest2013.{side}").write_text(line)
    (source / "newstest2014-deen-src.en.sgm").write_text(
        '<doc>\n<seg id="1">Q &amp; A \u2013 “now”</seg>\n<seg id="2">Two</seg>\n</doc>\n'
    )
    (source / "newstest2014-deen-ref.de.sgm").write_text(
        '<doc>\n<seg id="1">„Jetzt“</seg>\n<seg id="2">Zwei</seg>\n</doc>\n'
    )
    figures = prepare(source, tmp_path / "out", vocab_size=359)
    assert figures["train"] == 180 and figures["newstest2014"] == 2 and figures["tokens"] <= 359
    assert set(figures["read"].values()) == {61}
    test = parallel.read_pairs(Corpus("newstest2014.en.gz", "newstest2014.de.gz"), tmp_path / "out")
    assert test == [('Q & A - "now"', "„Jetzt“"), ("Two", "Zwei")]
    assert plain("a\u00a0„b“…\u200b") == 'a "b"...'
    assert len(parallel.joint_tokenizer([], str(tmp_path / "out" / "tokenizer"), 0)) == figures["tokens"]
    (source / "newstest2013.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file newstest2013\.de"):
        prepare(source, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        prepare(tmp_path / "nowhere", tmp_path / "out")


def test_prepare_wmt14_reads_what_datasets_reads(tmp_path):
    """Rows {translation: {en, de}} of three splits make the same files as the published names do."""
    pytest.importorskip("datasets")
    from tenuto.data.wmt14 import prepare

    rows, files = tmp_path / "rows", tmp_path / "files"
    rows.mkdir(), files.mkdir()
    pairs = {
        "train": [
            *zip(ENGLISH, GERMAN, strict=True),
            ("short", "ein sehr langer Satz mit vielen Wörtern, ja"),
        ]
    }
    pairs |= {
        "validation": [("He said “no”.", "Er sagte „nein“.")],
        "test": [("Q \u2013 A", "„Jetzt“"), ("Two", "Zwei")],
    }
    for split, some in pairs.items():
        lines = [json.dumps({"translation": {"en": one, "de": two}}) + "\n" for one, two in some]
        (rows / f"{split}.jsonl").write_text("".join(lines))
    names = {
        "train": ["europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en"],
        "validation": ["newstest2013"],
        "test": ["newstest2014"],
    }
    for split, stems in names.items():
        for place, stem in enumerate(stems):
            for side, language in enumerate(("en", "de")):
                text = "".join(f"{pair[side]}\n" for pair in pairs[split][place :: len(stems)])
                (files / f"{stem}.{language}").write_text(text)
    ours, theirs = prepare(f"hf:{rows}", tmp_path / "a", 359), prepare(files, tmp_path / "b", 359)
    assert ours["read"] == {f"hf:{rows}": 61} and sum(theirs["read"].values()) == 61
    assert {**ours, "read": 0} == {**theirs, "read": 0} and ours["train"] == 60
    for name in ("train", "newstest2013", "newstest2014"):
        one, two = (
            parallel.read_pairs(Corpus(f"{name}.en.gz", f"{name}.de.gz"), tmp_path / out) for out in "ab"
        )
        assert sorted(one) == sorted(two)
    assert one == [("Q - A", "„Jetzt“"), ("Two", "Zwei")]


# --- recipes, training, evaluation

TINY = {
    "preset": "ut-tiny",
    "head": "text-to-text",
    "training": {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1.0e-3,
        "logging_steps": 2,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
}


def written(path: Path, **changes) -> Path:
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


def test_recipes_name_one_task_and_its_head(tmp_path):
    """What does not go together is refused."""
    scan, pairs = {"sequences": {"task": "scan"}}, {"parallel": {"train": [], "validation": []}}
    good = load_recipe(written(tmp_path / "good.yaml", data=scan))
    assert good.data.sequences == Sequences("scan")
    for changes, message in (
        ({"data": {**scan, "algorithmic": {"task": "listops"}}}, "two tasks"),
        ({"data": scan, "head": "classification"}, 'goes with head "text-to-text"'),
        ({"data": scan, "head": "causal"}, 'head "causal" goes with'),
        ({"data": pairs}, "per_device_train_batch_size: 1"),
        ({"data": {"sequences": {"task": "scam"}}}, "scam"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe(written(tmp_path / "bad.yaml", **changes))


@pytest.fixture(scope="module")
def scan_run(tmp_path_factory):
    """Fifty lines of SCAN, four steps."""
    from tenuto.train import train

    folder = tmp_path_factory.mktemp("scan")
    file = folder / "data" / "tasks_train_simple.txt"
    file.parent.mkdir()
    chosen = sequences.read("scan", "test", "simple")[:50]
    lines = [f"IN: {' '.join(one.source)} OUT: {' '.join(one.target)}\n" for one in chosen]
    file.write_text("".join(lines))
    (folder / "data" / "tasks_test_simple.txt").write_text("".join(lines[:12]))
    recipe = load_recipe(
        written(folder / "scan.yaml", data={"sequences": {"task": "scan", "path": str(folder / "data")}})
    )
    return folder / "run", train(recipe, folder / "run")


def test_training_logs_validation_loss_and_resumes(scan_run):
    """Validation loss during training; the recipe that was saved is the recipe that is read."""
    folder, figures = scan_run
    losses = [row["eval_loss"] for row in figures["history"] if "eval_loss" in row]
    assert len(losses) == 3 and all(np.isfinite(losses)) and figures["validation_loss"] == losses[-1]
    recipe = load_recipe(folder / "recipe.yaml")
    task = task_of(recipe)
    assert len(task.train) + len(task.validation) == 50
    batch = task.collate([task.train[0]])
    assert batch["labels"][0, -1] == EOS and batch["input_ids"][0, -1] == EOS


def test_teacher_forced_labels_are_the_target_shifted(scan_run):
    """The loss of the model is the negative log-likelihood of target and <eos>, summed by hand."""
    import torch

    from tenuto.evaluate import load

    loaded = load(scan_run[0])
    task = task_of(loaded.recipe)
    batch = task.collate([task.train[k] for k in range(3)])
    with torch.no_grad():
        out = loaded.model(**batch)
        total, count = 0.0, 0
        for row in range(3):
            target = [k for k in batch["labels"][row].tolist() if k != -100]
            source = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
            logits = loaded.model(source, decoder_input_ids=torch.tensor([[1, *target[:-1]]])).logits[0]
            total -= logits.log_softmax(-1)[range(len(target)), target].sum().item()
            count += len(target)
    assert out.losses["task"].item() == pytest.approx(total / count, abs=1e-5)


def test_evaluation_is_exact_match_with_baselines_depth_and_costs(scan_run):
    """Figures agree with what was written; the command prints them; wrong sets and flags are refused."""
    from tenuto.cli import main
    from tenuto.evaluate import load
    from tenuto.translate import evaluate_pairs, write

    folder = scan_run[0]
    figures = evaluate_pairs(folder, outputs=folder / "said", threshold=0.9)
    row = figures["sets"]["test"]
    assert row["examples"] == 12 and row["copy"] == row["unanswerable"] == 0.0 and 0 <= row["majority"] <= 100
    assert sum(one["examples"] for one in row["by_kind"].values()) == 12
    assert 1 <= row["encoder_depth"] <= 4 and 1 <= row["decoder_depth"] <= 4 and row["macs_per_token"] > 1000
    said = (folder / "said" / "test.txt").read_text().split("\n")[:-1]
    tests = sequences.read("scan", "test", "simple", folder.parent / "data")
    right = np.mean([text == " ".join(one.target) for text, one in zip(said, tests, strict=True)])
    assert row["exact"] == pytest.approx(100 * right, abs=0.01)
    loaded = load(folder)
    with pytest.raises(ValueError, match="Line 2 is empty"):
        write(loaded, ["jump", ""])
    with pytest.raises(ValueError, match="no set 'gen'"):
        evaluate_pairs(folder, ["gen"])
    assert main(["evaluate", str(folder), "--errors"]) == 2
    assert main(["evaluate", str(folder), "--sets", "validation", "--limit", "3", "--json"]) == 0
    assert main(["depths", str(folder)]) == 1


def test_answers_are_the_likeliest_tokens_and_their_own_passes_cost(scan_run):
    """Greedy writing equals an argmax loop over the plain forward, in the order of the lines, whatever the batch."""
    import torch

    from tenuto.evaluate import load
    from tenuto.translate import write

    loaded = load(scan_run[0])
    lines = ["jump twice and walk left", "run", "look around left after walk", "jump"]
    together = write(loaded, lines, max_length=6)
    alone = write(loaded, lines, max_length=6, batch=1)
    assert together.texts == alone.texts and together.tokens == alone.tokens
    for line, text, steps in zip(lines, together.texts, together.decoder_depths, strict=True):
        ids = torch.tensor([parallel.encode_lines([line], loaded.tokenizer)[0].tolist()])
        said = [1]
        while len(said) < 7 and said[-1] != EOS:
            with torch.no_grad():
                said.append(
                    int(loaded.model(ids, decoder_input_ids=torch.tensor([said])).logits[0, -1].argmax())
                )
        assert text == loaded.tokenizer.decode([one for one in said[1:] if one != EOS])
        assert len(steps) == len(said) - 1 and steps.min() >= 1
    assert write(loaded, lines, beams=3, length_penalty=0.6, max_length=6).finished.shape == (4,)


def test_a_right_answer_counts_and_kinds_are_told_apart():
    """Exact match of a made-up outcome."""
    from tenuto.translate import exact_match

    found = exact_match(np.array([True, False, True, True]), [10, 9, 10, 9])
    assert found == {
        "exact": 75.0,
        "by_kind": {"9": {"examples": 2, "exact": 50.0}, "10": {"examples": 2, "exact": 100.0}},
    }


def test_translation_end_to_end(folder, tmp_path, monkeypatch, capsys):
    """Training by batches of tokens, resumed; BLEU with signature; lines through `tenuto translate`."""
    pytest.importorskip("sacrebleu")
    from tenuto.cli import main

    files = {"source": "train.en", "target": "train.de.gz"}
    data = {
        "folder": str(folder),
        "train": [files],
        "validation": [{**files, "limit": 8}],
        "test": {"small": {**files, "limit": 6}},
        "vocab_size": 320,
        "max_ratio": 3.0,
        "batch_tokens": 200,
        "cache": str(tmp_path / "cache"),
    }
    training = {**TINY["training"], "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    path = written(tmp_path / "pairs.yaml", data={"parallel": data}, training=training, preset="sut-tiny")
    output = str(tmp_path / "run")
    assert main(["train", str(path), "--output", output]) == 0
    (tmp_path / "run" / "training.json").unlink()
    assert main(["train", str(path), "--output", output, "--resume"]) == 0
    capsys.readouterr()
    assert main(["evaluate", output, "--beams", "2", "--json", "--result", str(tmp_path / "r.json")]) == 0
    row = json.loads(capsys.readouterr().out)["sets"]["small"]
    assert {"bleu", "split_bleu", "copy_bleu", "encoder_depth", "decoder_depth", "macs_per_token"} <= set(row)
    assert "tok:13a" in row["signature"] and "##AT##-##AT##" in row["split_signature"]
    assert json.loads((tmp_path / "r.json").read_text())["figures"]["beams"] == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("A man.\nA horse.\n"))
    assert main(["translate", output, "--threshold", "0.5", "--max_length", "5"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def test_bleu_splits_compounds_and_bootstraps_pairs():
    """Hyphens between letters come apart; the interval of a difference holds it, and is empty for equal outputs."""
    pytest.importorskip("sacrebleu")
    import sacrebleu

    from tenuto.translate import bleu, paired_bootstrap, split_compounds

    assert split_compounds("a rich-text format.") == "a rich ##AT##-##AT## text format ."
    found = bleu(GERMAN, GERMAN)
    assert found["bleu"] == found["split_bleu"] == 100.0
    assert re.match(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:", found["signature"])
    worse = [text.replace("reitet ein", "hat das") if k % 2 else text for k, text in enumerate(GERMAN)]
    result = paired_bootstrap(worse, GERMAN, GERMAN, samples=200)
    assert result["first"] == pytest.approx(sacrebleu.corpus_bleu(worse, [GERMAN]).score, abs=0.01)
    assert result["interval"][0] < result["difference"] < result["interval"][1] and result["p"] == 0.0
    same = paired_bootstrap(worse, worse, GERMAN, samples=50)
    assert same["difference"] == 0.0 and same["interval"] == [0.0, 0.0] and same["p"] == 1.0
    with pytest.raises(ValueError, match="must be alike"):
        paired_bootstrap(worse[:1], GERMAN, GERMAN)


def test_small_recipes_have_equal_parameters():
    """Transformer, UT and SUT of a task: within two percent; the figures in their comments."""
    from tenuto.presets import build, config_of

    for task, names, size in (
        ("scan", ("transformer", "ut", "sut"), 23),
        ("cogs", ("transformer", "ut", "sut"), 835),
        ("translation", ("transformer-small", "ut-small", "sut-small"), 4000),
    ):
        counts = []
        for name in names:
            path = ROOT / "recipes" / task / f"{name}.yaml"
            model = build(config_of(load_recipe(path), vocab_size=size), "text-to-text")
            counts.append(sum(p.numel() for p in model.parameters()))
            assert f"{counts[-1]:,}" in path.read_text()
        assert max(counts) / min(counts) < 1.03


def test_data_classes_are_what_a_recipe_says():
    """From Python too."""
    recipe = Recipe(preset="ut-tiny", head="text-to-text")
    recipe.data.sequences = Sequences("scan", "length", train=20, max_length=12)
    task = task_of(recipe)
    assert len(task.train) == 20 and task.validation.lengths.max() <= 13
    assert len(list(task.sampler(3, 4, 0))) == 12
    recipe.data.sequences, recipe.data.parallel = None, Parallel([Corpus("none.tsv")], [Corpus("none.tsv")])
    with pytest.raises(FileNotFoundError, match=r"no file none\.tsv"):
        task_of(recipe)


def test_bootstrap_of_several_runs_draws_a_sentence_with_all_its_outputs():
    """The slow way: draw sentences, write all runs' outputs one after another, score the text."""
    sacrebleu = pytest.importorskip("sacrebleu")

    from tenuto.translate import paired_bootstrap, paired_bootstrap_of_runs

    rng = np.random.default_rng(3)

    def spoilt(rate):
        return [" ".join("x" if rng.random() < rate else word for word in text.split(" ")) for text in GERMAN]

    firsts, seconds = [spoilt(0.5), spoilt(0.3)], [spoilt(0.2), spoilt(0.1)]
    found = paired_bootstrap_of_runs(firsts, seconds, GERMAN, samples=30, seed=5)
    draws, differences = np.random.default_rng(5), []
    for _ in range(30):
        chosen = draws.integers(len(GERMAN), size=len(GERMAN))
        scores = [
            sacrebleu.corpus_bleu(
                [said[k] for said in outputs for k in chosen], [[GERMAN[k] for _ in outputs for k in chosen]]
            ).score
            for outputs in (firsts, seconds)
        ]
        differences.append(scores[1] - scores[0])
    assert found["interval"] == np.percentile(differences, [2.5, 97.5]).round(2).tolist()
    assert found["first"] == round(sacrebleu.corpus_bleu(firsts[0] + firsts[1], [GERMAN * 2]).score, 2)
    # a system's outputs in another order are the same outputs
    assert paired_bootstrap_of_runs(firsts[::-1], seconds, GERMAN, samples=30, seed=5) == found
    alone = paired_bootstrap(firsts[0], seconds[0], GERMAN, samples=30, seed=5)
    assert alone == paired_bootstrap_of_runs([firsts[0]] * 2, [seconds[0]] * 2, GERMAN, samples=30, seed=5)
    with pytest.raises(ValueError, match="must be alike"):
        paired_bootstrap_of_runs([firsts[0], GERMAN[1:]], seconds, GERMAN)
