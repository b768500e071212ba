"""Text-to-text checkpoints measured: exact match in training, the knob, comparisons, experts, the report."""

import json
import re
from html.parser import HTMLParser
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tenuto.data import sequences
from tenuto.data.parallel import encode_lines
from tenuto.evaluate import load
from tenuto.recipe import load_recipe
from tenuto.translate import test_pairs as pairs_of

ROOT = Path(__file__).parents[1]
RECIPE = {
    "preset": "sut-tiny",
    "head": "text-to-text",
    "config": {
        "num_loops": 3,
        "num_decoder_loops": 4,
        "attention_experts": 3,
        "ffn_experts": 4,
        "act_weight": 0.1,
    },
    "muon_learning_rate": 1.0e-2,
    "training": {
        "max_steps": 40,
        "per_device_train_batch_size": 16,
        "learning_rate": 5.0e-3,
        "logging_steps": 20,
        "save_steps": 20,
        "eval_strategy": "steps",
        "eval_steps": 20,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """SCAN's commands of at most three actions, and recipes for them."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "data").mkdir()
    every = [one for part in ("train", "validation") for one in sequences.read("scan", part, "simple")]
    chosen = [one for one in every if len(one.target) <= 3]
    for part, some in (("train", chosen), ("test", chosen[::9])):
        lines = [f"IN: {' '.join(one.source)} OUT: {' '.join(one.target)}\n" for one in some]
        (folder / "data" / f"tasks_{part}_simple.txt").write_text("".join(lines))
    data = {"sequences": {"task": "scan", "split": "simple", "path": str(folder / "data")}}
    (folder / "sut.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}))
    dense = {"preset": "transformer-tiny", "config": {"num_hidden_layers": 2}}
    (folder / "transformer.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data, **dense}))
    return folder


@pytest.fixture(scope="module")
def trained(folder) -> dict:
    from tenuto.train import train

    return train(load_recipe(folder / "sut.yaml"), folder / "sut")


@pytest.fixture(scope="module")
def run(folder, trained) -> Path:
    return folder / "sut"


def argmax_answer(model, ids, most, **knobs):
    """The likeliest token always, one uncached pass for each; [] and more, with <eos>."""
    said = [1]
    while len(said) <= most and said[-1] != 2:
        with torch.no_grad():
            out = model(torch.tensor([ids]), decoder_input_ids=torch.tensor([said]), **knobs)
        said.append(int(out.logits[0, -1].argmax()))
    return said[1:]


# training


def test_training_measures_the_likelihood_of_a_token(folder):
    """Validation loss is the mean over all target tokens, in batches of any size, and label smoothing is no part of
    it: `loss_of` of the validation part.
    """
    from tenuto.train import train
    from tenuto.translate import loss_of

    few = [
        "--training.max_steps=4",
        "--config.label_smoothing=0.3",
        "--training.per_device_eval_batch_size=3",
    ]
    found = train(load_recipe(folder / "sut.yaml", few), folder / "smoothed")
    loaded = load(folder / "smoothed")
    pairs = pairs_of(loaded, ["validation"])["validation"]
    lengths = {len(pair[1].split()) for pair in pairs}
    assert len(lengths) > 1 and len(pairs) % 3
    assert found["validation_loss"] == pytest.approx(loss_of(loaded, pairs), abs=1e-5)


def test_training_measures_exact_match(trained, run):
    """The share that an argmax loop gives; it stands in the history beside the loss, and the last one in percent."""
    loaded = load(run)
    right = []
    for source, target, _ in pairs_of(loaded, ["validation"])["validation"]:
        ids, wanted = (encode_lines([one], loaded.tokenizer)[0].tolist() for one in (source, target))
        right.append(argmax_answer(loaded.model, ids, 4) == wanted)
    measured = [row["eval_exact"] for row in trained["history"] if "eval_exact" in row]
    assert len(measured) == sum("eval_loss" in row for row in trained["history"]) == 3
    assert measured[-1] == pytest.approx(np.mean(right)) and trained["validation_exact"] == 100 * measured[-1]
    assert 0 < np.mean(right) < 1
    logged = json.loads((run / "checkpoint-40" / "trainer_state.json").read_text())["log_history"]
    assert all("eval_exact" in row for row in logged if "eval_loss" in row)


def test_exact_match_is_of_a_bounded_sample_and_leaves_the_mode(run):
    """Spread evenly over the set; a target with an unknown word is never right."""
    from tenuto.answers import exact_share
    from tenuto.tasks import task_of

    loaded = load(run)
    data, model = task_of(loaded.recipe).validation, loaded.model.train()
    places = np.linspace(0, len(data) - 1, 5).astype(int)
    right = []
    for place in places:
        source, target = data[int(place)][0]
        right.append(argmax_answer(model.eval(), source.tolist(), len(target)) == target.tolist())
    model.train()
    assert exact_share(model, data, sample=5, batch=2) == pytest.approx(np.mean(right)) and model.training
    data.target.ids[data.target.ids > 3] = 3
    assert exact_share(model, data) == 0.0


def test_best_checkpoints_by_exact_match_then_loss(tmp_path):
    from tenuto.average import best_checkpoints

    rows = {10: (0.5, 1.0), 20: (0.7, 2.0), 30: (0.7, 1.5), 40: (0.1, 0.2)}
    history = [{"step": n, "eval_exact": exact, "eval_loss": loss} for n, (exact, loss) in rows.items()]
    for step in rows:
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(
            json.dumps({"log_history": history})
        )
    assert [one.name for one in best_checkpoints(tmp_path, 3)] == [
        "checkpoint-30",
        "checkpoint-20",
        "checkpoint-10",
    ]


# measures


def test_loss_is_the_mean_over_target_tokens(run):
    """Token by token, by hand; words that the vocabulary lacks are left out; label smoothing has no part in it."""
    from tenuto.translate import loss_of

    loaded = load(run)
    loaded.model.config.label_smoothing = 0.3
    pairs = [("jump twice", "I_JUMP I_JUMP"), ("walk", "I_WALK I_FLY"), ("turn left", "I_TURN_LEFT")]
    total, count = 0.0, 0
    for source, target in pairs:
        ids, wanted = (encode_lines([one], loaded.tokenizer)[0].tolist() for one in (source, target))
        with torch.no_grad():
            logits = loaded.model(
                torch.tensor([ids]), decoder_input_ids=torch.tensor([[1, *wanted[:-1]]])
            ).logits
        for place, token in enumerate(wanted):
            if token != 3:
                total, count = total - float(logits[0, place].log_softmax(-1)[token]), count + 1
    assert count == 7
    assert loss_of(loaded, pairs, batch=2) == pytest.approx(total / count, abs=1e-5)


def test_each_line_may_have_its_own_limit(run):
    """What is written to it is cut there, whatever its batch-mates may write; so are its depths."""
    from tenuto.translate import write

    loaded = load(run)
    lines, limits = ["turn left thrice", "jump", "walk twice"], [4, 1, 2]
    together = write(loaded, lines, max_length=limits)
    for line, most, ids, steps in zip(lines, limits, together.ids, together.decoder_depths, strict=True):
        assert ids == argmax_answer(loaded.model, encode_lines([line], loaded.tokenizer)[0].tolist(), most)
        assert len(steps) == len(ids) <= most
    assert together.tokens == sum(map(len, together.ids)) + sum(len(line.split()) + 1 for line in lines)


def test_paired_exact_is_the_bootstrap_over_examples():
    """Beside one that draws the examples; equal outcomes have no interval."""
    from tenuto.translate import paired_exact

    draws = np.random.default_rng(3)
    first, second = draws.random(200) < 0.5, draws.random(200) < 0.6
    found = paired_exact(first, second, samples=4000)
    assert found["difference"] == round(100 * (second.mean() - first.mean()), 2)
    slow = []
    for _ in range(4000):
        chosen = draws.integers(200, size=200)
        slow.append(100 * (second[chosen].mean() - first[chosen].mean()))
    assert found["interval"] == pytest.approx(np.percentile(slow, [2.5, 97.5]), abs=0.8)
    assert found["p"] == pytest.approx(2 * min(np.mean(np.array(slow) <= 0), 0.5), abs=0.03)
    same = paired_exact(first, first)
    assert same["difference"] == 0 and same["interval"] == [0, 0] and same["p"] == 1
    with pytest.raises(ValueError, match="of 200 and 3 examples"):
        paired_exact(first, second[:3])
    # of several trainings an example comes with all its outcomes
    firsts, seconds = draws.random((3, 200)) < 0.4, draws.random((3, 200)) < 0.5
    found = paired_exact(firsts, seconds, samples=4000)
    change = seconds.mean(0) - firsts.mean(0)
    slow = [100 * change[draws.integers(200, size=200)].mean() for _ in range(4000)]
    assert found["interval"] == pytest.approx(np.percentile(slow, [2.5, 97.5]), abs=0.6)
    assert found["difference"] == pytest.approx(100 * change.mean(), abs=0.01)
    assert paired_exact(firsts[:1], seconds[:1]) == paired_exact(firsts[0], seconds[0])
    with pytest.raises(ValueError, match="3 and 2 trainings"):
        paired_exact(firsts, seconds[:2])


# the knob


def cached_macs(model, ids, tokens, **knobs):
    """What reading one source and writing so many tokens, one by one, computes."""
    source = torch.tensor([ids])
    with torch.no_grad():
        read = model.encode(source, torch.ones_like(source), **knobs)
    spent = [read.compute.total_causal]
    watch = model.register_forward_hook(lambda model, given, out: spent.append(out.compute.total_causal))
    model.generate(
        encoder_outputs=read, attention_mask=torch.ones_like(source), do_sample=False,
        max_new_tokens=tokens, min_new_tokens=0, decoder_start_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, **knobs,
    )  # fmt: skip
    watch.remove()
    assert len(spent) == 1 + tokens
    return sum(spent)


def test_sweep_is_what_the_model_writes_at_each_threshold(run):
    """Answers, depths of both sides and MACs of a slow loop; differences are from full depth on the same examples."""
    from tenuto.sweep_pairs import spread, sweep_pairs

    loaded = load(run)
    figures = sweep_pairs(run, [0.6, 0.0], repeats=1)
    assert list(figures["sets"]) == ["validation"] and figures["full_depth"] == {"encoder": 3, "decoder": 4}
    rows = figures["sets"]["validation"]["rows"]
    pairs = pairs_of(loaded, ["validation"])["validation"]
    right = {}
    for row in rows:
        depths, macs, right[row["threshold"]] = ([], []), 0, []
        for source, target, _ in pairs:
            ids = encode_lines([source], loaded.tokenizer)[0].tolist()
            said = argmax_answer(loaded.model, ids, len(target.split()) + 1, threshold=row["threshold"])
            with torch.no_grad():
                out = loaded.model(
                    torch.tensor([ids]), labels=torch.tensor([said]), threshold=row["threshold"]
                )
            depths[0].extend(out.depths[0].tolist())
            depths[1].extend(out.decoder_depths[0].tolist())
            macs += cached_macs(loaded.model, ids, len(said), threshold=row["threshold"])
            wanted = encode_lines([target], loaded.tokenizer)[0].tolist()
            right[row["threshold"]].append(said == wanted)
        for side, found, full in zip(("encoder", "decoder"), depths, (3, 4), strict=True):
            assert row[f"{side}_depth"] == pytest.approx(np.mean(found), abs=1e-3)
            assert row[f"{side}_skipped"] == pytest.approx(100 * (1 - np.mean(found) / full), abs=0.01)
        ran, most = sum(depths[0]) + sum(depths[1]), 3 * len(depths[0]) + 4 * len(depths[1])
        assert row["skipped"] == pytest.approx(100 * (1 - ran / most), abs=0.01)
        assert row["written_tokens"] == len(depths[1])
        assert row["exact"] == round(100 * np.mean(right[row["threshold"]]), 2)
        # keys of padding beside longer sources are projected as well
        assert row["macs"] == pytest.approx(macs, rel=0.015) and row["macs"] >= macs
        change = np.mean(right[row["threshold"]]) - np.mean(right[1.0])
        assert row["difference"] == pytest.approx(100 * change, abs=0.01)
        assert row["difference_interval"][0] <= row["difference"] <= row["difference_interval"][1]
    assert rows[0]["encoder_skipped"] == rows[0]["changed"] == 0 and rows[0]["macs_share"] == 1.0
    assert rows[2]["encoder_depth"] == rows[2]["decoder_depth"] == 1.0 and rows[2]["macs_share"] < 0.7
    # two sets as one
    both = sweep_pairs(run, [0.6], ["test+validation", "test"], repeats=1, limit=5)["sets"]
    alone = sweep_pairs(run, [0.6], ["validation"], repeats=1, limit=5)["sets"]["validation"]
    assert both["test+validation"]["examples"] == 10 and [*both] == ["test+validation", "test"]
    for row, one, two in zip(
        both["test+validation"]["rows"], both["test"]["rows"], alone["rows"], strict=True
    ):
        assert row["exact"] == pytest.approx((one["exact"] + two["exact"]) / 2, abs=0.01)
        assert row["written_tokens"] == one["written_tokens"] + two["written_tokens"]
    assert spread(range(10), 3) == [0, 4, 9] and spread(range(3), 5) == [0, 1, 2]


def test_sweep_times_each_setting_turn_by_turn(run, monkeypatch):
    """The fastest of the repeats counts, whatever the order."""
    from tenuto import sweep_pairs

    asked, real = [], sweep_pairs.answer
    seconds = iter([4.0, 2.0, 1.0, 5.0])

    def answer(*args, threshold, **kwargs):
        asked.append(threshold)
        said = real(*args, threshold=threshold, **kwargs)
        said.seconds = next(seconds)
        return said

    monkeypatch.setattr(sweep_pairs, "answer", answer)
    rows = sweep_pairs.sweep_pairs(run, [0.5], ["test"], repeats=2, limit=6)["sets"]["test"]["rows"]
    assert asked == [1.0, 0.5, 1.0, 0.5]
    assert [row["seconds"] for row in rows] == [1.0, 2.0] and rows[1]["seconds_share"] == 2.0


def test_sweep_of_translation_is_bleu_with_its_bootstrap():
    """The figures of `paired_bootstrap` between two sets of texts."""
    pytest.importorskip("sacrebleu")
    from types import SimpleNamespace as Room

    from tenuto.sweep_pairs import beside
    from tenuto.translate import paired_bootstrap

    lines = [f"ein Hund läuft über die Wiese Nummer {k} ." for k in range(12)]
    pairs = [("a dog", line) for line in lines]
    base, one = Room(texts=lines), Room(texts=[line.replace("Hund", "Mann") for line in lines])
    loaded = Room(recipe=Room(data=Room(parallel=object())))
    found, want = beside(loaded, pairs, base, one), paired_bootstrap(lines, one.texts, lines)
    assert found["bleu"] == want["second"] < 100 and found["changed"] == 100.0
    assert found["difference"] == want["difference"] and found["difference_interval"] == want["interval"]


def test_sweep_refuses_in_one_sentence(run, folder):
    from tenuto.sweep_pairs import sweep_pairs
    from tenuto.train import train

    with pytest.raises(ValueError, match="no set 'gen'; it has validation, test"):
        sweep_pairs(run, [0.5], ["gen"])
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        sweep_pairs(run, [0.5], repeats=0)
    recipe = load_recipe(folder / "transformer.yaml", ["--training.max_steps=1"])
    train(recipe, folder / "dense")
    with pytest.raises(ValueError, match="has a fixed depth; the knob needs policy stick_breaking"):
        sweep_pairs(folder / "dense", [0.5])


# comparison


def plan(folder: Path, **changes) -> Path:
    """Two rows of few steps."""
    settings = {
        "base": str(folder / "sut.yaml"),
        "against": "sut",
        "seeds": [0, 1],
        "sets": ["validation", "test"],
        "rows": {
            "sut": {},
            "dense": {"base": str(folder / "transformer.yaml"), "seeds": [1]},
            "no halting": {"config": {"policy": "fixed", "act_weight": 0.0}},
        },
        **changes,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_comparison_of_rows(folder):
    """Means over seeds; differences seed by seed, or by the bootstrap where one seed is shared; nothing is redone."""
    from tenuto.compare import run_comparison
    from tenuto.compare_pairs import said_in
    from tenuto.translate import evaluate_pairs, loss_of, paired_exact

    few, output = ["--training.max_steps=8"], folder / "rows"
    part = run_comparison(plan(folder), output, only="sut-*", overrides=few)
    assert part["done"] == 2 and part["cells"] == 5 and [row["row"] for row in part["rows"]] == ["sut"]
    figures = run_comparison(plan(folder), output, overrides=few)
    assert figures["done"] == 5 and json.loads((output / "table.json").read_text()) == figures
    cells = {(one["row"], one["seed"]): one for one in figures["results"]}
    rows = {row["row"]: row for row in figures["rows"]}
    sut, dense, fixed = rows["sut"], rows["dense"], rows["no halting"]
    for part in ("validation", "test"):
        here = [cells["sut", seed]["quality"][part] for seed in (0, 1)]
        exact = [one["exact"] for one in here]
        assert sut["sets"][part]["exact"]["mean"] == pytest.approx(np.mean(exact), abs=1e-3)
        assert sut["sets"][part]["loss"] == pytest.approx(np.mean([one["loss"] for one in here]), abs=1e-4)
        assert {"majority", "copy", "macs_per_token", "tokens_per_second"} <= set(sut["sets"][part])
        gaps = [
            cells["no halting", seed]["quality"][part]["exact"] - cells["sut", seed]["quality"][part]["exact"]
            for seed in (0, 1)
        ]
        minus = fixed["sets"][part]["minus_against"]
        assert minus["difference"] == pytest.approx(np.mean(gaps), abs=1e-3) and minus["over"] == "seeds"
        sources = pairs_of(load(output / "sut-0"), [part])[part]
        right = [
            [
                [
                    said == pair[1]
                    for said, pair in zip(said_in(output / f"{row}-{seed}", part), sources, strict=True)
                ]
                for seed in (0, 1)
            ]
            for row in ("sut", "no-halting")
        ]
        assert minus["examples_interval"] == paired_exact(*map(np.array, right))["interval"]
        assert fixed["sets"][part]["decoder_depth"] == 4.0 and dense["sets"][part]["encoder_depth"] == 2.0
    assert "minus_against" not in sut["sets"]["test"] and dense["sets"]["test"]["exact"]["interval"] is None
    # one seed in common: the bootstrap over what was said
    loaded = load(output / "dense-1")
    pairs = pairs_of(loaded, ["test"])["test"]
    outcomes = [
        np.array([text == pair[1] for text, pair in zip(said_in(output / cell, "test"), pairs, strict=True)])
        for cell in ("sut-1", "dense-1")
    ]
    want, minus = paired_exact(*outcomes), dense["sets"]["test"]["minus_against"]
    assert minus == {**{key: want[key] for key in ("difference", "interval", "p")}, "over": "examples"}
    again = evaluate_pairs(output / "dense-1", ["test"])["sets"]["test"]
    cell = cells["dense", 1]["quality"]["test"]
    assert cell["exact"] == again["exact"] and cell["macs_per_token"] == again["macs_per_token"]
    assert cell["loss"] == round(loss_of(loaded, pairs), 4)


def test_table_pools_the_tests_of_translation(tmp_path):
    """BLEU of all tests together, of each sentence every shared seed's answers; a set asked alone stays as it is."""
    pytest.importorskip("sacrebleu")
    from tenuto.compare_pairs import pairs_table
    from tenuto.translate import paired_bootstrap, paired_bootstrap_of_runs

    said = {
        "first": "a man rides a red horse\na dog sleeps in the sun\n",
        "second": "two men walk home at night\n",
    }
    for name, text in said.items():
        (tmp_path / f"{name}.en").write_text(text)
        (tmp_path / f"{name}.de").write_text(text)
    corpora = {name: {"source": f"{name}.en", "target": f"{name}.de"} for name in said}
    data = {
        "folder": str(tmp_path),
        "train": [corpora["first"]],
        "validation": [corpora["first"]],
        "test": corpora,
    }
    rng, folders, results, answers = np.random.default_rng(0), {}, [], {}
    for row, seeds in (("base", (0, 1, 2)), ("ours", (1, 2)), ("alone", (3,)), ("one", (1,))):
        for seed in seeds:
            folder = folders[row, seed] = tmp_path / f"{row}-{seed}"
            (folder / "said").mkdir(parents=True)
            recipe = {
                "preset": "sut-tiny",
                "head": "text-to-text",
                "data": {"parallel": data},
                "training": {"max_steps": 1, "per_device_train_batch_size": 1},
            }
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
            rate = {"base": 0.4}.get(row, 0.2)
            for name, text in said.items():
                lines = [
                    " ".join("x" if rng.random() < rate else word for word in line.split())
                    for line in text.splitlines()
                ]
                (folder / "said" / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
                answers.setdefault((row, seed), []).extend(lines)
            costs = dict.fromkeys(
                ("loss", "macs_per_token", "tokens_per_second", "encoder_depth", "decoder_depth"), 1
            )
            quality = {
                name: {"examples": len(text.splitlines()), "bleu": 10.0 * seed, **costs}
                for name, text in said.items()
            }
            one = {
                "row": row,
                "seed": seed,
                "parameters": 1,
                "train_cpu_seconds": 1,
                "full_depth": 1,
                "quality": quality,
            }
            results.append(one)
    rows = {row["row"]: row for row in pairs_table("base", results, folders)}
    targets = [line for text in said.values() for line in text.splitlines()]
    runs = [[answers[row, seed] for seed in (1, 2)] for row in ("base", "ours")]
    assert rows["ours"]["pooled"] == {"sets": [*said], **paired_bootstrap_of_runs(*runs, targets)}
    assert rows["ours"]["sets"]["first"]["minus_against"]["over"] == "seeds"
    assert rows["one"]["pooled"] == {
        "sets": [*said],
        **paired_bootstrap(answers["base", 1], answers["one", 1], targets),
    }
    assert rows["one"]["sets"]["second"]["minus_against"]["over"] == "examples"
    assert "pooled" not in rows["base"] and rows["alone"]["pooled"] is None
    assert rows["alone"]["sets"]["first"]["minus_against"] is None


def test_comparison_of_the_first_examples(folder):
    """`limit` measures the first examples of each set, in every row; the others have it refused."""
    from tenuto.compare import Comparison, cells_of, run_comparison
    from tenuto.compare_pairs import said_in
    from tenuto.translate import loss_of

    few, output = ["--training.max_steps=2"], folder / "few-rows"
    found = run_comparison(plan(folder, seeds=[1], limit=3), output, only="*-1", overrides=few)
    assert found["done"] == 3
    for row in found["rows"]:
        assert {part["examples"] for part in row["sets"].values()} == {3}
    (dense,) = (row["sets"]["test"] for row in found["rows"] if row["row"] == "dense")
    assert dense["minus_against"]["over"] == "examples"
    assert len(said_in(output / "dense-1", "test")) == 3
    loaded = load(output / "dense-1")
    want = loss_of(loaded, pairs_of(loaded, ["test"])["test"][:3])
    assert dense["loss"] == round(want, 4)
    # cells measured otherwise are not mixed with these
    found = run_comparison(plan(folder, seeds=[1], limit=2), output, only="dense-1", overrides=few)
    assert found["done"] == 1 and found["rows"][0]["row"] == "dense"
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        run_comparison(plan(folder, limit=0), output, overrides=few)
    with pytest.raises(ValueError, match="limit has nothing to set"):
        cells_of(Comparison("recipes/algorithmic/lookup.yaml", {"a": {}}, "a", limit=3))


def test_student_interval():
    """Three values, by hand: t of two degrees of freedom."""
    from tenuto.intervals import student

    found = student([1.0, 2.0, 4.0])
    spread = (((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2) ** 0.5
    half = 4.303 * spread / 3**0.5
    assert found == {
        "mean": 2.3333,
        "spread": round(spread, 4),
        "interval": [round(7 / 3 - half, 4), round(7 / 3 + half, 4)],
    }
    assert student([5.0]) == {"mean": 5.0, "spread": None, "interval": None}


def test_bad_plans_are_refused_in_one_sentence(folder, tmp_path):
    from tenuto.compare import Comparison, cells_of, load_plan

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            cells_of(load_plan(plan(folder, **changes), Comparison))

    refused("thresholds has nothing to set for rows of", thresholds=[0.5])
    other = yaml.safe_load((folder / "sut.yaml").read_text())
    other["data"]["sequences"]["train"] = 50
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    rows = {"sut": {}, "fewer": {"base": str(tmp_path / "other.yaml")}}
    refused("Row fewer: .*other.yaml has other data than .*sut.yaml", rows=rows)
    refused("sets has nothing to set for rows of", base=str(ROOT / "recipes" / "logic" / "sut.yaml"))


def test_shipped_plans(monkeypatch):
    """Every cell builds; in the ablations what is said to be equal is."""
    from tenuto.compare import Comparison, cells_of, load_plan
    from tenuto.presets import build, config_of

    monkeypatch.chdir(ROOT)
    for name, count in (("scan/depth", 11), ("cogs/depth", 10), ("translation/ablations", 16)):
        cells = cells_of(load_plan(f"recipes/{name}.yaml", Comparison))
        assert len({cell.name for cell in cells}) == len(cells) == count
    sizes, macs = {}, {}
    for cell in cells:
        model = build(config_of(cell.recipe, vocab_size=4000), "text-to-text")
        sizes[cell.labels["row"]] = sum(p.numel() for p in model.parameters())
        macs[cell.labels["row"]] = model.encoder.token_macs() + model.decoder.token_macs()
    assert macs["dense, equal macs"] == pytest.approx(macs["sut"], rel=0.005)
    assert macs["moa, wide heads"] == macs["sut"] == macs["switch loss"] == macs["keys and values from h"]
    assert sizes["moa, wide heads"] == pytest.approx(sizes["sut"], rel=1e-3)
    assert all(sizes[name] == pytest.approx(sizes["sut"], rel=0.03) for name in ("ut", "transformer"))


# experts


def test_expert_usage_is_a_count_by_hand(run):
    """One pair at a time, without padding: choices of each token at each step, by side and part; PMI from its words."""
    from tenuto.expert_usage import expert_usage

    loaded, counts = load(run), {}
    pairs = pairs_of(loaded, ["validation"])["validation"]
    names = loaded.tokenizer.convert_ids_to_tokens(range(len(loaded.tokenizer)))
    for source, target, _ in pairs:
        ids, wanted = (encode_lines([one], loaded.tokenizer)[0].tolist() for one in (source, target))
        with torch.no_grad():
            out = loaded.model(torch.tensor([ids]), labels=torch.tensor([wanted]), output_routing=True)
        for side, read in (("encoder", ids), ("decoder", [1, *wanted[:-1]])):
            for _, part, places, experts, _ in out.routing[side]:
                for place, chosen in zip(places.tolist(), experts.tolist(), strict=True):
                    for expert in chosen:
                        key = (f"{side}.{part}", names[read[place]], expert)
                        counts[key] = counts.get(key, 0) + 1
    usage = expert_usage(run)
    assert usage["sets"] == ["validation"] and usage["pairs"] == len(pairs)
    parts = {"attention", "feed_forward"}
    assert set(usage["routers"]) == {f"encoder.{part}" for part in parts} | {
        f"decoder.{part}" for part in (*parts, "cross")
    }
    for name, router in usage["routers"].items():
        here = {(token, expert): n for (router, token, expert), n in counts.items() if router == name}
        total = sum(here.values())
        told = {(token, k): n for token, row in router["counts"].items() for k, n in enumerate(row) if n}
        assert told == here
        for expert, share in enumerate(router["usage"]):
            assert share == pytest.approx(
                sum(n for (_, e), n in here.items() if e == expert) / total, abs=1e-4
            )
        information = 0.0
        for (token, expert), n in here.items():
            by_token = sum(m for (other, _), m in here.items() if other == token)
            by_expert = sum(m for (_, other), m in here.items() if other == expert)
            information += n / total * log(n * total / (by_token * by_expert))
        assert router["information"] == pytest.approx(information, abs=2e-3)
        assert router["largest"] == pytest.approx(max(router["usage"]) * len(router["usage"]), abs=1e-2)
        for expert, tokens in router["specific"].items():
            for one in tokens:
                by_token = sum(m for (other, _), m in here.items() if other == one["token"])
                by_expert = sum(m for (_, other), m in here.items() if other == int(expert))
                pmi = log(one["count"] * total / (by_token * by_expert))
                assert one["pmi"] == pytest.approx(pmi, abs=1e-3) and pmi > 0
                assert one["share"] == pytest.approx(one["count"] / by_token, abs=1e-4)
            assert [one["pmi"] for one in tokens] == sorted((one["pmi"] for one in tokens), reverse=True)


def test_distinct_layers_have_routers_of_their_own(folder):
    """A Mixture of Attention heads: two layers a side, and no feed-forward experts; a rare token is not specific."""
    from tenuto.expert_usage import SEEN, expert_usage
    from tenuto.train import train

    recipe = load_recipe(folder / "transformer.yaml", ["--training.max_steps=1", "--preset=moa-tiny"])
    recipe.config = {"num_hidden_layers": 2, "num_decoder_layers": 2}
    train(recipe, folder / "moa")
    usage = expert_usage(folder / "moa", ["test"], limit=40)
    assert set(usage["routers"]) == {
        *(f"{side}.{n}.attention" for side in ("encoder", "decoder") for n in (1, 2)),
        *(f"decoder.{n}.cross" for n in (1, 2)),
    }
    router = usage["routers"]["encoder.2.attention"]
    for tokens in router["specific"].values():
        # two of four experts for each time it was read
        assert all(sum(router["counts"][one["token"]]) >= 2 * SEEN for one in tokens)
    with pytest.raises(ValueError, match="has no routers: its model is dense"):
        expert_usage(folder / "dense")


def test_dead_and_faint_experts_are_named():
    from tenuto.expert_usage import _describe

    table = np.array([[40, 0, 0, 60], [59, 0, 1, 40]])
    found = _describe(table, ["a", "b"], np.array([True, False]))
    assert found["dead"] == [1] and found["faint"] == [2] and found["largest"] == 2.0
    assert found["specific"][3] == [{"token": "a", "pmi": round(log(1.2), 3), "count": 60, "share": 0.6}]
    assert found["specific"][0] == found["specific"][1] == []


def test_names_of_bytes_are_unique():
    """A byte-level vocabulary: words with their blank, parts of characters as they are stored."""
    from tenuto.data.parallel import joint_tokenizer
    from tenuto.expert_usage import token_names

    words = joint_tokenizer([("a dog runs", "ein Hund läuft")] * 20, "bpe", 300)
    names = token_names(words)
    assert len(set(names)) == len(names) == len(words)
    assert "▁dog" in names and names[:3] == ["<pad>", "<bos>", "<eos>"]


def test_pictures_of_experts(run, tmp_path):
    """One panel a router, a square for each token and expert that met; in the report's style as well."""
    from tenuto.expert_picture import chosen_tokens, picture, serving, spoken
    from tenuto.expert_usage import expert_usage

    usage = expert_usage(run, ["validation", "test"])
    picture(usage, tmp_path / "deep" / "experts.svg")
    svg = (tmp_path / "deep" / "experts.svg").read_text()
    assert svg.count('<g id="axes_') == len(usage["routers"]) and "<image" not in svg
    assert spoken("decoder.cross") == "decoder, cross-attention"
    assert spoken("encoder.2.feed_forward") == "encoder, layer 2, feed-forward"
    router = usage["routers"]["encoder.feed_forward"]
    drawn = serving("who", router)
    squares = sum(n > 0 for token in chosen_tokens(router) for n in router["counts"][token])
    assert 'aria-label="who"' in drawn and drawn.count("var(--accent)") >= squares > 0


# the report


class Tags(HTMLParser):
    """Fails at a tag that is not closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "path", "rect", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def test_report(run):
    """What it measured, on one self-contained page."""
    from tenuto.pairs_page import measure_pairs_report, pairs_page

    figures = measure_pairs_report(run, limit=12, thresholds=(0.5,), repeats=1)
    json.dumps(figures)
    assert figures["examples"]["validation"][0] <= 12 and set(figures["sets"]) == {"validation", "test"}
    for part in figures["texts"]:
        assert len(part["source"]) == len(part["source_steps"])
        assert len(part["answer"]) == len(part["answer_steps"])
        assert (
            "".join(part["answer"]).removesuffix("<eos>").split() == part["target"].split()
            or not part["right"]
        )
    html = pairs_page(figures)
    reader = Tags()
    reader.feed(re.sub(r"<svg.*?</svg>", "", html, flags=re.S))
    assert reader.open == []
    for piece in (
        "Training", "How good the answers are", "commonest answer %", "How deep it goes", "The knob",
        "Who serves whom", "decoder, cross-attention", "Token by token",
    ):  # fmt: skip
        assert piece in html, piece
    assert not re.search(r"https?://|<script|<link|@import|src=|url\((?!#)", html)


# the command line


def command(capsys, *words):
    """Exit code, stdout and stderr of `tenuto WORDS`."""
    from tenuto.cli import main

    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_sweep_on_the_command_line(run, tmp_path, capsys):
    """Its own flags, a result file, a table; those of other models are refused."""
    words = ("sweep", run, "--thresholds", "0.5", "--repeats", 1, "--limit", 5)
    code, out, _ = command(capsys, *words, "--result", tmp_path / "r.json", "--json")
    figures = json.loads(out)
    assert code == 0 and json.loads((tmp_path / "r.json").read_text())["figures"] == figures
    assert figures["sets"]["validation"]["examples"] == 5
    code, out, _ = command(capsys, *words, "--sets", "test", "--beams", 2)
    assert code == 0 and "encoder skips %" in out and "5 examples, beams 2" in out
    code, _, err = command(capsys, *words, "--generated", 5)
    assert code == 2 and "--generated has nothing to set" in err
    code, _, err = command(capsys, "sweep", run, "--thresholds", "1.5")
    assert code == 1 and "outside 0..1" in err


def test_experts_and_report_on_the_command_line(run, tmp_path, capsys):
    code, out, _ = command(
        capsys,
        "experts",
        run,
        "--sets",
        "test",
        "--picture",
        tmp_path / "e.svg",
        "--result",
        tmp_path / "e.json",
    )
    assert code == 0 and "decoder, cross-attention: entropy" in out and (tmp_path / "e.svg").is_file()
    assert json.loads((tmp_path / "e.json").read_text())["figures"]["sets"] == ["test"]
    code, out, _ = command(capsys, "report", run, "--limit", 6, "-o", tmp_path / "page.html")
    assert code == 0 and "Who serves whom" in (tmp_path / "page.html").read_text()
    code, _, err = command(capsys, "depths", run)
    assert code == 1 and "`tenuto report` shows its depths" in err


def test_compare_on_the_command_line(folder, tmp_path, capsys):
    """Keys of every row's recipe may be changed; the cells that are done are read."""
    rows = {"sut": {}, "dense": {"base": str(folder / "transformer.yaml")}}
    words = ("compare", plan(folder, seeds=[0], rows=rows), "--output", tmp_path / "rows")
    changes = ("--training.max_steps=2", "--training.per_device_train_batch_size", "4")
    code, out, err = command(capsys, *words, *changes, "--only", "sut*")
    assert code == 0, err
    assert "1 of 2 models" in out
    code, out, _ = command(capsys, *words, *changes)
    assert code == 0 and "minus sut [95%]" in out and "examples" in out and "The commonest answer gets" in out
    assert (
        yaml.safe_load((tmp_path / "rows" / "dense-0" / "recipe.yaml").read_text())["training"]["max_steps"]
        == 2
    )
    code, _, err = command(capsys, *words, "--training.max_steps=3")
    assert code == 1 and "was begun with another training" in err
