"""Every verb end to end at tiny size: what it prints, what it writes, how it fails."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tenuto.cli import main

RECIPE = {
    "preset": "sut-tiny",
    "config": {"num_loops": 3, "num_decoder_loops": 3, "halt_bias": -1.0},
    "data": {"max_operators": 1},
    "training": {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "learning_rate": 1.0e-3,
        "logging_steps": 2,
        "save_steps": 3,
    },
}


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `tenuto WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def parsed(*words: object):
    """What `tenuto WORDS --json` prints."""
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def sentence(*words: object) -> str:
    """The one line on stderr of a failing command."""
    code, out, err = run(*words)
    assert code == 1 and out == ""
    assert re.fullmatch(r"tenuto: [^\n]+\n", err), err
    return err.removeprefix("tenuto: ").strip()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module", autouse=True)
def short_sets():
    """The protocol with a few pairs of every set: the data itself has tests of its own."""
    from tenuto import demo, evaluate, tasks
    from tenuto.data import logical_inference

    whole = logical_inference.protocol("length")
    few = logical_inference.Protocol(
        "length",
        [one for one in whole.train if one.operators <= 1],
        whole.validation[::100],
        {name: pairs[:12] for name, pairs in whole.test.items()},
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluate, tasks, logical_inference):
            patch.setattr(module, "protocol", lambda name: few)
        patch.setattr(demo, "THRESHOLDS", (0.5,))
        yield


@pytest.fixture(scope="module")
def checkpoint(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    result = folder.parent / "results" / "tiny.json"
    code, out, err = run("train", recipe, "--output", folder, "--result", result, "--training.seed=3")
    assert code == 0, err
    assert "validation accuracy" in out and str(folder) in out
    assert "step 2/6" in err and "{" not in err
    return folder


def test_flags_of_other_checkpoints_are_refused(checkpoint):
    for flag, value in (("tasks", "blimp"), ("capacities", 0.5), ("policy", "margin"), ("limit", 3)):
        code, _, err = run("evaluate", checkpoint, f"--{flag}", value)
        assert code == 2 and f"--{flag} goes with language models" in err
    code, _, err = run("evaluate", checkpoint, "--beams", 2)
    assert code == 2 and "--beams goes with checkpoints trained on sequences" in err


@pytest.fixture(scope="module")
def fixed(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fixed"
    plain = recipe.parent / "plain.yaml"
    plain.write_text(
        yaml.safe_dump({**RECIPE, "preset": "transformer-tiny", "config": {}, "head": "text-to-text"})
    )
    code, _, err = run("train", plain, "--output", folder, "--training.max_steps=2")
    assert code == 0, err
    return folder


def test_help_is_light_and_has_examples():
    verbs = (
        "train",
        "evaluate",
        "sweep",
        "depths",
        "convert",
        "compare",
        "calibrate",
        "generate",
        "translate",
        "average",
        "experts",
        "presets",
        "report",
        "demo",
    )
    program = (
        "import contextlib, io, sys\nfrom tenuto.cli import main\n"
        f"for words in ([], *([verb] for verb in {verbs})):\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        assert main([*words, '--help']) == 0\n"
        "    last = out.getvalue().rstrip().splitlines()[-1]\n"
        "    assert last.startswith('  tenuto ' + ''.join(words)), words\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    module = [sys.executable, "-m", "tenuto", "--version"]
    assert subprocess.run(module, check=True, capture_output=True, text=True).stdout.strip().endswith("0.1.0")


def test_train_writes_a_result(checkpoint, recipe):
    for path in (checkpoint.parent / "results" / "tiny.json", checkpoint / "result.json"):
        result = json.loads(path.read_text())
        assert {"recipe", "command", "seed", "commit", "hardware", "seconds", "figures"} <= set(result)
        assert result["command"].startswith(f"tenuto train {recipe} --output") and result["seed"] == 3
        assert result["settings"]["training"]["seed"] == 3
    assert "validation" in result["figures"]["accuracy"]


def test_print_config(recipe):
    code, out, _ = run(
        "train", recipe, "--print_config", "--config.hidden_size", 48, "--data.max_operators=2"
    )
    shown = yaml.safe_load(out)
    assert code == 0
    assert shown["config"] == {**RECIPE["config"], "hidden_size": 48} and shown["data"]["max_operators"] == 2
    assert parsed("train", recipe, "--print_config")["preset"] == "sut-tiny"


def test_evaluate(checkpoint, fixed, tmp_path):
    file = tmp_path / "deep" / "result.json"
    words = (
        "evaluate",
        checkpoint,
        "--sets",
        "7,validation",
        "--threshold",
        0.5,
        "--errors",
        "--result",
        file,
    )
    figures = parsed(*words)
    assert set(figures["accuracy"]) == {"7", "validation"} == set(figures["errors"])
    assert all(0 <= value <= 100 for value in figures["accuracy"].values())
    result = json.loads(file.read_text())
    assert result["figures"]["accuracy"] == figures["accuracy"] and result["seed"] == 3
    assert result["command"].startswith("tenuto evaluate") and result["made_by"].startswith("tenuto train")
    assert "unanswered" in parsed("evaluate", fixed, "--sets", "7", "--errors")["errors"]["7"]
    assert list(parsed("evaluate", checkpoint)["accuracy"]) == [str(n) for n in range(7, 13)]
    code, out, _ = run(*words)
    assert code == 0 and "always # %" in out and "by relation" in out
    both = parsed("evaluate", checkpoint, "--sets", "7", "--both_ways")
    once = parsed("evaluate", checkpoint, "--sets", "7")
    assert both["macs_per_pair"]["7"] > 1.5 * once["macs_per_pair"]["7"]


def test_both_ways_does_not_care_which_sentence_comes_first(checkpoint):
    """The answer to the exchanged pair is the mirrored answer."""
    from tenuto.data.logical_inference import RELATIONS, load_bin, swap
    from tenuto.evaluate import load, predict

    loaded, pairs = load(checkpoint), load_bin("test", 3)[:60]
    said = [RELATIONS[n] for n in predict(loaded, pairs, both_ways=True).relations]
    other = [RELATIONS[n] for n in predict(loaded, [swap(one) for one in pairs], both_ways=True).relations]
    assert other == [{"<": ">", ">": "<"}.get(one, one) for one in said]


def test_depth_knobs_bound_the_depth(checkpoint):
    steps = [
        parsed("evaluate", checkpoint, "--sets", "8", *knobs)["mean_steps"]["8"]
        for knobs in (("--threshold", 0), ("--min_steps", 2, "--max_steps", 2), ("--min_steps", 3))
    ]
    assert steps == [1, 2, 3]


def test_sweep(checkpoint):
    figures = parsed("sweep", checkpoint, "--thresholds", "0.9,0.2", "--sets", "7", "--repeats", 1)
    assert [row["threshold"] for row in figures["rows"]] == [1.0, 0.9, 0.2]
    skipped = [row["steps_skipped"] for row in figures["rows"]]
    assert skipped == sorted(skipped) and skipped[0] == 0
    more = parsed("sweep", checkpoint, "--thresholds", "0.9", "--sets", "7", "--repeats", 1, "--generated", 5)
    assert more["pairs"] == figures["pairs"] + 5
    code, out, _ = run("sweep", checkpoint, "--sets", "7", "--repeats", 1, "--thresholds", "0.5")
    assert code == 0 and "steps skipped %" in out


def test_slope_within_groups():
    """By hand: what differs between the groups is not the slope's; within, y grows by 2 and by 4."""
    from tenuto.depths import slope_within

    x, y, group = (
        np.array([1, 2, 5, 6, 9]),
        np.array([0.0, 2.0, 100.0, 104.0, 7.0]),
        np.array([3, 3, 8, 8, 9]),
    )
    found = slope_within(x, y, group)
    assert found["steps_per_level"] == 3.0 and 2.0 <= found["interval"][0] <= found["interval"][1] <= 4.0
    assert slope_within(np.ones(3), np.arange(3.0), np.zeros(3, int)) is None


def test_slopes_interval_holds_the_truth():
    """Groups of two with no slope at all: nineteen of twenty intervals, about, hold 0."""
    from tenuto.depths import slope_within

    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        x, y, group = rng.integers(4, size=120), rng.normal(size=120), np.repeat(np.arange(60), 2)
        low, high = slope_within(x, y, group)["interval"]
        held += low <= 0 <= high
    assert 180 <= held <= 198


def test_depths(checkpoint):
    figures = parsed("depths", checkpoint, "--sets", "7,9")
    assert set(figures["by_operators"]) == {"7", "9"} and "bracket" in figures["by_kind"]
    assert sum(one["tokens"] for one in figures["by_depth"].values()) == figures["all"]["tokens"]
    code, out, _ = run("depths", checkpoint, "--sets", "7", "--threshold", 0.0)
    assert code == 0 and "collapsed" in out and "a level of the formula's depth adds" in out


def test_experts(checkpoint, fixed):
    figures = parsed("experts", checkpoint, "--limit", 10)
    assert figures["pairs"] <= 10 and len(figures["routers"]) == 2
    code, out, _ = run("experts", checkpoint, "--sets", "7")
    assert code == 0 and "most specific" in out
    assert "no routers" in sentence("experts", fixed)


def test_presets():
    rows = parsed("presets")
    assert isinstance(rows, list) and len({row["name"] for row in rows}) == len(rows)
    wanted = {"name", "parameters", "vocab", "macs", "macs_rule", "macs_published", "paper"}
    assert all(wanted <= set(row) for row in rows)
    code, out, _ = run("presets")
    assert code == 0 and "sut-base" in out and "[1] " in out


def test_report(checkpoint, fixed, tmp_path):
    file = tmp_path / "page.html"
    figures = parsed("report", checkpoint, "-o", file, "--limit", 12)
    html = file.read_text()
    assert figures["report"] == str(file)
    pieces = (
        "sut-tiny,tenuto train,How often it is right,always #,By true relation,The knob,Histogram of depth,"
        "Mean depth by operator count,Depth by kind of token,Who serves whom,Token by token,of 3 steps,"
        "prefers-color-scheme,width=device-width"
    )
    for piece in pieces.split(","):
        assert piece in html, piece
    assert len(figures["examples"]) >= 4
    assert any(one["relation"] != one["answer"] for one in figures["examples"])
    # self-contained: nothing to fetch, nothing to run
    assert not re.search(r"https?://|<script|<link|@import|src=|url\((?!#)", html)
    code, out, _ = run("report", fixed, "--limit", 12)
    html = (fixed / "report.html").read_text()
    assert code == 0 and str(fixed / "report.html") in out
    assert "Fixed depth" in html and "The knob" not in html and "Who serves whom" not in html


def test_demo(checkpoint, recipe, tmp_path):
    folder = tmp_path / "demo"
    words = ("demo", "--output", folder, "--recipe", recipe, "--checkpoint")
    figures = parsed(*words, checkpoint)
    assert figures["checkpoint"]["shipped"] and figures["checkpoint"]["command"].startswith("tenuto train")
    assert "Trained just now" in (folder / "report.html").read_text()
    code, out, _ = run(*words, tmp_path / "nowhere")
    assert code == 0 and "always #" in out and "no longer-trained checkpoint" in out and "threshold" in out
    assert "not the folder of an earlier demo" in sentence("demo", "--output", checkpoint, "--recipe", recipe)
    assert (checkpoint / "model.safetensors").is_file()


def test_sentences(checkpoint, fixed, recipe, tmp_path):
    new = ("--output", tmp_path / "new")
    train = ("train", recipe, *new)
    assert "There is no recipe" in sentence("train", tmp_path / "none.yaml", *new)
    assert "Did you mean 'sut-tiny'?" in sentence(*train, "--preset=sut-tny")
    assert "maximum" in sentence(*train, "--data.maximum=3")
    assert "has no field hiden_size" in sentence(*train, "--config.hiden_size=3")
    assert "training.bogus" in sentence(*train, "--training.bogus=3")
    chosen = sentence(*train, "--config.ffn_experts_per_token=9")
    assert chosen == "ffn_experts_per_token=9 must lie between 1 and ffn_experts=6."
    bad = tmp_path / "bad.yaml"
    bad.write_text("preset: sut-tiny\nbatch_size: 3\ntraining: {max_steps: 1}\n")
    assert "batch_size" in sentence("train", bad, *new)
    assert not (tmp_path / "new").exists()
    assert "finished run" in sentence("train", recipe, "--output", checkpoint)
    assert "not a checkpoint" in sentence("evaluate", tmp_path)
    assert "no set '99'" in sentence("evaluate", checkpoint, "--sets", "7,99")
    for words in (
        ("evaluate", checkpoint, "--threshold", 1.5),
        ("sweep", checkpoint, "--thresholds", "0.5,-1"),
    ):
        assert "outside 0..1" in sentence(*words)
    assert "fixed depth" in sentence("evaluate", fixed, "--threshold", 0.5)
    assert "fixed depth" in sentence("sweep", fixed)


def test_usage_errors_exit_with_2(recipe, checkpoint):
    for words in (
        (),
        ("bogus",),
        ("evaluate",),
        ("train", recipe),
        ("evaluate", checkpoint, "--threshold", "x"),
    ):
        code, out, err = run(*words)
        assert code == 2 and out == "" and err


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        main(["evaluate", str(tmp_path), "--debug"])


def test_checkpoint_of_another_config(checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ffn_experts": 5}))
    assert "of another config" in sentence("evaluate", folder)


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_resume_equals_the_uninterrupted_run(checkpoint, recipe, tmp_path, monkeypatch):
    import torch

    from tenuto import train

    folder, before = tmp_path / "killed", train.AdaptiveTrainer.training_step

    def killed(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise KeyboardInterrupt
        return before(self, *args, **kwargs)

    words = ("train", recipe, "--output", folder, "--training.seed=3")
    with monkeypatch.context() as patch:
        patch.setattr(train.AdaptiveTrainer, "training_step", killed)
        assert run(*words)[0] == 130
    assert "--resume" in sentence(*words)
    assert parsed(*words, "--resume")["resumed"]
    one, other = weights(checkpoint), weights(folder)
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_non_finite_loss_keeps_the_last_checkpoint(recipe, tmp_path, monkeypatch):
    from tenuto import train

    folder, before = tmp_path / "poisoned", train.AdaptiveTrainer.training_step

    def poisoned(self, model, *args, **kwargs):
        if self.state.global_step == 4:
            next(model.parameters()).data.fill_(float("nan"))
        return before(self, model, *args, **kwargs)

    monkeypatch.setattr(train.AdaptiveTrainer, "training_step", poisoned)
    code, _, err = run("train", recipe, "--output", folder)
    last = err.strip().splitlines()[-1]
    assert code == 1 and last.startswith("tenuto: The loss is nan at step 5") and "checkpoint-3" in last
    assert (folder / "checkpoint-3" / "model.safetensors").is_file()
