"""Routed language models on the command line and in the report, at tiny size: figures, refusals, the page."""

import contextlib
import io
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from copy import deepcopy

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from tenuto import calibrate, harness
from tenuto.cli import main
from tenuto.evaluate import load
from tenuto.forward import check_knobs, run
from tenuto.language import corpus_of, measure, realised
from tenuto.language_sweep import halves
from tenuto.routed_depths import says
from tenuto.routed_page import _verdict, measure_routed, routed_page
from tenuto.shift import shift, shift_of

TEXT = {
    "sources": [{"path": "prose", "limit_bytes": 60000, "blank_lines": True},
                {"path": "math", "limit_bytes": 60000}],
    "tokenizer": "byte",
    "length": 48,
    "validation_rows": 12,
}  # fmt: skip
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 0.01, "logging_steps": 1}


def train(folder, kind, steps=12, **more):
    training = {**TRAINING, "max_steps": steps}
    recipe = {
        "preset": f"{kind}-tiny",
        "head": "causal",
        "data": {"text": TEXT},
        "training": training,
        **more,
    }
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(folder / f"{kind}.yaml"), "--output", str(folder / kind)]) == 0
    return folder / kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("routed")


@pytest.fixture(scope="module")
def sdt(folder):
    return train(folder, "sdt")


@pytest.fixture(scope="module")
def stt(folder):
    return train(folder, "stt", 6)


@pytest.fixture(scope="module")
def fresh(folder):
    """As `tenuto convert` leaves it: no recipe, no levels."""
    from tenuto.data.text_tokenizers import byte_tokenizer
    from tenuto.presets import build, preset

    torch.manual_seed(0)
    build(preset("sdt-tiny", vocab_size=259), "causal").save_pretrained(folder / "fresh")
    byte_tokenizer().save_pretrained(folder / "fresh")
    return folder / "fresh"


@pytest.fixture(scope="module")
def looped(folder):
    """Its config alone: what is refused is refused before anything is loaded."""
    (folder / "looped").mkdir()
    config = {
        "architectures": ["LoopedForCausalLM"],
        "model_type": "tenuto_looped",
        "num_loops": 4,
        "policy": "act",
    }
    (folder / "looped" / "config.json").write_text(json.dumps(config))
    return folder / "looped"


@pytest.fixture
def copy(sdt, tmp_path):
    return shutil.copytree(sdt, tmp_path / "copy")


@pytest.fixture(scope="module")
def texts(folder):
    random = np.random.default_rng(0)
    words = "the of and a to in he was that it his her with as had for she not at but".split()
    paths = []
    for name in ("one", "two"):
        paths.append(folder / f"{name}.txt")
        paths[-1].write_text(" ".join(random.choice(words, 500)))
    return paths


def answer(capsys, *words):
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def shown(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def refusal(capsys, code, *words):
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"tenuto: [^\n]+\n", err), err
    return err


def test_evaluate_counts_layers(sdt, capsys):
    figures = answer(capsys, "evaluate", sdt, "--capacity", 0.25)
    loaded = load(sdt)
    said = measure(loaded.model, corpus_of(loaded), capacity=0.25)
    assert figures["loss"] == round(said.loss, 4) and figures["mean_depth"] == round(said.mean_depth, 3)
    # four layers, of them routed 1 and 3
    assert figures["capacity_realised"] == pytest.approx((said.mean_depth - 2) / 2, abs=1e-3)
    assert figures["routed_layers"] == [1, 3] and figures["knobs"] == {"capacity": 0.25}
    assert all(0 <= row["capacity_realised"] <= 1 for row in figures["by_group"].values())
    for words, share in (
        (("--selection", "dense"), 1),
        (("--threshold", -1), 1),
        (("--threshold", 2), 0),
        (("--capacity", 0.5, "--selection", "topk"), 0.5),
    ):
        assert answer(capsys, "evaluate", sdt, *words)["capacity_realised"] == share
    table = shown(capsys, "evaluate", sdt, "--selection", "running")
    assert "layers/token" in table and "realised capacity" in table and "routed layers [1, 3]" in table
    assert "loops" not in table


def test_knobs_of_the_other_kind_are_refused(sdt, looped, capsys):
    for verb in ("evaluate", "depths"):
        for name in ("max_steps", "min_steps"):
            said = refusal(capsys, 1, verb, sdt, f"--{name}", 2)
            assert (
                f"routes tokens by capacity, so --{name} has nothing to set" in said and "--capacity" in said
            )
        for flag, value in (("capacity", 0.5), ("selection", "dense")):
            said = refusal(capsys, 1, verb, looped, f"--{flag}", value)
            assert f"has no routed layers, so --{flag} has nothing to set" in said and "--threshold" in said
    assert "--policy has nothing" in refusal(capsys, 1, "evaluate", sdt, "--policy", "margin")
    assert "--policy has nothing" in refusal(capsys, 1, "generate", sdt, "--policy", "margin")
    assert "--thresholds has nothing" in refusal(
        capsys, 1, "evaluate", sdt, "--tasks", "blimp", "--thresholds", 1
    )
    assert "--capacities has nothing" in refusal(
        capsys, 1, "evaluate", looped, "--files", "x", "--capacities", 1
    )
    assert "--capacity has nothing" in refusal(capsys, 1, "generate", looped, "--capacity", 1)
    assert "--max_steps has nothing" in refusal(capsys, 1, "calibrate", sdt, "--max_steps", 50)
    assert "--files has nothing" in refusal(capsys, 1, "calibrate", looped, "--files", "x")
    assert "--errors goes with checkpoints of logical inference" in refusal(
        capsys, 2, "evaluate", looped, "--errors"
    )


def test_senseless_knobs_are_refused(sdt, capsys):
    assert "capacity 1.5 lies outside 0..1" in refusal(capsys, 1, "evaluate", sdt, "--capacity", 1.5)
    for selection in ("best", "calibrate"):
        said = refusal(capsys, 1, "evaluate", sdt, "--selection", selection)
        assert f"--selection {selection} is none of threshold, running, topk, dense" in said
    for more in (("--capacity", 0.5), ("--selection", "running")):
        assert "leave one of them out" in refusal(capsys, 1, "evaluate", sdt, "--threshold", 0.5, *more)
    assert "without them `tenuto sweep`" in refusal(capsys, 2, "evaluate", sdt, "--capacities", "0.5")
    assert "the tasks take --capacities" in refusal(
        capsys, 2, "evaluate", sdt, "--tasks", "blimp", "--capacity", 1
    )
    both = ("--files", "x", "--capacities", "0.5", "--capacity", 0.5)
    assert "several of --capacity" in refusal(capsys, 2, "evaluate", sdt, *both)
    said = refusal(capsys, 1, "evaluate", sdt, "--files", "x", "--capacities", "0.5,2")
    assert "capacity 2 lies outside" in said
    assert "cannot write one" in refusal(capsys, 1, "generate", sdt, "--selection", "topk")
    assert "--save goes with --max_loss" in refusal(capsys, 2, "calibrate", sdt, "--save")
    for flag in (("--rules",), ("--picture", "x.svg")):
        assert "is for looped models" in refusal(capsys, 2, "depths", sdt, *flag)
    with pytest.raises(ValueError, match="no halting threshold"):
        calibrate.calibrate(sdt, 1.0)


def test_evaluate_files_at_several_capacities(sdt, fresh, texts, capsys):
    rows = answer(capsys, "evaluate", sdt, "--files", texts[0], "--capacities", "0.25,1")["rows"]
    assert [row["capacity"] for row in rows] == [0.25, 1] and rows[1]["capacity_realised"] == 1
    assert rows[0]["capacity_realised"] == pytest.approx((rows[0]["depth_mean"] - 2) / 2, abs=1e-3)
    assert rows[0]["macs_per_token"] < rows[1]["macs_per_token"]
    one = answer(capsys, "evaluate", sdt, "--files", texts[0], "--capacity", 0.25)
    assert one["nats_per_token"] == rows[0]["nats_per_token"]
    # nothing calibrated it
    assert answer(capsys, "evaluate", fresh, "--files", texts[0], "--selection", "dense")["depth_mean"] == 4
    assert "tenuto calibrate" in refusal(capsys, 1, "evaluate", fresh, "--files", texts[0])


def test_a_request_is_billed_for_the_layers_it_ran(sdt):
    loaded, rows = load(sdt), [[1, 40, 50, 60, 70], [1, 90, 80]]
    _, costs, _ = run(loaded.model, rows, {"capacity": 0.5, "selection": "topk"})
    # two layers for every token; two of five tokens, one of three in each of the two others
    assert [cost.steps for cost in costs] == [2 * 5 + 2 * 2, 2 * 3 + 2 * 1]
    assert costs[0].macs > costs[1].macs > 0
    assert realised(loaded.model.config, 3.0) == 0.5
    for knob, kind in (("max_steps", "SDTForCausalLM has no knob 'max_steps'; its knobs are capacity"),):
        with pytest.raises(ValueError, match=kind):
            check_knobs(loaded.model, {knob: 2})
    with pytest.raises(ValueError, match="in place of capacity"):
        harness.evaluate_lm(loaded.model, loaded.tokenizer, capacity=0.5)


def test_tasks_at_several_capacities(sdt, capsys):
    pytest.importorskip("lm_eval")
    words = ("--tasks", "blimp_adjunct_island", "--limit", 3, "--capacities", "0.25,1")
    rows = answer(capsys, "evaluate", sdt, *words)["rows"]
    assert [row["capacity"] for row in rows] == [0.25, 1] and rows[1]["capacity_realised"] == 1
    assert rows[0]["depth_mean"] < rows[1]["depth_mean"] == 4 and "threshold" not in rows[0]


def test_generate_colours_by_layers(sdt, capsys):
    from tenuto.written import coloured, legend, write

    said = answer(capsys, "generate", sdt, "--prompt", "It was", "--tokens", 6, "--capacity", 0.5)
    assert said["unit"] == "layers" and (said["floor"], said["full"]) == (2, 4) and said["prompt"] == 6
    assert said["text"].startswith("It was") and all(2 <= step <= 4 for step in said["steps"])
    assert said["capacity"] == 0.5 and said["selection"] == "threshold" and said["threshold"] is None
    loaded = load(sdt)
    for knobs, setting in (
        ({}, "capacity 0.5"),
        ({"selection": "running", "capacity": 0.3}, "capacity 0.3, selection running"),
        ({"threshold": 0.9}, "threshold 0.9"),
        ({"selection": "dense"}, "selection dense"),
    ):
        one = write(loaded.model, loaded.tokenizer, "He said", 4, **knobs)
        assert one.setting == setting and len(coloured(one).plain) == len("".join(one.tokens))
    assert one.mean_depth == 4
    assert legend(4, "layers", 2).plain == "layers  2  3  4 "
    assert "layers per token at capacity 0.5" in shown(capsys, "generate", sdt, "--tokens", 2)


def test_depths_say_which_tokens_the_layers_take(sdt, capsys):
    figures = answer(capsys, "depths", sdt, "--capacity", 1)
    assert figures["share"] == 1 and set(figures["by_topic"]) == {"prose", "math"}
    for part in ("by_kind", "by_position"):
        assert sum(row["tokens"] for row in figures[part].values()) == figures["tokens"]
    assert "share of the routed layers run" in shown(capsys, "depths", sdt)


def test_says_compares_groups_that_are_not_small():
    def group(mean, interval, tokens=100):
        return {"mean": mean, "interval": interval, "tokens": tokens}

    rows = {"a": group(0.6, [0.55, 0.65]), "b": group(0.4, [0.35, 0.45]), "c": group(1.0, [1, 1], 1)}
    assert says(rows) == "The layers run most for “a” (60.0%), least for “b” (40.0%)."
    assert "overlap" in says({"a": group(0.6, [0.4, 0.8]), "b": group(0.5, [0.3, 0.7])})
    assert "one group only" in says({"a": group(0.6, [0.4, 0.8]), "c": group(1.0, [1, 1], 1)})


@pytest.mark.parametrize("source", ("files", "recipe"))
def test_calibrate_sets_levels_and_nothing_else(source, copy, texts, capsys):
    before = load_file(copy / "model.safetensors")
    more = ("--files", ",".join(map(str, texts))) if source == "files" else ()
    if source == "recipe":
        # levels of nothing
        loaded = load(copy)
        for router in loaded.model.routers().values():
            router.levels.fill_(float("nan"))
        calibrate.write_levels(loaded)
        assert load_file(copy / "model.safetensors")["stack.routers.1.levels"].isnan().all()
    figures = answer(capsys, "calibrate", copy, *more)
    after = load_file(copy / "model.safetensors")
    assert set(after) == set(before) and not list(copy.glob("*.part"))
    for name, one in after.items():
        same = torch.equal(one, before[name])
        assert same == (source == "recipe" or not name.endswith(".levels")), name
    with safe_open(copy / "model.safetensors", "pt") as kept:
        assert kept.metadata() == {"format": "pt"}
    assert [row["capacity"] for row in figures["rows"]] == [0.25, 0.5, 0.75, 0.9]
    for row in figures["rows"]:
        assert set(row["layers"]) == {"1", "3"}
        assert row["realised"] == pytest.approx(np.mean(list(row["layers"].values())), abs=1e-4)
        assert row["realised"] == pytest.approx(row["capacity"], abs=0.15)
    assert ("two.txt" in figures["levels_from"]) == (source == "files")
    if source == "files":
        table = shown(capsys, "calibrate", copy, *more, "--limit", 1)
        assert "asked 0.75" in table and "judged on 512 held-out tokens" in table


def test_a_converted_model_is_calibrated_on_the_shipped_novels(fresh, tmp_path, capsys, monkeypatch):
    assert calibrate.TOKENS <= 25_000
    monkeypatch.setattr(calibrate, "TOKENS", 2048)
    copy = shutil.copytree(fresh, tmp_path / "copy")
    figures = answer(capsys, "calibrate", copy, "--limit", 2)
    assert figures["levels_from"] == "2,048 tokens of the shipped novels"
    assert figures["held_out_tokens"] == 2 * 512
    answer(capsys, "generate", copy, "--tokens", 2)


def test_calibrate_refuses_what_is_too_little_and_writes_whole_files(
    copy, fresh, texts, tmp_path, capsys, monkeypatch
):
    short = tmp_path / "short.txt"
    short.write_text("a word or two")
    assert "tokens are too few" in refusal(capsys, 1, "calibrate", copy, "--files", short)
    assert "There is no file" in refusal(capsys, 1, "calibrate", copy, "--files", tmp_path / "none.txt")
    before = (copy / "model.safetensors").read_bytes()

    def full(tensors, path, notes):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert "no space left" in refusal(capsys, 1, "calibrate", copy, "--files", texts[0])
    assert (copy / "model.safetensors").read_bytes() == before
    one = ("--files", texts[0], "--max_loss", 5)
    assert "too few documents to be cut in two" in refusal(capsys, 1, "calibrate", copy, *one)
    both = ",".join(map(str, texts))
    # uncalibrated, there is no capacity to try
    assert "tenuto calibrate" in refusal(capsys, 1, "calibrate", fresh, "--files", both, "--max_loss", 5)


def test_calibrate_finds_the_smallest_capacity(copy, texts, capsys):
    figures = answer(capsys, "calibrate", copy, "--max_loss", 1, "--save")
    saved = json.loads((copy / "config.json").read_text())["capacity"]
    loaded = load(copy)
    corpus = corpus_of(loaded)
    fit, test = (calibrate.only_rows(corpus, rows) for rows in halves(corpus))
    whole = {
        name: measure(loaded.model, fit, **knobs).loss
        for name, knobs in (("dense", {"selection": "dense"}), ("capacity 1", {"capacity": 1.0}))
    }
    most = 1.01 * min(whole.values())
    assert figures["against"] == min(whole, key=whole.get)

    def loss(capacity):
        return measure(loaded.model, fit, capacity=capacity).loss

    assert figures["found"] == (loss(1.0) <= most) and figures["saved"] == figures["found"]
    if figures["found"]:
        assert saved == figures["capacity"] and loss(figures["capacity"]) <= most + 1e-6
    dense, said = (
        measure(loaded.model, test, **one)
        for one in (calibrate.WHOLE[figures["against"]], {"capacity": figures["capacity"]})
    )
    assert figures["loss_percent"] == pytest.approx(100 * (said.loss / dense.loss - 1), abs=2e-3)
    assert figures["macs_percent"] == pytest.approx(100 * said.macs / dense.macs, abs=0.01)
    both = ",".join(map(str, texts))
    wide = answer(capsys, "calibrate", copy, "--max_loss", 500, "--save", "--files", both)
    assert wide["found"] and wide["capacity"] < 0.01 and wide["met"] and wide["kv_percent"] < 100
    assert json.loads((copy / "config.json").read_text())["capacity"] == wide["capacity"]
    none = answer(capsys, "calibrate", copy, "--max_loss", -50, "--save")
    assert not none["found"] and not none["saved"] and none["capacity"] == 1
    assert json.loads((copy / "config.json").read_text())["capacity"] == wide["capacity"]
    assert "No capacity stays within -50% of the loss with every token in every layer" in shown(
        capsys, "calibrate", copy, "--max_loss", -50
    )


def history_of(gaps, layers=(1, 3)):
    """Logs in which S_CU - S_CE is gaps [N], at steps 10, 20, ..."""
    return [
        {"step": 10 * number, "loss": 1.0, **{f"layer/{layer}.{sign}": value for layer in layers
                                              for sign, value in (("s_ce", 0.5), ("s_cu", 0.5 + gap))}}
        for number, gap in enumerate(gaps, 1)
    ]  # fmt: skip


def test_the_shift_is_found_where_it_is():
    gaps = np.linspace(0.1, -0.1, 100)
    noise = 0.02 * np.random.default_rng(0).normal(size=100)
    for added in (0, noise):
        found = shift(history_of(gaps + added))
        for one in (found["overall"], *found["layers"].values()):
            assert one["shift"] and one["crossover"] == pytest.approx(500, abs=100)
            assert one["first"]["difference"] == pytest.approx(0.091, abs=0.02)
            assert one["last"]["difference"] == pytest.approx(-0.091, abs=0.02)
    clean = shift_of(*zip(*[(10 * n, 0.5, 0.5 + gap) for n, gap in enumerate(gaps, 1)], strict=True))
    assert clean == found["overall"] | clean and clean["first"]["s_cu"] == pytest.approx(0.5909, abs=1e-4)


@pytest.mark.parametrize(
    "gaps",
    (
        np.linspace(-0.1, 0.1, 100),
        np.linspace(0.2, 0.05, 100),
        np.linspace(-0.01, -0.1, 100),
        np.zeros(100),
        0.05 * np.random.default_rng(1).normal(size=100),
        # above and below zero, by less than it scatters
        np.linspace(0.005, -0.005, 100) + 0.1 * np.random.default_rng(2).normal(size=100),
    ),
    ids=("backward", "always above", "always below", "flat", "noise", "hidden in noise"),
)
def test_no_shift_where_there_is_none(gaps):
    found = shift(history_of(gaps))
    assert not found["overall"]["shift"] and found["overall"]["crossover"] is None
    assert not any(one["shift"] for one in found["layers"].values())


def test_the_shift_of_each_layer_is_its_own():
    up, down = np.linspace(-0.1, 0.1, 50), np.linspace(0.1, -0.2, 50)
    rows = [one | other for one, other in zip(history_of(up, [1]), history_of(down, [11]), strict=True)]
    found = shift([*rows, {"step": 500, "eval_loss": 3.0}])
    assert [name for name, one in found["layers"].items() if one["shift"]] == ["11"]
    assert found["overall"]["first"]["difference"] == pytest.approx(0.0, abs=0.01)
    assert shift(rows[:4]) is None and shift([{"step": 1, "layer/1.gate": 0.5}]) is None and shift([]) is None


def well_formed(html):
    """Every picture is XML, every table has rows of one width, tags are balanced, nothing is fetched or run."""
    assert not re.search(r"https?://|<script|<link|@import|src=|url\((?!#)", html)
    assert not re.search(r"\bnan\b|\binf\b|None|loops", html)
    pictures = re.findall(r"<svg.*?</svg>", html, re.S)
    for svg in pictures:
        ElementTree.fromstring(svg.replace("xlink:", ""))
    for table in re.findall(r"<table>.*?</table>", html, re.S):
        rows = [len(row.findall("*")) for row in ElementTree.fromstring(table).iter("tr")]
        assert len(rows) > 1 and len(set(rows)) == 1
    for tag in ("section", "div", "figure", "p", "span", "dl", "table"):
        assert len(re.findall(rf"<{tag}[ >]", html)) == html.count(f"</{tag}>"), tag
    return pictures


@pytest.fixture(scope="module")
def report(sdt):
    """The figures and the page of an SDT."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert (
            main(["report", str(sdt), "-o", str(sdt.parent / "page" / "sdt.html"), "--limit", "8", "--json"])
            == 0
        )
    return json.loads(out.getvalue()), (sdt.parent / "page" / "sdt.html").read_text()


def test_report_of_an_sdt(report):
    figures, html = report
    pictures = well_formed(html)
    # training loss; surprise and gate of two layers; the knob
    assert len(pictures) == 6 and "prefers-color-scheme" in html and "layer 3" in html
    assert {(row["selection"], row.get("capacity")) for row in figures["knob"]["rows"]} == {
        ("dense", None), *((rule, one) for rule in ("threshold", "running", "topk") for one in (0.25, 0.5, 0.75, 0.9))
    }  # fmt: skip
    for row in figures["knob"]["rows"]:
        assert f"<td>{row['loss']:.4f}</td><td>" in html
    one = figures["shift"]["overall"]
    assert f"{one['first']['difference']:+.4f}" in html and set(figures["shift"]["layers"]) == {"1", "3"}
    for part in ("by_topic", "by_kind", "by_frequency", "by_position"):
        assert figures["executed"]["says"][part] in html
    assert [one["topic"] for one in figures["read"]] == ["prose", "math"] and len(figures["written"]) == 3
    assert figures["own"]["layers_per_token"] == pytest.approx(
        2 + sum(figures["own"]["layers"].values()), abs=2e-3
    )
    for layer, one in figures["routers"].items():
        assert "router" not in one and f"{100 * one['alike']:.1f}" in html, layer


def test_the_page_says_what_the_figures_say(report):
    figures, before = report
    changed = deepcopy(figures)
    changed["own"] |= {"loss": 7.654, "capacity_realised": 0.1237}
    changed["routers"]["1"] |= {"alike": 0.4321, "beats": False}
    changed["routers"]["3"] |= {"beats": True}
    # many layers, few logs
    many = history_of(np.linspace(0.1, -0.1, 20), range(1, 25, 2))
    changed |= {"history": many, "shift": shift(many)}
    html = routed_page(changed)
    texts = ("7.654 nats", "0.124", "Found, over the mean of the layers", "They cross at step 1", "in 12 of 12 (1, 3,",
             "43.2", "always: layer 1.")  # fmt: skip
    for text in texts:
        assert text in html and text not in before, text
    assert len(well_formed(html)) == 12 + 2
    above = shift(history_of(np.linspace(0.2, 0.1, 100)))
    assert "S_CU is not below S_CE in the last tenth (+0.1" in _verdict(above) and "in none" in _verdict(
        above
    )


def test_report_of_an_stt_names_its_router(stt):
    figures = measure_routed(stt, 8, ["He"])
    html = routed_page(figures)
    well_formed(html)
    weak = []
    for layer, one in figures["routers"].items():
        # by two standard errors of a few hundred tokens, or not
        lead = one["router"] - one["router_majority"]
        assert lead > 0 if one["beats"] else lead < 0.1
        weak += [] if one["beats"] else [layer]
    assert "majority rate</span>" in html and "dearer than dense" in html
    assert "router right %" in html and "How the choice went in training" in html
    assert (f"layer{'s' * (len(weak) > 1)} {', '.join(weak)}." in html) == bool(weak)


def test_report_of_a_mod_has_no_surprise_to_test(folder):
    figures = measure_routed(train(folder, "mod", 2), 4, [])
    html = routed_page(figures)
    well_formed(html)
    assert figures["shift"] is None and "Mixture-of-Depths has none" in html


def test_lora_takes_low_rank_steps_and_leaves_an_ordinary_checkpoint(sdt, folder, tmp_path, capsys):
    """Block matrices move by rank r, routers in full, all else stays; no adapter is left in what is saved."""
    before = load_file(sdt / "model.safetensors")
    run = train(tmp_path, "sdt", 3, start=str(sdt), lora={"r": 2, "lora_alpha": 4})
    after, moved = load_file(run / "model.safetensors"), set()
    assert set(after) == set(before)
    for name, weight in after.items():
        step = weight - before[name]
        if not step.any():
            continue
        moved.add(name)
        if ".routers." in name:
            continue
        assert ".attention." in name or ".feed_forward." in name, name
        for matrix in step.flatten(0, -3) if step.dim() > 2 else [step]:
            values = torch.linalg.svdvals(matrix.double())
            assert values[2:].max() < 1e-5 * values[0], name
    assert any(".surprise." in name for name in moved) and any(".prior." in name for name in moved)
    matrices = {
        name for name in before if re.search(r"blocks\.\d+\.(attention|feed_forward)\.\w+\.weight", name)
    }
    assert matrices and matrices <= moved and "embed_tokens.weight" not in moved
    assert answer(capsys, "evaluate", run)["loss"] > 0


# rows of `tenuto compare`


@pytest.fixture(scope="module")
def compared(folder, stt):
    """A plan of four rows, two seeds, and what came of it."""
    from tenuto.compare import run_comparison

    base = yaml.safe_load((stt.parent / "stt.yaml").read_text())
    base["training"]["max_steps"] = 6
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    plan = {
        "base": str(folder / "base.yaml"),
        "against": "every token",
        "seeds": [0, 1],
        "capacities": [0.25],
        "rows": {
            "every token": {
                "preset": "mod-tiny",
                "config": {"capacity": 1.0, "scale": "none"},
                "seeds": [0, 1],
            },
            "stt": {},
            "random": {"preset": "sdt-tiny", "config": {"score": "random"}, "seeds": [1]},
        },
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return run_comparison(folder / "plan.yaml", folder / "rows"), folder / "rows"


def test_comparison_of_routed_rows(compared):
    """Every rule and capacity by `measure`, differences seed by seed, shares of the dense model's bytes."""
    figures, output = compared
    rows = {row["row"]: row for row in figures["rows"]}
    cells = {(one["row"], one["seed"]): one for one in figures["results"]}
    assert figures["done"] == 5 and json.loads((output / "table.json").read_text()) == figures
    loaded = load(output / "stt-1")
    corpus, cell = corpus_of(loaded), cells["stt", 1]
    assert {(one["selection"], one["capacity"]) for one in cell["rules"]} == {
        ("threshold", 0.5), ("running", 0.5), ("topk", 0.5), ("dense", 1.0), ("threshold", 0.25)
    }  # fmt: skip
    said = {}
    for one in cell["rules"]:
        knobs = {"selection": one["selection"]}
        if one["selection"] != "dense":
            knobs["capacity"] = one["capacity"]
        said[one["selection"], one["capacity"]] = found = measure(loaded.model, corpus, **knobs)
        assert one["loss"] == pytest.approx(found.loss, abs=1e-4)
        tokens = int((found.depths > 0).sum())
        assert one["kv_bytes_per_token"] == pytest.approx(int(found.row_kv_bytes.sum()) / tokens, abs=0.1)
        assert one["macs_per_token"] == pytest.approx(found.macs / tokens, abs=1)
        assert one["realised"] == realised(loaded.model.config, found.mean_depth)
    losses = {seed: [cells[row, seed]["loss"] for row in ("stt", "every token")] for seed in (0, 1)}
    gaps = [ours - theirs for ours, theirs in losses.values()]
    assert rows["stt"]["loss"] == pytest.approx(np.mean([ours for ours, _ in losses.values()]), abs=1e-4)
    assert rows["stt"]["minus_against"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert rows["stt"]["minus_against_spread"] == pytest.approx(np.std(gaps, ddof=1), abs=1e-4)
    assert rows["random"]["seeds"] == 1 and rows["random"]["loss_spread"] is None
    assert rows["random"]["minus_against"] == pytest.approx(
        cells["random", 1]["loss"] - cells["every token", 1]["loss"], abs=1e-4
    )
    own, top, dense = (said[key] for key in (("threshold", 0.5), ("topk", 0.5), ("dense", 1.0)))
    over = [
        100 * (by["threshold", 0.5] / by["topk", 0.5] - 1)
        for by in (
            {(one["selection"], one["capacity"]): one["loss"] for one in cells["stt", seed]["rules"]}
            for seed in (0, 1)
        )
    ]
    assert over[1] == pytest.approx(100 * (own.loss / top.loss - 1), abs=0.01)
    assert rows["stt"]["over_topk_percent"] == pytest.approx(np.mean(over), abs=0.01)
    kv = own.row_kv_bytes.sum() / dense.row_kv_bytes.sum()
    assert rows["stt"]["kv_share"] == pytest.approx(float(kv), abs=0.03)
    assert rows["every token"]["realised"] == 1.0 and rows["every token"]["kv_share"] == 1.0


def test_routers_and_shift_of_compared_rows(compared):
    """Only a trained causal router is held against the majority; surprise shifts where it is logged."""
    from tenuto.compare import agreement

    figures, output = compared
    cells = {(one["row"], one["seed"]): one for one in figures["results"]}
    loaded = load(output / "stt-0")
    corpus = corpus_of(loaded)
    causal, top = (measure(loaded.model, corpus, selection=rule).executed for rule in ("threshold", "topk"))
    want = agreement(loaded.model, corpus, causal)
    assert cells["stt", 0]["routers"] == want and set(want) == {"1", "3"}
    for layer, row in want.items():
        alike = (causal[:, int(layer)] == top[:, int(layer)]).mean()
        assert row["alike"] == pytest.approx(alike, abs=1e-4)
        assert row["beats"] == (row["router"] > row["router_majority"] + 1 / len(causal) ** 0.5)
    assert all("beats" not in row for row in cells["random", 1]["routers"].values())
    assert cells["every token", 0]["shift"] is None
    history = json.loads((output / "stt-0" / "training.json").read_text())["history"]
    assert cells["stt", 0]["shift"] == shift(history)["overall"]
