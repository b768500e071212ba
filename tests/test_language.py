"""Language models measured: sweeps, depths, matrix, equal-FLOPs, collapse, from recipes to figures."""

import itertools
import json

import numpy as np
import pytest
import torch
import yaml

from tenuto.cli import main
from tenuto.collapse import collapse
from tenuto.isoflops import Iso, cells_of, fit_exponent, training_macs
from tenuto.language import corpus_of, measure
from tenuto.language_sweep import difference, sweep_language
from tenuto.matrix import ledger_macs
from tenuto.text_depths import adjusted, bands, grouped, spearman, token_kinds

RECIPE = {
    "preset": "looped-tiny",
    "head": "causal",
    "config": {"policy": "exit_head", "objective": "sampled", "num_coda_layers": 0, "halt_bias": 0.0},
    "data": {
        "text": {
            "sources": [{"path": "prose", "limit_bytes": 60000, "blank_lines": True},
                        {"path": "math", "limit_bytes": 60000}],
            "tokenizer": "byte",
            "length": 48,
            "validation_rows": 12,
        }
    },
    "schedule": {"halting_from": 0.5},
    "training": {"max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 0.01, "logging_steps": 4},
}  # fmt: skip


def recipe(folder, **changes):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    assert main(["train", str(recipe(folder)), "--output", str(folder / "run")]) == 0
    return folder / "run"


def answer(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_learns_and_says_so(trained):
    figures = json.loads((trained / "training.json").read_text())
    losses = [row["loss"] for row in figures["history"] if "loss" in row]
    assert losses[-1] < losses[0] and figures["validation_loss"] < np.log(259) + 1


def test_evaluate_equals_a_direct_pass(trained, capsys):
    from tenuto.evaluate import load

    figures = answer(capsys, "evaluate", str(trained), "--max_steps", "2", "--min_steps", "2")
    loaded = load(trained)
    corpus = corpus_of(loaded)
    total, count = 0.0, 0
    for row in range(len(corpus.labels)):
        one = {name: value[row : row + 1] for name, value in corpus.inputs.items() if name != "labels"}
        with torch.no_grad():
            logits = loaded.model(**one, max_steps=2, min_steps=2).logits[0]
        for place in range(1, logits.shape[0]):
            label = int(corpus.labels[row, place])
            if label != -100:
                total -= float(logits[place - 1].log_softmax(-1)[label])
                count += 1
    assert figures["loss"] == pytest.approx(total / count, abs=2e-4)
    assert figures["mean_depth"] == 2.0
    # both topics count alike, in bits per byte of their text
    by_group = figures["by_group"]
    assert figures["bits_per_byte"] == pytest.approx(
        np.mean([row["bits_per_byte"] for row in by_group.values()]), abs=1e-3
    )


def test_sweep_lists_fixed_depths_and_thresholds(trained, capsys):
    figures = answer(capsys, "sweep", str(trained), "--thresholds", "1,0.5,0", "--repeats", "1")
    assert [row["max_steps"] for row in figures["fixed"]] == [1, 2, 3, 4]
    full, low = figures["fixed"][-1], figures["rows"][-1]
    assert figures["rows"][0]["loss"] == full["loss"] and figures["rows"][0]["mean_depth"] == 4
    assert low["mean_depth"] == 1 and low["loss"] == figures["fixed"][0]["loss"]
    # a threshold of 1 computes what full depth does, and asks: dearer, hence not better than fixed
    assert figures["rows"][0]["macs_share"] > 1 and figures["rows"][0]["saved_over_fixed"] <= 0
    # what fixed depths reach: the best of all straight lines between two of them, and of those that cost no more
    points = [(row["macs_per_token"], row["loss"]) for row in figures["fixed"]]
    for row in figures["rows"]:
        reached = [loss for cost, loss in points if cost <= row["macs_per_token"]]
        for (c0, l0), (c1, l1) in itertools.combinations(points, 2):
            if c0 <= row["macs_per_token"] <= c1:
                reached.append(l0 + (l1 - l0) * (row["macs_per_token"] - c0) / (c1 - c0))
        assert row["saved_over_fixed"] == pytest.approx(min(reached) - row["loss"], abs=2e-4)


def test_frontier_is_what_fixed_depths_reach():
    """A depth that costs more and loses more is nobody's yardstick; nor is one above a line between two others."""
    from tenuto.language_sweep import frontier

    assert frontier([(1, 3.0), (2, 2.0), (3, 2.5), (4, 2.2)]) == ([1, 2], [3.0, 2.0])
    assert frontier([(1, 3.0), (2, 2.9), (3, 1.0)]) == ([1, 3], [3.0, 1.0])
    assert frontier([(1, 3.0), (2, 1.5), (3, 1.0)]) == ([1, 2, 3], [3.0, 1.5, 1.0])


def test_spread_thresholds_run_shares_of_the_loops(trained):
    from tenuto.calibrate import only_rows, spread_thresholds
    from tenuto.evaluate import load

    model = load(trained).model
    corpus = only_rows(corpus_of(load(trained)), np.arange(6))
    found = spread_thresholds(model, corpus, shares=(0.75, 0.25), rounds=8)
    assert found == sorted(found, reverse=True) and 1 <= len(found) <= 2
    for threshold, share in zip(found, (0.75, 0.25), strict=False):
        # the highest of its grid that runs no more than the share, from one loop to four
        assert measure(model, corpus, threshold=threshold).mean_depth <= 1 + 3 * share + 1e-6
        assert (
            measure(model, corpus, threshold=min(1.0, threshold + 2**-8)).mean_depth >= 1 + 3 * share - 1e-6
        )


def test_frozen_gap_is_what_stopped_tokens_cost_the_others(trained, capsys):
    nobody = answer(capsys, "depths", str(trained), "--threshold", "1")
    assert nobody["frozen_gap"] == 0.0
    some = answer(capsys, "depths", str(trained), "--threshold", "0.5")
    from tenuto.evaluate import load
    from tenuto.text_depths import losses_by_depth

    loaded = load(trained)
    corpus = corpus_of(loaded)
    said, by_depth = measure(loaded.model, corpus, threshold=0.5), losses_by_depth(loaded.model, corpus)
    gaps = [
        said.losses[row, place] - by_depth[row, place, said.depths[row, place - 1] - 1]
        for row, place in np.argwhere(~np.isnan(said.losses))
    ]
    assert some["frozen_gap"] == pytest.approx(np.mean(gaps), abs=2e-5)


def test_looped_members_stand_beside_their_best_depth():
    from tenuto.isoflops import members_table

    def looped(seed, losses, own):
        fixed = [{"max_steps": d, "loss": loss, "macs_per_token": 10 * d} for d, loss in enumerate(losses, 1)]
        best = min(fixed, key=lambda one: one["loss"])
        return {"member": "looped", "seed": seed, "loops": 2, "parameters": 5, "train_cpu_seconds": 1.0, "loss": own,
                "macs_per_token": 15, "fixed": fixed, "best_fixed": best, "best": {"threshold": 0.5}}  # fmt: skip

    dense = {"member": "dense", "loops": 1, "parameters": 5, "train_cpu_seconds": 1.0, "macs_per_token": 9}
    some = [looped(0, [3.0, 4.0], 3.5), looped(1, [6.0, 5.0], 5.5), {**dense, "seed": 0, "loss": 2.0},
            {**dense, "seed": 1, "loss": 4.5}]  # fmt: skip
    rows = {row["member"]: row for row in members_table(some)}
    assert rows["looped, full depth"]["loss"] == 4.5 and rows["looped, best depth"]["loss"] == 4.0
    assert (
        rows["looped, adaptive"]["minus_looped"] == 0.5 and rows["looped, adaptive"]["macs_per_token"] == 15
    )
    assert rows["dense"]["minus_looped"] == -0.75 and rows["looped, best depth"]["minus_looped"] == 0
    low, high = rows["dense"]["minus_looped_interval"]
    # Student's t of one degree of freedom: half of 12.706 x 0.5
    assert (low + high) / 2 == pytest.approx(-0.75) and high - low == pytest.approx(12.706 * 0.5, abs=1e-3)


def test_a_fixed_depth_of_a_policy_that_mixes_is_the_mixture():
    """Nobody stops, yet what is read is the mixture of states that it was trained with, not the last state."""
    from tenuto.language_sweep import at_depth
    from tenuto.presets import build, preset

    torch.manual_seed(0)
    model = build(preset("looped-tiny", policy="stick_breaking", num_loops=3, vocab_size=40), "causal").eval()
    ids = torch.randint(3, 40, (2, 9))
    with torch.no_grad():
        trained = model(ids, threshold=1.0, use_cache=False)
        assert torch.equal(model(ids, use_cache=False, **at_depth(model.config, 3)).logits, trained.logits)
        assert trained.depths.eq(3).all()
        bare = model(ids, min_steps=3, max_steps=3, use_cache=False)
        assert not torch.allclose(bare.logits, trained.logits)
    assert at_depth(preset("looped-tiny", policy="exit_head"), 2) == {"max_steps": 2, "min_steps": 2}
    assert at_depth(preset("looped-tiny"), 2) == {"max_steps": 2}


def test_another_rule_reads_the_same_model(trained, capsys):
    plain = answer(capsys, "evaluate", str(trained), "--policy", "fixed")
    margin = answer(capsys, "evaluate", str(trained), "--policy", "margin", "--threshold", "1")
    assert margin["loss"] == plain["loss"] and margin["macs_per_token"] > plain["macs_per_token"]
    assert main(["evaluate", str(trained), "--policy", "act"]) == 1
    assert "weights of its own" in capsys.readouterr().err


def test_depths_of_a_language_model(trained, capsys, tmp_path):
    picture = tmp_path / "depths.svg"
    figures = answer(
        capsys, "depths", str(trained), "--threshold", "0.5", "--rules", "--picture", str(picture)
    )
    assert set(figures["by_topic"]) == {"prose", "math"} and picture.stat().st_size > 5000
    total = sum(row["tokens"] for row in figures["by_kind"].values())
    assert total == figures["tokens"] == sum(row["tokens"] for row in figures["by_position"].values())
    oracle = figures["oracle"]
    assert oracle["loss"] <= min(oracle["loss_by_depth"])
    # every depth is a pass in which nobody stops, whatever the threshold
    for depth in (1, 4):
        plain = answer(capsys, "evaluate", str(trained), "--policy", "fixed", "--max_steps", str(depth))
        assert oracle["loss_by_depth"][depth - 1] == pytest.approx(plain["loss"], abs=2e-4)
    assert oracle["headroom"] == pytest.approx(min(oracle["loss_by_depth"]) - oracle["loss"], abs=2e-4)
    assert {row["rule"] for row in figures["rules"]} == {
        "exit_head",
        "latent",
        "second_difference",
        "kl",
        "margin",
    }


def test_algorithmic_tasks_train_and_are_measured_by_depth(tmp_path, capsys):
    data = {"algorithmic": {"task": "lookup", "train": 300}}
    path = recipe(tmp_path, data=data, config={"policy": "stick_breaking", "act_weight": 0.01})
    assert main(["train", str(path), "--output", str(tmp_path / "run")]) == 0
    figures = answer(capsys, "evaluate", str(tmp_path / "run"), "--sets", "validation,test-9")
    assert set(figures["accuracy"]) == {"validation", "test-9"}
    assert all(0 <= value <= 100 for value in figures["accuracy"].values())


def test_problems_are_compared_set_by_set(tmp_path, capsys):
    """Halting models against every fixed depth of the plan, thresholds chosen on the validation problems."""
    base = recipe(
        tmp_path, schedule={},
        data={"algorithmic": {"task": "lookup", "train": 200, "train_depths": [4, 5], "test_depths": [6]}},
        config={"policy": "stick_breaking", "act_weight": 0.01, "num_loops": 2, "num_coda_layers": 0},
        training={"max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1},
    )  # fmt: skip
    plan = tmp_path / "plan.yaml"
    rows = {"halting": {}, "fixed": {"config": {"policy": "fixed", "act_weight": 0.0}}}
    keys = {"base": str(base), "against": "halting", "seeds": [0, 1], "thresholds": [0.9, 0.5], "rows": rows}
    plan.write_text(yaml.safe_dump({**keys, "sets": ["test-6"]}, sort_keys=False))
    figures = answer(capsys, "compare", str(plan), "--output", str(tmp_path / "out"))
    halting, fixed = (row["problems"] for row in figures["rows"])
    assert set(halting) == set(fixed) == {"validation", "test-6"}
    assert "over_fixed" in halting["test-6"] and "over_fixed" not in fixed["test-6"]
    assert len(halting["test-6"]["thresholds"]) == len(fixed["test-6"]["max_steps"]) == 2
    plain = answer(
        capsys, "evaluate", str(tmp_path / "out" / "fixed-1"), "--sets", "test-6", "--max_steps", "1"
    )
    kept = next(one for one in figures["results"] if (one["row"], one["seed"]) == ("fixed", 1))
    assert kept["quality"]["test-6"]["fixed"][0]["accuracy"] == plain["accuracy"]["test-6"]
    assert main(["compare", str(plan), "--output", str(tmp_path / "out")]) == 0
    assert "above fixed depths, points" in capsys.readouterr().out.replace("\n", " ")


def test_halting_is_held_to_the_best_of_all_fixed_depths():
    from tenuto.compare_problems import problems_lines

    def model(row, seed, fixed, knob=()):
        def rows(label, some):
            return [
                {label: one[0], "accuracy": one[1], "macs_per_token": one[2], "mean_depth": 1.0}
                for one in some
            ]

        part = {"fixed": rows("max_steps", fixed), "rows": rows("threshold", knob)}
        # on the test everything is ten points worse
        worse = {
            kind: [{**one, "accuracy": one["accuracy"] - 10} for one in some] for kind, some in part.items()
        }
        return {"row": row, "seed": seed, "quality": {"validation": part, "test": worse}}

    some = [
        model(
            "halting", 0, [(1, 50.0, 10), (2, 80.0, 20)], [(0.9, 80.0, 18), (0.5, 79.6, 15), (0.1, 60.0, 11)]
        ),
        model("fixed", 0, [(1, 40.0, 10), (2, 90.0, 20)]),
        model("fixed", 1, [(1, 60.0, 10), (2, 94.0, 20)]),
    ]
    lines = problems_lines(some)
    # the cheapest threshold within half a point; at 15 MACs fixed depths reach the middle of 50 and 92
    assert lines["halting"]["test"]["thresholds"] == [0.5]
    assert lines["halting"]["test"]["over_fixed"]["mean"] == pytest.approx(69.6 - (71.0 - 10))
    assert lines["fixed"]["test"]["accuracy"]["mean"] == 82.0 and lines["fixed"]["test"]["max_steps"] == [
        2,
        2,
    ]


def test_matrix_resumes_and_tabulates(tmp_path, capsys):
    base = recipe(tmp_path, config={"num_coda_layers": 0}, schedule={})
    plan = tmp_path / "matrix.yaml"
    plan.write_text(
        yaml.safe_dump(
            {
                "base": str(base),
                "bodies": {"attention": {}, "thin": {"intermediate_size": 16}},
                "policies": {"fixed": {"policy": "fixed"}, "act": {"policy": "act", "act_weight": 0.01}},
                "budgets": ["loops", "macs"],
                "thresholds": [0.5],
            }
        )
    )
    first = answer(
        capsys, "matrix", str(plan), "--output", str(tmp_path / "out"), "--only", "*-fixed-loops-0"
    )
    assert first["done"] == 2 and first["cells"] == 6
    assert main(["matrix", str(plan), "--output", str(tmp_path / "out"), "--only", "nothing*"]) == 1
    assert "No cell is called" in capsys.readouterr().err
    kept = tmp_path / "out" / "attention-fixed-loops-0" / "cell.json"
    before = kept.stat().st_mtime_ns
    whole = answer(capsys, "matrix", str(plan), "--output", str(tmp_path / "out"))
    assert whole["done"] == 6 and kept.stat().st_mtime_ns == before
    cells = {(row["body"], row["policy"], row["budget"]): row for row in whole["rows"]}
    # the thinner body runs more loops for the same arithmetic
    thin = cells["thin", "fixed", "macs"]
    assert thin["loops"] > 4
    want = cells["attention", "fixed", "loops"]["macs_per_token"]
    equal = cells["thin", "fixed", "loops"]["macs_per_token"]
    assert abs(thin["macs_per_token"] - want) < abs(equal - want)
    # a policy is held against every depth of every model of its body, at its own MACs
    for row in whole["rows"]:
        assert (row["saved_over_fixed"] is None) == (row["policy"] == "fixed")
    act = cells["thin", "act", "loops"]
    points = [
        (depth["macs_per_token"], depth["loss"])
        for one in whole["results"]
        if one["body"] == "thin"
        for depth in one["fixed"]
    ]
    lines = [
        a + (b - a) * (act["macs_per_token"] - x) / (y - x)
        for x, a in points
        for y, b in points
        if x <= act["macs_per_token"] <= y and x < y
    ]
    lines += [loss for macs, loss in points if macs <= act["macs_per_token"]]
    assert act["saved_over_fixed"] == pytest.approx(min(lines) - act["loss"], abs=2e-4)
    assert (tmp_path / "out" / "picture.svg").is_file()


def test_isoflops_members_have_equal_parameters_or_equal_arithmetic(tmp_path):
    from tenuto.presets import build, preset

    plan = Iso(base=str(recipe(tmp_path)), seeds=[0], widths=[16, 32])
    cells = {cell.name: cell for cell in cells_of(plan)}
    with torch.device("meta"):
        models = {
            name: build(preset(one.recipe.preset, **one.recipe.config), "causal")
            for name, one in cells.items()
        }

    def core(name):
        return sum(p.numel() for p in models[name].stack.core.parameters())

    def macs(name):
        stack = models[name].stack
        return stack.token_macs() - (stack.config.num_loops - 1) * stack.policy.row_macs

    assert core("dense-same-parameters-0") == core("looped-0")
    assert core("dense-unrolled-0") == 4 * core("looped-0") and macs("dense-unrolled-0") == macs("looped-0")
    assert core("grid-32-4-0") * 4 == core("grid-32-2-0") * 2 == core("grid-32-1-0")
    # the same training arithmetic by the ledger: MACs of a token x steps
    steps = {name: one.recipe.training["max_steps"] for name, one in cells.items()}
    more = {kind: f"dense-same-training-MACs-more-{kind}-0" for kind in ("tokens", "layers")}
    assert steps[more["tokens"]] > steps["looped-0"] == steps[more["layers"]] == 12
    assert core(more["tokens"]) == core("looped-0")
    spent = training_macs(cells["looped-0"].recipe)
    base = cells["looped-0"].recipe
    once, each = ledger_macs(
        base, {**base.config, "policy": "fixed", "objective": "policy", "act_weight": 0.0}
    )
    # 2.5 loops of 4 on average, forward and backward; for the head's labels the rest and three readings, forward only
    readings = 3 * models["looped-0"].config.hidden_size * 259
    late = 1 - base.schedule.halting_from
    assert spent == pytest.approx(once + 2.5 * each + late * (1.5 * each + readings) / 3)
    for kind, name in more.items():
        one = cells[name].recipe
        once, each = ledger_macs(one, one.config)
        # layers come whole
        near = 8 if kind == "tokens" else 100 * 0.5 * each / one.config["num_core_layers"] / spent
        assert 12 * spent == pytest.approx(steps[name] * (once + each), rel=(near + 1) / 100)


def test_ledger_macs_are_of_a_full_row(tmp_path):
    """Twice the loops cost twice the core, scores included."""
    from tenuto.recipe import load_recipe

    base = load_recipe(recipe(tmp_path))
    config = {**base.config, "policy": "fixed"}
    once, each = ledger_macs(base, config)
    with torch.no_grad():
        from tenuto.presets import build, preset

        model = build(preset(base.preset, **{"vocab_size": 259, **config, "num_loops": 5}), "causal").eval()
        total = model(torch.ones(1, 48, dtype=torch.long), use_cache=False).compute.total / 48
    assert once + 5 * each == pytest.approx(total)


@pytest.mark.parametrize("phi", [0.0, 0.46, 1.0])
def test_exponent_is_recovered(phi):
    points = [
        (1000 * w * w, 12000 * w * w // r, r, 2.0 + 9.0 * (1000 * w * w + r**phi * (12000 * w * w // r)) ** -0.3)
        for w in (1, 2, 4) for r in (1, 2, 4)
    ]  # fmt: skip
    found = fit_exponent(points, draws=3)
    assert found["phi"] == pytest.approx(phi, abs=0.03) and found["residual"] < 1e-3
    with pytest.raises(ValueError, match="r = 1 at two widths"):
        fit_exponent(points[:3], draws=3)


def test_collapse_names_the_end_it_is_at():
    floor, top, split = np.ones(100), np.full(100, 4), np.array([1, 4] * 50)
    assert "floor" in collapse(floor, 1, 4)["advice"]
    assert "nothing stops" in collapse(top, 1, 4)["advice"]
    assert not collapse(split, 1, 4)["collapsed"] and collapse(split, 1, 4)["advice"] is None
    assert not collapse(top, 4, 4)["collapsed"]  # the floor is the ceiling: nothing was to decide


def test_training_warns_of_a_collapse(tmp_path, caplog):
    config = {"policy": "stick_breaking", "act_weight": 5.0, "halt_bias": 6.0, "halt_threshold": 0.5}
    path = recipe(tmp_path, config=config, schedule={})
    with caplog.at_level("WARNING", "tenuto"):
        assert main(["train", str(path), "--output", str(tmp_path / "run")]) == 0
    assert "everything stops at the floor" in caplog.text


def test_token_kinds_follow_words():
    class Words:
        pieces = ("<bos>", "The", " jump", "ing", " dog", "s", ",", " 12", "\n", " of", "x", ".")
        all_special_ids = (0,)

        def __len__(self):
            return len(self.pieces)

        def batch_decode(self, ids):
            return [self.pieces[one] for (one,) in ids]

    ids = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    # "ofx" is one word of two pieces and no function word
    assert token_kinds(ids, Words())[0].tolist() == [6, 0, 1, 2, 1, 2, 4, 3, 5, 1, 2, 4]


def test_bands_hold_alike_many_running_tokens():
    counts = np.array([100, 50, 25, 12, 6, 4, 2, 1])
    ids = np.repeat(np.arange(8), counts)[None]
    band = bands(counts, ids, 4)
    assert (
        band[0][ids[0] == 7].tolist() == [0]
        and (np.diff([band[0][ids[0] == k][0] for k in range(8)]) <= 0).all()
    )


def test_grouped_and_adjusted_on_known_data():
    random = np.random.default_rng(0)
    topic = random.integers(2, size=4000)
    document = np.arange(4000) // 40
    loss = random.normal(size=4000) + 2.0 * topic
    # depth depends on the loss alone; the topics differ in it by two
    depth = 0.5 * loss + random.normal(0, 0.1, 4000)
    raw = grouped(depth, topic, ("easy", "hard"), document)
    same = adjusted(depth, topic, ("easy", "hard"), loss[:, None], document)
    assert raw["hard"]["mean"] - raw["easy"]["mean"] == pytest.approx(1.0, abs=0.1)
    assert raw["hard"]["effect"] == pytest.approx(1.0 / np.sqrt(0.26), abs=0.15)
    assert same["hard"]["mean"] == pytest.approx(same["easy"]["mean"], abs=0.02)
    assert raw["easy"]["interval"][0] < raw["easy"]["mean"] < raw["easy"]["interval"][1]


def test_spearman_is_of_ranks():
    values = np.array([1.0, 2.0, 3.0, 4.0, 50.0])
    assert spearman(values, np.exp(values / 10)) == 1 and spearman(values, -values) == -1
    assert spearman(values, np.ones(5)) == 0
    assert spearman(np.array([1, 1, 2, 2]), np.array([1, 2, 2, 3])) == pytest.approx(0.7071, abs=1e-3)


def test_the_best_threshold_is_judged_on_other_documents(trained):
    """`best` is the one that saves most on the first half; its figure is the second half's."""
    from tenuto.evaluate import load
    from tenuto.language_sweep import halves, saved

    loaded = load(trained)
    corpus, model = corpus_of(loaded), loaded.model
    fit, test = halves(corpus)
    figures = sweep_language(trained, [0.7, 0.5, 0.3], repeats=1)
    fixed = [measure(model, corpus, max_steps=depth, min_steps=depth) for depth in (1, 2, 3, 4)]
    passes = {one: measure(model, corpus, threshold=one) for one in (0.7, 0.5, 0.3)}
    want = max(passes, key=lambda one: saved(passes[one], fixed, fit))
    assert figures["best"]["threshold"] == want
    assert figures["best"]["saved_over_fixed"] == saved(passes[want], fixed, test)
    assert figures["best"]["loss"] == round(passes[want].on(test).loss, 4)
    depth = int(np.argmin([one.on(fit).loss for one in fixed]))
    assert figures["best_fixed"]["max_steps"] == depth + 1
    assert figures["best_fixed"]["loss"] == round(fixed[depth].on(test).loss, 4)
    allowed = [one for one in passes if passes[one].on(fit).loss <= 1.005 * fixed[3].on(fit).loss]
    cheapest = min(allowed, key=lambda one: passes[one].on(fit).macs, default=None)
    assert figures["target"] is None if cheapest is None else figures["target"]["threshold"] == cheapest


def test_pieces_keep_split_characters_whole():
    from tenuto.data.text_tokenizers import byte_tokenizer
    from tenuto.written import pieces

    words = byte_tokenizer()
    ids = words("café “x”")["input_ids"]
    assert "".join(pieces(words, ids)) == "café “x”" and len(pieces(words, ids)) == len(ids)


def test_difference_is_paired_and_by_document(trained):
    from tenuto.evaluate import load

    loaded = load(trained)
    corpus = corpus_of(loaded)
    said = measure(loaded.model, corpus)
    found = difference(corpus.document, said.losses + 0.25, said.losses)
    assert found["difference"] == pytest.approx(0.25, abs=1e-4)
    assert found["interval"] == pytest.approx([0.25, 0.25], abs=1e-4)
    with pytest.raises(ValueError, match="fixed depth"):
        sweep_language(trained, [0.5], policy="fixed")


def test_bisect_finds_the_end_of_what_is_allowed():
    from tenuto.calibrate import bisect

    assert bisect(lambda one: one >= 0.3, True, 12) == pytest.approx(0.3, abs=1e-3)
    assert bisect(lambda one: one <= 0.3, False, 12) == pytest.approx(0.3, abs=1e-3)
    assert bisect(lambda one: False, True, 12) == 1.0 and bisect(lambda one: False, False, 12) == 0.0


def test_calibrate_meets_its_target_on_other_documents_and_saves(trained, capsys, tmp_path):
    import shutil

    from tenuto.evaluate import load
    from tenuto.language_sweep import halves

    corpus = corpus_of(load(trained))
    fit, test = (corpus.document[rows] for rows in halves(corpus))
    assert len(fit) and len(test) and not set(fit[fit >= 0]) & set(test[test >= 0])
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    figures = answer(capsys, "calibrate", str(folder), "--max_steps", "60", "--save")
    assert 25 <= figures["steps_percent"] <= 75 and figures["macs_percent"] < 100
    assert json.loads((folder / "config.json").read_text())["halt_threshold"] == figures["threshold"]
    assert answer(capsys, "evaluate", str(folder))["mean_depth"] < 4
    assert main(["calibrate", str(folder)]) == 1
    assert "one target" in capsys.readouterr().err


def test_generate_writes_with_depths(trained, capsys):
    said = answer(
        capsys, "generate", str(trained), "--prompt", "It was", "--tokens", "6", "--threshold", "0.5"
    )
    assert len(said["tokens"]) == len(said["steps"]) and said["prompt"] == 6  # bytes
    assert said["text"].startswith("It was") and all(1 <= step <= 4 for step in said["steps"])


def test_report_is_one_page(trained, capsys, tmp_path):
    path = tmp_path / "page" / "report.html"
    figures = answer(capsys, "report", str(trained), "-o", str(path), "--limit", "8")
    html = path.read_text()
    assert (
        figures["report"] == str(path)
        and "<script" not in html
        and "http" not in html.replace("http://www.w3", "")
    )
    for title in ("Where the loops go", "The knob, beside every fixed depth", "A language model writes"):
        assert title in html
