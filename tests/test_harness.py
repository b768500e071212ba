"""Language-model evaluation: shipped data, tasks of lm-eval against slow references, depth by request, perplexity."""

import gzip
import hashlib
import json
import math
import sys
from copy import deepcopy

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs tenuto[eval]")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tenuto import harness, harness_tasks
from tenuto.forward import Cost
from tenuto.models.ledger import Ledger
from tenuto.perplexity import perplexity, windows

PROMPT = """The following are multiple choice questions (with answers) about anatomy.

What is the embryological origin of the hyoid bone?
A. The first pharyngeal arch
B. The first and second pharyngeal arches
C. The second pharyngeal arch
D. The second and third pharyngeal arches
Answer: D

A lesion causing compression of the facial nerve at the stylomastoid foramen will cause ipsilateral
A. paralysis of the facial muscles.
B. paralysis of the facial muscles and loss of taste.
C. paralysis of the facial muscles, loss of taste and lacrimation.
D. paralysis of the facial muscles, loss of taste, lacrimation and decreased salivation.
Answer:"""
PARADIGMS = ("blimp_adjunct_island", "blimp_npi_present_1")


class Adaptive(LlamaForCausalLM):
    """A Llama that claims depths: a token's id decides its steps; threshold 0 stops everybody after one."""

    heard = None

    def forward(
        self, input_ids, attention_mask=None, threshold=None, min_steps=None, max_steps=None, **others
    ):
        Adaptive.heard = {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps}
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)
        mask = (
            torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        )
        depths = steps(input_ids) if threshold is None else torch.ones_like(input_ids)
        out.depths = depths * mask
        out.compute = Ledger(len(input_ids))
        out.compute.add("linear", out.depths.sum(-1), 100)
        return out


def steps(ids):
    return ids % 5 + 1


def tiny(kind):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
    )
    return kind(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny(Adaptive)


@pytest.fixture(scope="module")
def llama():
    return tiny(LlamaForCausalLM)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(bos_token="<s>", eos_token="</s>")


def byte_tokenizer(**special):
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Tokenizer(models.BPE(alphabet, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=base, **special)


def slow_score(model, context, continuation):
    """Log-probability of the continuation's ids, one forward a token."""
    total, ids = 0.0, list(context)
    for token in continuation:
        with torch.no_grad():
            total += float(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
        ids.append(token)
    return total


def test_shipped_files_are_the_recorded_ones_and_complete():
    for name, files in (("blimp", 1), ("mmlu", 3)):
        folder = harness_tasks.DATA / "files" / name
        sums = (folder / "SHA256SUMS").read_text().splitlines()
        assert len(sums) == files and (folder / "README.md").is_file()
        for line in sums:
            found, file = line.split()
            assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == found
    assert [len(pairs) for pairs in harness_tasks.blimp().values()] == [1000] * 67
    subjects = harness_tasks.mmlu("test").keys()
    for split, count in (("dev", 285), ("val", 1531), ("test", 14042)):
        parts = harness_tasks.mmlu(split)
        assert parts.keys() == subjects and len(parts) == 57
        assert sum(map(len, parts.values())) == count
    assert {len(rows) for rows in harness_tasks.mmlu("dev").values()} == {5}
    assert sorted(one for group in harness_tasks.mmlu_categories().values() for one in group) == sorted(
        subjects
    )


def test_a_changed_file_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "files" / "blimp"
    folder.mkdir(parents=True)
    (folder / "SHA256SUMS").write_text((harness_tasks.DATA / "files/blimp/SHA256SUMS").read_text())
    (folder / "blimp.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    monkeypatch.setattr(harness_tasks, "DATA", tmp_path)
    with pytest.raises(ValueError, match=r"blimp\.jsonl\.gz is not the published file"):
        harness_tasks._read.__wrapped__("blimp/blimp.jsonl.gz")


def test_blimp_equals_the_direct_comparison(llama, tokenizer):
    said = harness.evaluate_lm(llama, tokenizer, PARADIGMS, limit=4, batch_size=3, log_samples=True)
    (row,) = said["rows"]
    json.dumps(said)
    for name in PARADIGMS:
        right = []
        for place, pair in enumerate(harness_tasks.blimp()[name.removeprefix("blimp_")][:4]):
            scores = [
                slow_score(llama, [tokenizer.bos_token_id], tokenizer.encode(pair[which]))
                for which in ("sentence_good", "sentence_bad")
            ]
            sample = row["samples_by_task"][name][place]
            assert [score for score, _ in sample["filtered_resps"]] == pytest.approx(scores, abs=1e-3)
            assert sample["depth_mean"] is None and sample["macs"] is None
            right.append(scores[0] > scores[1])
        task = row["tasks"][name]
        assert task["accuracy"] == 25 * sum(right) and task["chance"] == 50 and task["samples"] == 4
    assert row["groups"] == {} and row["depth_mean"] is None and row["macs_per_token"] is None


def test_scores_equal_those_of_lm_evals_own_model(model, tokenizer):
    tasks, _ = harness_tasks.build_tasks(["mmlu_anatomy", PARADIGMS[0]], num_fewshot=0)
    requests = []
    with harness._quiet():
        for task in tasks.values():
            task.build_all_requests(limit=3)
            requests += task.instances
        theirs = HFLM(tiny(LlamaForCausalLM), tokenizer=deepcopy(tokenizer), batch_size=1)
        ours = harness.AdaptiveLM(model, tokenizer, batch_size=4)
    for (score, greedy), (expected, also) in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        assert score == pytest.approx(expected, abs=1e-3) and greedy == also


def test_ties_and_nan_are_not_right():
    assert harness_tasks._prefers_good({}, [(-1.0, False), (-2.0, False)]) == {"acc": 1.0}
    assert harness_tasks._prefers_good({}, [(-1.0, False), (-1.0, False)]) == {"acc": 0.0}
    assert harness_tasks._prefers_good({}, [(math.nan, False), (math.nan, False)]) == {"acc": 0.0}


def test_mmlu_prompt():
    tasks, _ = harness_tasks.build_tasks(["mmlu_anatomy"])
    task = tasks["mmlu_anatomy"]
    assert task.config.num_fewshot == 5
    prompt = task.fewshot_context(task.task_docs[0], 1)
    assert prompt == PROMPT
    five = task.fewshot_context(task.task_docs[0], 5)
    assert five.count("\nAnswer: ") == 5 and five.endswith("\nAnswer:")
    with harness._quiet():
        task.build_all_requests(limit=1)
    assert [request.args for request in task.instances] == [(five, f" {letter}") for letter in "ABCD"]


def test_groups_weigh_paradigms_alike_and_subjects_by_size(model, tokenizer):
    subjects = ["anatomy", "abstract_algebra"]
    with pytest.raises(ValueError, match="subjects narrow the task mmlu"):
        harness_tasks.build_tasks(["blimp"], subjects=subjects)
    tasks, groups = harness_tasks.build_tasks(["blimp", "mmlu", "mmlu_stem", "mmlu_virology"], 0, subjects)
    assert len(tasks) == 67 + 19 + 1 and list(groups) == ["blimp", "mmlu", "mmlu_stem"]
    assert groups["mmlu"].child_names == ["mmlu_anatomy", "mmlu_abstract_algebra"]
    figures = {
        name: {"acc,none": value, "acc_stderr,none": 0.1, "sample_len": size}
        for name, value, size in (("mmlu_anatomy", 0.2, 10), ("mmlu_abstract_algebra", 0.5, 20))
    }
    assert groups["mmlu"].aggregate(figures)["acc,none"] == pytest.approx(0.4)
    blimp = {
        name: {"acc,none": float(name == PARADIGMS[0]), "acc_stderr,none": 0.1, "sample_len": 1 + len(name)}
        for name in groups["blimp"].child_names
    }
    assert groups["blimp"].aggregate(blimp)["acc,none"] == pytest.approx(1 / 67)
    (row,) = harness.evaluate_lm(model, tokenizer, ["mmlu"], limit=2, num_fewshot=0, subjects=subjects)[
        "rows"
    ]
    group, parts = row["groups"]["mmlu"], row["tasks"].values()
    assert group["accuracy"] == pytest.approx(sum(part["accuracy"] for part in parts) / 2)
    assert group["chance"] == 25 and group["samples"] == 4 and group["stderr"] is not None


def test_depth_and_macs_reach_the_request_that_caused_them(model, tokenizer):
    names = [*PARADIGMS, "mmlu_anatomy"]
    said = harness.evaluate_lm(
        model, tokenizer, names, (None, 0.5), limit=5, num_fewshot=0, batch_size=4, log_samples=True
    )
    free, stopped = said["rows"]
    assert Adaptive.heard["threshold"] == 0.5
    spent, tokens = 0, 0
    for name in names:
        part = name.partition("_")[2]
        for place, sample in enumerate(free["samples_by_task"][name]):
            if name.startswith("mmlu"):
                assert sample["doc"]["question"] == harness_tasks.mmlu()[part][place]["question"]
                # the letter itself is only predicted: four requests read the same bytes
                rows = [tokenizer.encode(sample["arguments"][0][0] + " ")]
            else:
                pair = harness_tasks.blimp()[part][place]
                texts = pair["sentence_good"], pair["sentence_bad"]
                rows = [[tokenizer.bos_token_id, *tokenizer.encode(text)[:-1]] for text in texts]
            depths = torch.cat([steps(torch.tensor(row)) for row in rows])
            assert sample["tokens"] == len(depths)
            assert sample["depth_mean"] == pytest.approx(float(depths.float().mean()), abs=1e-4)
            assert sample["macs"] == 100 * int(depths.sum())
            spent, tokens = spent + sample["macs"], tokens + sample["tokens"]
    assert free["rows_run"] == 2 * 5 * 2 + 5 and free["requests"] == 2 * 5 * 2 + 5 * 4
    assert free["macs_per_token"] == spent // tokens and free["macs_per_sample"] == spent // 15
    assert stopped["depth_mean"] == 1 and stopped["macs_per_token"] == 100
    assert free["tasks"][names[0]]["accuracy"] == stopped["tasks"][names[0]]["accuracy"]


def test_requests_that_share_an_input_or_start_with_bos(model, tokenizer):
    # one input three times over, continuations of unlike lengths, and one request cut at the left
    asked = [("ab", "cd"), ("abc", "d"), ("abc", "e"), ("", "hello"), ("long" * 9, "x")]
    requests = [
        Instance("loglikelihood", {}, pair, 0, metadata=("task", place, 1))
        for place, pair in enumerate(asked)
    ]
    with harness._quiet():
        lm = harness.AdaptiveLM(model, tokenizer, batch_size=2, max_length=8)
    answers = lm.loglikelihood(requests)
    for place, ((context, continuation), (score, _)) in enumerate(zip(asked, answers, strict=True)):
        before, after = tokenizer.encode(context) or [tokenizer.bos_token_id], tokenizer.encode(continuation)
        before = before[-(9 - len(after)) :]
        assert score == pytest.approx(slow_score(model, before, after), abs=1e-4)
        read = torch.tensor([*before, *after][:-1])
        assert lm.costs["task", place, 0] == Cost(
            len(read), int(steps(read).sum()), 100 * int(steps(read).sum())
        )
    assert lm.rows == 3 and lm.truncated == 1


def test_generation_hears_the_knobs(model, tokenizer):
    with harness._quiet():
        lm = harness.AdaptiveLM(model, tokenizer, threshold=0.25, max_steps=3)
    request = Instance("generate_until", {}, ("ab", {"until": ["\n"], "max_gen_toks": 3}), 0)
    lm.generate_until([request], disable_tqdm=True)
    assert Adaptive.heard == {"threshold": 0.25, "min_steps": None, "max_steps": 3}


@pytest.mark.parametrize(("length", "stride"), [(16, 5), (16, 16), (7, 1), (512, None)])
def test_perplexity_equals_a_direct_loop(model, tokenizer, tmp_path, length, stride):
    texts = {"a.py": "def f(x):\r\n    return x\n", "b.py": "", "sub/c.py": "größe = 'ü' * 20 + 'abc'"}
    (tmp_path / "sub").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "more.txt.gz").write_bytes(gzip.compress(b"one two three four five"))
    said = perplexity(
        model, tokenizer, [tmp_path, tmp_path / "more.txt.gz"], length=length, stride=stride, batch_size=3
    )
    nats, count = 0.0, 0
    for text in (*texts.values(), "one two three four five"):
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
        last, hop = len(ids) - 1, stride or length // 2
        for place in range(1, len(ids)):
            end = length if place <= length else length + math.ceil((place - length) / hop) * hop
            nats -= slow_score(model, ids[max(0, min(end, last) - length) : place], [ids[place]])
            count += 1
    size = sum(len(text.encode()) for text in texts.values()) + 23
    assert said["tokens"] == count and said["bytes"] == size and said["files"] == 4
    assert said["nats_per_token"] == pytest.approx(nats / count, abs=1e-4)
    assert said["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-3)
    assert said["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, abs=1e-4)
    assert said["macs_per_token"] == pytest.approx(100 * said["depth_mean"], abs=1)


def test_windows_predict_every_token_once():
    for total in (1, 2, 9, 30):
        for length, stride in ((1, 1), (4, 2), (8, 8), (40, 20)):
            scored = []
            for window, new in windows(range(total + 1), length, stride):
                assert len(window) <= length + 1 and new >= 1
                scored += window[-new:]
            assert scored == list(range(1, total + 1))


def test_the_model_stays_in_its_mode_and_the_tokenizer_as_it_was(llama, tokenizer, tmp_path):
    (tmp_path / "text").write_text("abc")
    llama.train()
    perplexity(llama, tokenizer, tmp_path / "text")
    harness.evaluate_lm(llama, tokenizer, PARADIGMS[:1], limit=1)
    assert llama.training and tokenizer.pad_token is None
    llama.eval()


def test_errors_are_sentences(model, llama, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"There is no task blimp_nothing: name blimp"):
        harness.evaluate_lm(model, tokenizer, ["blimp_nothing"])
    with pytest.raises(ValueError, match=r"a list of names: \['blimp'\]"):
        harness.evaluate_lm(model, tokenizer, "blimp")
    with pytest.raises(ValueError, match="MMLU has no subject or category alchemy"):
        harness_tasks.build_tasks(["mmlu"], subjects=["alchemy"])
    with pytest.raises(ValueError, match="num_fewshot must be 0 to 5"):
        harness_tasks.build_tasks(["mmlu"], num_fewshot=6)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no knob 'threshold'"):
        harness.evaluate_lm(llama, tokenizer, PARADIGMS, thresholds=(0.5,))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no knob 'max_steps'"):
        perplexity(llama, tokenizer, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"Give thresholds=\(0.5,\)"):
        harness.evaluate_lm(model, tokenizer, PARADIGMS, threshold=0.5)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        harness.evaluate_lm(model, tokenizer, PARADIGMS, limit=0)
    with pytest.raises(ValueError, match="batch_size must be a positive whole number, not 'auto'"):
        harness.AdaptiveLM(model, tokenizer, batch_size="auto")
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        harness.AdaptiveLM(model, byte_tokenizer())
    with pytest.raises(FileNotFoundError, match=r"has no file \*\.py"):
        perplexity(model, tokenizer, tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        perplexity(model, tokenizer, tmp_path / "nowhere")
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad\.py is not UTF-8 text"):
        perplexity(model, tokenizer, tmp_path)
    (tmp_path / "bad.py").write_bytes(b"")
    with pytest.raises(ValueError, match="The files hold no text"):
        perplexity(model, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="stride 9 must be 1 to length 8"):
        perplexity(model, tokenizer, tmp_path, length=8, stride=9)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'tenuto\[eval\]'"):
        harness.evaluate_lm(model, tokenizer)
