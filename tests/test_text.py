"""Text for causal language models: sources, the split, tokenizers, packing, the mix of topics."""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.data.text import Mix, PackedDataset, join, pack, read_corpus
from tenuto.data.text_documents import FILES, Source, held_out, read_documents
from tenuto.data.text_tokenizers import (
    BOS,
    BYTE_VOCABULARY,
    EOS,
    byte_tokenizer,
    encode_documents,
    load_tokenizer,
    train_bpe,
)

quick = settings(deadline=None, max_examples=30, derandomize=True, database=None)
# bytes of every kind, line ends that are not \n, joined and combining characters, tokens spelt out
HARD = [
    "",
    " leading and trailing  ",
    "a\r\nb\x85c\u2028d\u2029e\x0bf\n\n\n  g\t",
    "\x00\x7f\ufeffx\ufffd",
    "naïve cafe\u0301 Ω≈ç 漢字 שלום\u200f",
    "👩‍👩‍👧‍👦🏳️‍🌈\U0010ffff",
    "<bos>no<eos> <pad> token<bos>",
    "1234567 Ⅷ ½ ٣ don't I'LL",
]


@pytest.fixture(scope="module")
def tokenizers():
    sample = ["the cat sat on the mat 12 34 the cat", "she said <eos> the café — 漢字 the mat"] * 20
    return {"byte": byte_tokenizer(), "bpe": train_bpe(sample, 300)}


@pytest.fixture
def folder(tmp_path):
    for name, content in {
        "a.txt": "first\n\n \n\nsecond\nline\n\n\n",
        "sub/b.py": "x = 1\n",
        "sub/empty.py": "\n",
        "c.md": "# head",
        "picture.png": "no text",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, newline="")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("packed\r\nü".encode()))
    return tmp_path


def lines(path, *rows):
    data = "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return str(path)


def read(source, part=None):
    return [(document.name, document.text) for document in read_documents(source, part)]


# sources


def test_text_files(folder):
    assert read(str(folder)) == [
        ("a.txt", "first\n\n \n\nsecond\nline\n\n\n"),
        ("c.md", "# head"),
        ("d.txt.gz", "packed\r\nü"),
    ]
    assert read(Source(str(folder / "a.txt"), blank_lines=True)) == [
        ("a.txt:1", "first"),
        ("a.txt:2", "second\nline"),
    ]
    # a file of blanks is no document
    assert read(f"{folder}/**/*.py") == [("sub/b.py", "x = 1\n")]


def test_topic(folder):
    def topic(path, **options):
        return next(read_documents(Source(path, **options))).topic

    assert topic(f"{folder}/sub/*.py") == "sub"
    assert topic(str(folder / "d.txt.gz")) == "d"
    assert topic(str(folder), topic="letters") == "letters"
    assert topic("math") == "math"


def test_limit_counts_bytes_and_cuts_between_characters(folder):
    whole = "packed\r\nü"
    for limit in range(1, 12):
        path = str(folder / "d.txt.gz")
        (_, text), *more = read(Source(path, limit_bytes=limit))
        assert not more
        assert text == whole.encode()[:limit].decode(errors="ignore")
    texts = [text for _, text in read(Source(str(folder), limit_bytes=31))]
    assert texts == ["first\n\n \n\nsecond\nline\n\n\n", "# head", "p"]


def test_json_lines(tmp_path):
    path = lines(tmp_path / "a.jsonl.gz", {"text": "u\u2028v\x85"}, "", {"text": "w"})
    assert read(path) == [("a.jsonl.gz:1", "u\u2028v\x85"), ("a.jsonl.gz:3", "w")]
    path = lines(tmp_path / "b.jsonl", {"q": "2+2?", "a": 4, "no": None})
    assert read(Source(path, template="{q}\n{a}")) == [("b.jsonl:1", "2+2?\n4")]
    path = lines(tmp_path / "lone.jsonl", r'{"text": "a\ud800b"}')
    assert read(path) == [("lone.jsonl:1", "a?b")]


@pytest.mark.parametrize(
    "turns",
    [
        [["1", "Hello\nyou"], ["2", "Hi"]],
        [{"role": "1", "content": "Hello\nyou"}, {"content": "Hi", "role": "2"}],
        [{"from": "1", "value": "Hello\nyou"}, {"from": "2", "value": "Hi"}],
        ["1: Hello\nyou", "2: Hi"],
    ],
)
def test_dialogues(tmp_path, turns):
    path = lines(tmp_path / "talk.jsonl.gz", {"id": "x", "turns": turns})
    assert read(Source(path, field="turns")) == [("talk.jsonl.gz:1", "1: Hello\nyou\n2: Hi")]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"body": "x", "id": 1}, {}, "there is no field 'text'; the fields are body, id"),
        ({"q": "x"}, {"template": "{q}{answer}"}, "there is no field 'answer'; the fields are q"),
        ({"text": None}, {}, "expected text or a list of turns, found 'None'"),
        ({"text": [["a", "b", "c"]]}, {}, "a turn is a text, .* found .*'c'"),
        ({"text": [{"who": "a"}]}, {}, "a turn is a text"),
        ("[1]", {}, "expected an object with fields"),
        ("{'text': 1}", {}, "this is not JSON"),
    ],
)
def test_json_errors_name_file_and_line(tmp_path, row, options, message):
    good = {"text": "fine", "q": "fine", "answer": "fine"}
    path = lines(tmp_path / "bad.jsonl", good, "", row)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3: " + message):
        read(Source(path, **options))


def test_errors(folder):
    with pytest.raises(
        FileNotFoundError, match=r"no file or folder .*nowhere; shipped corpora are prose, math"
    ):
        read(str(folder / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no file that matches .*\*\.java"):
        read(f"{folder}/*.java")
    with pytest.raises(FileNotFoundError, match=r"no \.txt, \.md, \.jsonl file"):
        read(str(folder / "sub"))
    with pytest.raises(ValueError, match=r"empty\.py has no text\."):
        read(str(folder / "sub/empty.py"))
    with pytest.raises(ValueError, match="has no text in its validation part"):
        read(Source(str(folder), held_out=0), "validation")
    with pytest.raises(ValueError, match="no part 'test'"):
        read("math", "test")
    (folder / "latin.txt").write_bytes(b"caf\xe9!")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 3"):
        read(str(folder / "latin.txt"))


def test_hub_streams_a_local_file(tmp_path):
    pytest.importorskip("datasets")
    rows = [{"text": f"row {k}\u2028."} for k in range(3)]
    path = lines(tmp_path / "local.jsonl", *rows)
    found = list(read_documents(Source(f"hf:{path}", held_out=0)))
    assert found == [(f"row {k}\u2028.", "local", f"local.jsonl/train:{k + 1}") for k in range(3)]
    assert [text for _, text in read(f"hf:{tmp_path}")] == [row["text"] for row in rows]
    with pytest.raises(ValueError, match=r"local\.jsonl/train:1: there is no field 'body'"):
        read(Source(f"hf:{path}", field="body"))


def test_hub_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="hf:some/set is read with the package `datasets`; install it"):
        read("hf:some/set")


# shipped corpora and the split


@pytest.mark.parametrize("name", ["prose", "math"])
def test_shipped_files_are_the_recorded_ones(name):
    folder = FILES / name
    recorded = dict(
        reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().strip().split("\n")
    )
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.gz")}
    assert found == recorded
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.7e6


def test_changed_shipped_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "SHA256SUMS").write_text("0" * 64 + "  test.jsonl.gz\n")
    lines(tmp_path / "math" / "test.jsonl.gz", {"question": "q", "answer": "a"})
    monkeypatch.setattr("tenuto.data.text_documents.FILES", tmp_path)
    with pytest.raises(ValueError, match="is not the shipped file"):
        read("math")


def test_shipped_corpora():
    novels = {name: len(text.encode()) for name, text in read("prose", "validation")}
    assert list(novels.values()) == [691_016, 421_784]
    assert [name.split("_")[1].split(".")[0] for name, _ in read("prose", "train")] == [
        "the-adventures-of-sherlock-holmes",
        "the-adventures-of-huckleberry-finn",
    ]
    train, validation = read("math", "train"), read("math", "validation")
    assert (len(train), len(validation)) == (7_473, 1_319)
    assert train[0] == (
        "train.jsonl.gz:1",
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips "
        "did Natalia sell altogether in April and May?\nNatalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold "
        "48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72",
    )
    chapters = read(Source("prose", blank_lines=True), "validation")
    assert len(chapters) > 80
    assert {name.rsplit(":")[0] for name, _ in chapters} == set(novels)


def test_code_is_the_standard_library():
    texts = dict(read(Source("code", limit_bytes=1_500_000)))
    assert texts["argparse.py"] == (Path(json.__file__).parent.parent / "argparse.py").read_bytes().decode()
    parts = {piece for name in texts for piece in Path(name).parts[:-1]}
    assert "asyncio" in parts
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def test_every_document_is_in_one_part(tmp_path):
    path = lines(tmp_path / "many.jsonl", *({"text": str(k)} for k in range(4000)))
    train, validation = read(path, "train"), read(path, "validation")
    assert sorted(train + validation) == sorted(read(path))
    assert not set(train) & set(validation)
    # 200 expected of 4,000, standard deviation 14; the choice hangs on names alone
    assert 150 < len(validation) < 250
    assert validation == [one for one in read(path) if held_out(Source("elsewhere"), one[0])]
    every = Source(path, held_out=["many.jsonl:?", "*:4000"])
    assert [text for _, text in read(every, "validation")] == [*map(str, range(9)), "3999"]
    assert len(read(Source(path, held_out=0), "train")) == 4000
    # the hash is the same on every machine and in every version
    assert [name for name, _ in validation[:3]] == [f"many.jsonl:{number}" for number in (3, 8, 54)]


# tokenizers


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_round_trips(tokenizers, kind):
    tokenizer = tokenizers[kind]

    @quick
    @given(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(HARD))
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        (ids,) = encode_documents([text], tokenizer)
        assert ids.dtype == np.int32
        assert (ids[0], ids[-1]) == (BOS, EOS)
        # a text that spells a special token cannot end its document
        assert ids[1:-1].min(initial=9) > EOS
        assert tokenizer.decode(ids[1:-1]) == text

    check()
    for text in HARD:
        check.hypothesis.inner_test(text)


def test_byte_ids_are_bytes(tokenizers):
    every = "".join(map(chr, range(0x800))) + "漢👩\U0010ffff"
    expected = [3 + byte for byte in every.encode()]
    # bytes 0xC0, 0xC1 and 0xF5 to 0xFF occur in no UTF-8, and 0xF0 to 0xF4 need the planes above
    assert len(set(expected)) > 200
    assert tokenizers["byte"].encode(every) == expected
    (ids,) = encode_documents([every], tokenizers["byte"])
    assert ids.tolist() == [BOS, *expected, EOS]
    assert len(tokenizers["byte"]) == 259


def test_bpe_merges_words_but_not_digits(tokenizers):
    bpe = tokenizers["bpe"]
    assert bpe.encode(" the") == [bpe.convert_tokens_to_ids("Ġthe")]
    assert bpe.convert_ids_to_tokens(bpe.encode("12")) == ["1", "2"]
    sample = ["12 12 12 34"] * 5
    joined = train_bpe(sample, 300, single_digits=False)
    assert joined.convert_ids_to_tokens(joined.encode("12")) == ["12"]
    assert train_bpe(sample, 300).get_vocab() == train_bpe(sample, 300).get_vocab()
    with pytest.raises(ValueError, match="vocab_size must be at least 259, got 258"):
        train_bpe(sample, 258)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_tokenizer_saves_and_loads(tokenizers, kind, tmp_path):
    from transformers import AutoTokenizer

    tokenizers[kind].save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
        assert loaded.get_vocab() == tokenizers[kind].get_vocab()
        assert set(loaded("x")) == {"input_ids", "attention_mask"}
        for text in HARD:
            assert loaded.encode(text) == tokenizers[kind].encode(text)
            assert loaded.decode(loaded.encode(text)) == text
        first, second = (list(encode_documents(HARD, one)) for one in (loaded, tokenizers[kind]))
        assert [ids.tolist() for ids in first] == [ids.tolist() for ids in second]


def test_load_tokenizer_by_name(tmp_path):
    assert load_tokenizer("byte").get_vocab() == BYTE_VOCABULARY
    with pytest.raises(ValueError, match=r"There is no tokenizer .*nothing; say 'byte' or a folder"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_tokenizer_without_bos_and_pad_uses_its_end(tokenizers):
    foreign = train_bpe(["x"], 259)
    foreign.bos_token = foreign.pad_token = None
    (ids,) = encode_documents(["x"], foreign)
    assert (ids[0], ids[-1], len(ids)) == (EOS, EOS, 3)
    foreign.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        list(encode_documents(["x"], foreign))


def test_chunks_change_nothing(tokenizers):
    for tokenizer in tokenizers.values():
        whole, cut = list(encode_documents(HARD, tokenizer)), list(encode_documents(HARD, tokenizer, 7))
        assert [ids.tolist() for ids in whole] == [ids.tolist() for ids in cut]
        assert len(cut) == len(HARD)


# packing


def slow_pack(documents, length):
    """Token by token: (id, position, label, document) in rows."""
    stream = [
        (token, number, place == 0) for number, ids in enumerate(documents) for place, token in enumerate(ids)
    ]
    rows, row = [], []
    for token, number, begins in stream:
        if len(row) == length:
            rows, row = [*rows, row], []
        position = 0 if begins or not row else row[-1][1] + 1
        row.append((token, position, -100 if begins and row else token, number))
    for place in range(length - len(row)):
        row.append((77, place, -100, -1))
    return [*rows, row]


tokens = st.integers(3, 60)
documents = st.lists(
    st.lists(tokens, max_size=12).map(lambda ids: [1, *ids, 2]) | st.just([]), min_size=1, max_size=9
)


@quick
@given(documents.filter(any), st.integers(2, 17))
def test_packing(documents, length):
    packed = pack(documents, length, pad=77)
    arrays = (packed.input_ids, packed.position_ids, packed.labels, packed.document)
    assert [array.dtype for array in arrays] == [np.int32] * 4
    assert np.stack(arrays, -1).tolist() == [
        [list(one) for one in row] for row in slow_pack(documents, length)
    ]
    assert packed.topic.tolist() == np.where(packed.document < 0, -1, 0).tolist()
    # nothing is lost, and only the last row is filled up
    assert packed.input_ids[packed.document >= 0].tolist() == [token for ids in documents for token in ids]
    assert (packed.document[:-1] >= 0).all()
    items = [PackedDataset(packed)[row] for row in range(len(packed))]
    for name in ("input_ids", "position_ids", "labels"):
        assert [item[name].tolist() for item in items] == getattr(packed, name).tolist()
        assert str(items[0][name].dtype) == "torch.int64"
        assert set(items[0]) == {"input_ids", "position_ids", "labels"}


def test_packing_seen():
    packed = pack([[1, 5, 2], [1, 6, 7, 8, 2], [1, 2]], 4)
    assert packed.input_ids.tolist() == [[1, 5, 2, 1], [6, 7, 8, 2], [1, 2, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert packed.labels.tolist() == [[1, 5, 2, -100], [6, 7, 8, 2], [1, 2, -100, -100]]
    assert packed.document.tolist() == [[0, 0, 0, 1], [1, 1, 1, 1], [2, 2, -1, -1]]


def test_transformers_sees_the_same_boundaries():
    import torch
    from transformers.masking_utils import find_packed_sequence_indices

    packed = pack([[1, 5, 2], [1, 2], [1], [1], [1, 6, 7, 8, 9, 2], [1, 2]], 5)
    found = find_packed_sequence_indices(torch.from_numpy(packed.position_ids).long()).numpy()
    same = packed.document[:, :, None] == packed.document[:, None, :]
    assert ((found[:, :, None] == found[:, None, :]) == same).all()


def test_packing_errors():
    with pytest.raises(ValueError, match=r"at least 2 tokens.*length is 1"):
        pack([[1, 2]], 1)
    for nothing in ([], [[], []]):
        with pytest.raises(ValueError, match="The corpus is empty"):
            pack(nothing, 4)
    with pytest.raises(ValueError, match="1 document_bytes for 2 documents"):
        pack([[1], [2]], 4, document_bytes=[1])
    with pytest.raises(ValueError, match="bytes of the documents are unknown"):
        pack([[1], [2]], 4).bits_per_byte(1.0)


def corpus(folder, tokenizer, length=8, **options):
    sources = [
        Source(lines(folder / "one.jsonl", {"text": "aaaa"}, {"text": "bü"}), topic="one", held_out=0),
        Source(lines(folder / "two.jsonl", {"text": "cc" * 40}), topic="two", held_out=["two*"]),
        Source(lines(folder / "more.jsonl", {"text": "dd"}), topic="one", held_out=0),
    ]
    return read_corpus(sources, tokenizer, length, **options)


def test_corpus_rows_are_of_one_topic(tmp_path, tokenizers):
    byte = tokenizers["byte"]
    packed = corpus(tmp_path, byte)
    assert packed.topics == ("one", "two")
    assert packed.row_topic.tolist() == [0] * 2 + [1] * 11
    assert [set(row) - {-1} for row in packed.topic.tolist()] == [{0}] * 2 + [{1}] * 11
    assert packed.document_bytes.tolist() == [4, 3, 2, 80]
    # without <bos> and with <eos>: 9 + 3 tokens and 81
    assert packed.bytes_per_token() == 89 / 93
    assert packed.bytes_per_token("one") == 9 / 12
    assert packed.bits_per_byte(np.log(2) * 3, "one") == pytest.approx(4.0)
    text = byte.decode(packed.input_ids[packed.document >= 0])
    assert text == "<bos>aaaa<eos><bos>bü<eos><bos>dd<eos><bos>" + "cc" * 40 + "<eos>"
    held = corpus(tmp_path, byte, part="validation")
    assert (held.topics, len(held.document_bytes)) == (("two",), 1)
    with pytest.raises(ValueError, match=r"two\.jsonl has no text in its train part"):
        corpus(tmp_path, byte, part="train")
    with pytest.raises(ValueError, match="no source has a validation part"):
        read_corpus([Source("math", held_out=0)], byte, 8, "validation")


def test_cache_keeps_ids_by_content(tmp_path, tokenizers, monkeypatch):
    def fields(packed):
        return [np.asarray(value).tolist() for value in vars(packed).values()]

    fresh = fields(corpus(tmp_path, tokenizers["bpe"]))
    assert fields(corpus(tmp_path, tokenizers["bpe"], cache=tmp_path / "kept")) == fresh
    assert len(list((tmp_path / "kept").iterdir())) == 2
    other = fields(corpus(tmp_path, tokenizers["byte"], cache=tmp_path / "kept"))
    assert other == fields(corpus(tmp_path, tokenizers["byte"])) != fresh
    monkeypatch.setattr("tenuto.data.text.encode_documents", None)
    assert fields(corpus(tmp_path, tokenizers["bpe"], cache=tmp_path / "kept")) == fresh


# the mix


def mixed(rows=(7, 30, 3), length=2):
    parts = [pack([[1] * (count * length)], length, topic=f"t{k}") for k, count in enumerate(rows)]
    return PackedDataset(join(parts))


def test_mix_is_laid_out_by_seed_and_step():
    data = mixed()
    whole = list(Mix(data, 40, 6, seed=3))
    assert len(whole) == len(Mix(data, 40, 6, seed=3)) == 240
    assert list(Mix(data, 40, 6, seed=3)) == whole
    assert list(Mix(data, 40, 6, seed=4)) != whole
    # a longer run begins alike, and a batch can be had without those before it
    assert list(Mix(data, 55, 6, seed=3))[:240] == whole
    for step in (0, 17, 39):
        assert Mix(data, 40, 6, seed=3).rows_of(step).tolist() == whole[step * 6 : step * 6 + 6]
    sampler = Mix(data, 40, 6, seed=3)
    next(iter(sampler))
    assert list(sampler) == whole


@quick
@given(
    st.lists(st.floats(0, 5), min_size=3, max_size=3).filter(lambda weights: max(weights) > 0.01),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_mix_shares(weights, batch, seed):
    data = mixed()
    drawn = np.array(list(Mix(data, 20, batch, seed, dict(zip(("t0", "t1", "t2"), weights, strict=True)))))
    topics = data.packed.row_topic[drawn].reshape(20, batch)
    for k, weight in enumerate(weights):
        share = weight / sum(weights) * batch
        assert (abs((topics == k).sum(1) - share) < 1 + 1e-6).all()
        if weight == 0:
            assert not (topics == k).any()
        # every row of a topic once before any comes again
        rows = np.flatnonzero(data.packed.row_topic == k)
        order = drawn[topics.ravel() == k]
        seen = np.bincount(order, minlength=40)[rows]
        assert seen.max() - seen.min() <= 1


def test_mix_is_fair_when_a_batch_has_less_than_a_row_of_a_topic():
    data = mixed()
    topics = data.packed.row_topic[list(Mix(data, 2000, 1, 0, {"t0": 1, "t1": 7, "t2": 2}))]
    # standard deviations up to 20 rows
    assert abs(np.bincount(topics) - [200, 1400, 400]).max() < 90
    assert abs(np.bincount(data.packed.row_topic[list(Mix(data, 1500, 1, 0))]) - 500).max() < 90


def test_mix_order_is_shuffled():
    data = mixed()
    order = [row for row in Mix(data, 60, 1, 0, {"t1": 1})]
    assert sorted(order[:30]) == sorted(order[30:]) == list(range(7, 37))
    assert order[:30] != order[30:] != sorted(order[30:])
    assert order[:30] != sorted(order[:30])
    batch = Mix(data, 1, 12, 0).rows_of(0)
    # topics are not in blocks
    assert data.packed.row_topic[batch].tolist() != sorted(data.packed.row_topic[batch].tolist())


def test_mix_errors():
    with pytest.raises(ValueError, match="unknown topic 'poems'; the topics are t0, t1, t2"):
        Mix(mixed(), 1, 1, 0, {"poems": 1})
    for wrong in ({"t0": -1, "t1": 2}, {"t0": 0}, {}, {"t0": float("nan")}):
        with pytest.raises(ValueError, match="Weights must be 0 or more"):
            Mix(mixed(), 1, 1, 0, wrong)
