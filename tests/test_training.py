"""Training's own parts: optimizer, curriculum, augmentation, schedules, recipes, accumulation, casts, compile."""

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tenuto.collapse import ADVICE, collapse
from tenuto.compare import depth_curve, picture
from tenuto.data import logical_inference as logic
from tenuto.data.pairs import FIRST_RELATION, Curriculum, PairDataset, tokenizer
from tenuto.models.halting import POLICIES
from tenuto.models.looped import LoopedConfig
from tenuto.optim import MuonAdamW, orthogonalize, parameter_groups
from tenuto.presets import build, config_of, preset
from tenuto.recipe import Data, Recipe, Schedule, load_recipe
from tenuto.train import start_from, train
from tenuto.trainer import AdaptiveTrainer

ROOT = Path(__file__).parents[1]
PLANS = {
    "matrix": ROOT / "recipes/lm/matrix.yaml",
    "exit-labels": ROOT / "recipes/lm/exit-labels.yaml",
    "isoflops": ROOT / "recipes/lm/isoflops.yaml",
    "depth": ROOT / "recipes/algorithmic/depth.yaml",
    "collapse": ROOT / "recipes/lm/collapse.yaml",
    "stories": ROOT / "recipes/routed/stories.yaml",
    "ablations": ROOT / "recipes/routed/ablations.yaml",
    # what they hold is in test_pairs.py
    "scan": ROOT / "recipes/scan/depth.yaml",
    "routed-scan": ROOT / "recipes/routed/scan.yaml",
    "cogs": ROOT / "recipes/cogs/depth.yaml",
    "translation": ROOT / "recipes/translation/ablations.yaml",
}
# begin with models that are not here
ABSENT = {
    ROOT / "recipes/routed/smollm2.yaml",
    ROOT / "recipes/routed/own.yaml",
    ROOT / "recipes/routed/own-base.yaml",
}
RECIPES = sorted(set(ROOT.glob("recipes/**/*.yaml")) - {*PLANS.values(), *ABSENT})


@pytest.fixture(scope="module")
def pairs():
    return [one for n in range(1, 7) for one in logic.load_bin("train", n)[:60]]


def tiny(**training) -> Recipe:
    return Recipe(
        preset="sut-tiny",
        config={"vocab_size": 21},
        data=Data(max_operators=2),
        training={"max_steps": 4, "per_device_train_batch_size": 8, "save_strategy": "no", **training},
    )


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (3, 6, 10)])
def test_orthogonalize_gives_singular_values_near_one(shape):
    """Muon's iteration, for matrices wide and tall and for a stack of experts."""
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_other_weights_take_adamw_steps():
    """The AdamW half equals PyTorch's."""
    ours, theirs = (torch.nn.Linear(4, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    group = {"params": list(ours.parameters()), "muon": False, "lr": 0.01, "weight_decay": 0.1}
    one = MuonAdamW([group], betas=(0.9, 0.98))
    two = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    for _ in range(5):
        x = torch.randn(6, 4)
        for model, optimizer in ((ours, one), (theirs, two)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert_close(ours.weight, theirs.weight)
    assert_close(ours.bias, theirs.bias)


def test_muon_takes_the_block_matrices_and_nothing_else():
    """Every parameter is in one group; embeddings, routers, halting nets and heads are AdamW's."""
    model = build(preset("sut-tiny"))
    muon, matrices, vectors = parameter_groups(model, 0.01, 0.001, 0.1)
    names = {id(weight): name for name, weight in model.named_parameters()}
    taken = [names[id(weight)] for weight in muon["params"]]
    assert len(names) == sum(len(group["params"]) for group in (muon, matrices, vectors))
    assert {name.split(".")[-2] for name in taken} == {"query", "key", "value", "output", "up", "down"}
    assert not any("router" in name or "policy" in name for name in taken)


@pytest.mark.parametrize("kind", ["cosine", "constant", "reduce_lr_on_plateau"])
def test_an_exit_head_learns_at_the_rate_of_its_own_phase(tmp_path, kind):
    """It starts when the others' rate is nearly spent: its own is whole until then and falls to 0 over its phase."""
    from transformers import TrainingArguments

    from tenuto.recipe import Recipe, Schedule

    model = build(preset("looped-tiny", policy="exit_head", num_coda_layers=0), "causal")
    recipe = Recipe(head="causal", preset="looped-tiny", schedule=Schedule(halting_from=0.8), training={})
    trainer = object.__new__(AdaptiveTrainer)
    trainer.recipe, trainer.model, trainer.optimizer, trainer.lr_scheduler = recipe, model, None, None
    trainer.args = TrainingArguments(
        output_dir=tmp_path, learning_rate=0.1, lr_scheduler_type=kind, max_steps=10, eval_strategy="steps"
    )
    trainer.callback_handler, trainer._created_lr_scheduler, trainer.model_wrapped = None, False, model
    trainer.optimizer_cls_and_kwargs = None
    trainer.create_optimizer()
    scheduler = trainer.create_scheduler(10, trainer.optimizer)
    late = [group for group in trainer.optimizer.param_groups if group["late"]]
    names = {id(weight): name for name, weight in model.named_parameters()}
    held = {names[id(weight)] for group in late for weight in group["params"]}
    assert held == {name for name in names.values() if ".policy." in name}
    if kind == "reduce_lr_on_plateau":
        return  # has no rates of groups to change
    rates = []
    for _ in range(10):
        trainer.optimizer.step()
        scheduler.step()
        rates.append(late[0]["lr"])
    assert rates == pytest.approx([0.1] * 8 + [0.05, 0.0])


@pytest.mark.parametrize("name, config", [
    ("looped-tiny", {"loop_scale": True, "input_injection": "decay", "ffn_experts": 4}),
    ("looped-tiny", {"mixer": "gated_delta", "memory_chunk": 4}),
    ("sut-tiny", {"relative_positions": "t5"}),
    ("sut-tiny", {"relative_positions": "window"}),
])  # fmt: skip
def test_vectors_do_not_decay_however_they_are_stacked(name, config):
    """Scales of loops and biases of experts, offsets and layers; every matrix, table and kernel does."""
    model = build(preset(name, **config), "causal" if name == "looped-tiny" else "classification")
    names = {id(weight): name for name, weight in model.named_parameters()}
    stay = {names[id(one)] for group in parameter_groups(model, 0.01, 0.001, 0.1) for one in group["params"]
            if not group["weight_decay"]}  # fmt: skip
    vectors = {name for name, weight in model.named_parameters() if weight.ndim < 2}
    ends = (".bias", "stack.scale")
    assert stay == vectors | {name for name in names.values() if name.endswith(ends)}
    stacked = {name for name in stay if dict(model.named_parameters())[name].ndim > 1}
    assert bool(stacked) == ("loop_scale" in config or name == "sut-tiny")


def test_augmented_pairs_keep_true_labels(pairs):
    """Swapping and renaming: the relation recomputed from the tokens is the label given."""
    data = PairDataset(pairs, "classification", swap=True, rename=True)
    changed = 0
    for index in range(len(pairs)):
        item = data[(index, 1000 + index)]
        tokens = logic.decode(item["ids"])
        middle = tokens.index("#SEP#")
        left, right = " ".join(tokens[1:middle]), " ".join(tokens[middle + 1 :])
        assert logic.RELATIONS[item["label"]] == logic.relation(left, right)
        changed += (left, right) != (pairs[index].left, pairs[index].right)
        again = data[(index, 1000 + index)]
        assert again == item
    assert changed > 0.8 * len(pairs)
    assert logic.decode(data[0]["ids"])[1:-1] == f"{pairs[0].left} #SEP# {pairs[0].right}".split()[:-1]


def test_batches_pad_and_answer_with_relation_tokens(pairs):
    """Classification labels are classes, text-to-text labels the relations' tokens."""
    data, text = (PairDataset(pairs, head) for head in ("classification", "text-to-text"))
    batch = data.collate([data[0], data[-1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape
    assert ((batch["input_ids"] == logic.PAD) == (batch["attention_mask"] == 0)).all()
    answer = text.collate([text[0]])["labels"]
    assert answer.shape == (1, 1) and answer.item() - FIRST_RELATION == data[0]["label"]
    said = tokenizer()(f"<bos> {pairs[0].left} #SEP# {pairs[0].right}")["input_ids"]
    assert said == data[0]["ids"]
    first = batch["token_type_ids"][0].tolist()
    assert sum(first) == len(said) - said.index(logic.SEP) and first[said.index(logic.SEP)] == 1


def test_curriculum_rises_and_is_a_function_of_the_seed(pairs):
    """From 2 operators to all at `until`, in batches of like length; the same seed gives the same run."""
    data = PairDataset(pairs, "classification")
    run = Curriculum(data, 400, 8, seed=3, start=2, until=0.5)
    keys = list(run)
    assert len(keys) == len(run) == 3200 and keys == list(run)
    assert keys != list(Curriculum(data, 400, 8, seed=4, start=2, until=0.5))
    most = [max(data.operators[index] for index, _ in keys[n * 400 : n * 400 + 400]) for n in range(8)]
    assert most[0] == 2 and most[4:] == [6] * 4 and most == sorted(most)
    spread = [np.ptp(data.lengths[[index for index, _ in keys[n : n + 8]]]) for n in range(1600, 3200, 8)]
    assert np.mean(spread) < 0.3 * np.ptp(data.lengths)
    assert [run.admitted(share) for share in (0, 0.11, 0.49, 0.5, 1)] == [2, 3, 6, 6, 6]


def knobs_at(step: int, **schedule) -> dict:
    """What the trainer passes to the model at a step of 100."""
    trainer = object.__new__(AdaptiveTrainer)
    trainer.recipe = Recipe("sut-tiny", schedule=Schedule(**schedule))
    trainer.model = type("M", (), {"config": preset("sut-tiny", act_weight=0.5)})()
    trainer.state = type("S", (), {"global_step": step})()
    trainer.args = type("A", (), {"max_steps": 100})()
    return trainer.knobs()


def test_halting_starts_late_and_its_price_rises():
    """halting_from and act_warmup, as shares of the run."""
    plan = {"halting_from": 0.4, "act_warmup": 0.2}
    assert knobs_at(39, **plan) == {"min_steps": 4}
    assert knobs_at(50, **plan)["loss_weights"]["act"] == pytest.approx(0.25)
    assert knobs_at(60, **plan)["loss_weights"]["act"] == pytest.approx(0.5)
    assert knobs_at(99, **plan)["loss_weights"]["act"] == 0.5
    assert knobs_at(0)["loss_weights"]["act"] == 0.5


def test_nobody_is_asked_while_every_token_must_run_every_step(pairs):
    """min_steps at the full depth is the fixed depth, to the last bit."""
    data = PairDataset(pairs[:5], "classification")
    batch = data.collate([data[n] for n in range(5)])
    model = build(preset("sut-tiny")).eval()
    fixed = build(preset("sut-tiny", policy="fixed", act_weight=0.0)).eval()
    fixed.load_state_dict({k: v for k, v in model.state_dict().items() if ".policy." not in k})
    out = model(**batch, min_steps=99)
    assert torch.equal(out.logits, fixed(**batch).logits) and "halting" not in out.compute.macs


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_builds_its_model(path, monkeypatch):
    """The recipes that ship are of today's configs."""
    recipe = load_recipe(path)
    monkeypatch.chdir(ROOT)
    model = build(config_of(recipe), recipe.head)
    assert sum(p.numel() for p in model.parameters()) > 1000


def test_every_plan_names_recipes_that_build(monkeypatch):
    """The plans that ship: every cell has a valid config, and a name of its own."""
    from tenuto import compare, isoflops, matrix

    monkeypatch.chdir(ROOT)
    for cells, least in (
        (matrix.cells_of(matrix.load_plan(PLANS["matrix"], matrix.Matrix)), 24),
        (matrix.cells_of(matrix.load_plan(PLANS["exit-labels"], matrix.Matrix)), 2),
        (isoflops.cells_of(isoflops.load_plan(PLANS["isoflops"], isoflops.Iso)), 20),
        (compare.cells_of(compare.load_plan(PLANS["collapse"], compare.Comparison)), 7),
        (compare.cells_of(compare.load_plan(PLANS["depth"], compare.Comparison)), 8),
        (compare.cells_of(compare.load_plan(PLANS["stories"], compare.Comparison)), 27),
        (compare.cells_of(compare.load_plan(PLANS["ablations"], compare.Comparison)), 29),
    ):
        assert len({cell.name for cell in cells}) == len(cells) >= least


@pytest.mark.parametrize("name", ["stories", "ablations", "routed-scan"])
def test_rates_of_every_row_fit_its_model(name, monkeypatch):
    """A pattern that fits nothing would stop the row when its turn comes."""
    from tenuto.compare import Comparison, cells_of, load_plan

    monkeypatch.chdir(ROOT)
    for cell in cells_of(load_plan(PLANS[name], Comparison)):
        model = build(config_of(cell.recipe, vocab_size=512), cell.recipe.head)
        parameter_groups(model, 0.0, 1e-3, 0.0, cell.recipe.learning_rates)


def test_start_from_refuses_another_config(tmp_path):
    """Only the halting net may be missing; nothing may be left over."""
    fixed = build(preset("sut-tiny", policy="fixed", act_weight=0.0))
    fixed.save_pretrained(tmp_path)
    halting = build(preset("sut-tiny"))
    start_from(halting, str(tmp_path))
    assert torch.equal(halting.stack.block.attention.key.weight, fixed.stack.block.attention.key.weight)
    text = build(preset("sut-tiny"), "text-to-text")
    text.save_pretrained(tmp_path / "text")
    start_from(build(preset("sut-tiny"), "text-to-text"), str(tmp_path / "text"))
    with pytest.raises(ValueError, match="another config"):
        start_from(build(preset("ut-tiny")), str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        start_from(halting, str(tmp_path / "none"))


def test_accumulation_equals_one_large_batch(tmp_path):
    """Invariant 7: 4 micro-batches of 2 of unequal lengths give the step of 1 batch of 8, task and ACT loss."""
    weights = []
    for micro in (1, 4):
        recipe = tiny(
            max_steps=2,
            per_device_train_batch_size=8 // micro,
            gradient_accumulation_steps=micro,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=0.1,
        )
        recipe = replace(recipe, config={**recipe.config, "act_weight": 0.5, "balance_weight": 0.0})
        train(recipe, tmp_path / str(micro))
        from safetensors.torch import load_file

        weights.append(load_file(tmp_path / str(micro) / "model.safetensors"))
    for name, one in weights[0].items():
        assert_close(one, weights[1][name], atol=1e-5, rtol=1e-4, msg=name)


def test_bfloat16_stays_near_float32(pairs):
    """Casts: halting in float32 whatever the weights are; logits within the precision of bfloat16.

    Without routers: an expert chosen by a hair may be another one after rounding.
    """
    data = PairDataset(pairs[:6], "classification")
    batch = data.collate([data[n] for n in range(6)])
    model = build(preset("ut-tiny", halt_bias=-9.0)).eval()
    full = model(**batch, threshold=1.0)
    half = model.to(torch.bfloat16)(**batch, threshold=1.0)
    assert half.logits.dtype == torch.bfloat16 and half.expected_depths.dtype == torch.float32
    assert_close(half.logits.float(), full.logits, atol=0.1, rtol=0.1)


def test_compiled_equals_eager(pairs):
    """torch.compile of the fixed-depth model without gathering: within 1e-5."""
    data = PairDataset(pairs[:4], "classification")
    ids = data.collate([data[0]])["input_ids"].repeat(2, 1)
    model = build(preset("ut-tiny", policy="fixed", act_weight=0.0)).eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")
        assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_stream_is_walked_without_building_items(pairs):
    """A resumed run walks through the keys it has seen; that must not build any item."""

    class Untouchable(PairDataset):
        def __getitem__(self, key):
            raise AssertionError("an item was built")

    run = Curriculum(Untouchable(pairs, "classification"), 10**6, 8, seed=0, start=6, until=0.0)
    assert len(list(islice(run, 4000))) == 4000


@pytest.mark.parametrize("name", ["sut-tiny", "moa-tiny", "ut-tiny", "transformer-tiny"])
def test_autocast_runs_forward_and_backward(pairs, name):
    """Mixed precision, the usual setting on a GPU: experts see one dtype, statistics stay in float32."""
    data = PairDataset(pairs[:6], "classification")
    batch = data.collate([data[n] for n in range(6)])
    model = build(preset(name)).train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch)
    out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(one.assigned.dtype == torch.float32 for one in out.balance.values())


def test_balance_counts_beyond_what_half_precision_can():
    """bfloat16 stops counting at 256."""
    from tenuto.models.experts import Balance, Dispatch

    probs = torch.full((1000, 2), 0.5, dtype=torch.bfloat16)
    sent = Dispatch(probs, probs[:, :1], torch.zeros(1000, 1, dtype=torch.long))
    assert Balance.of(sent, probs[:, 0] * 2).assigned.tolist() == [1000, 0]


def test_misspelt_arguments_are_refused(pairs):
    """A knob that is not one must not vanish."""
    data = PairDataset(pairs[:1], "classification")
    with pytest.raises(TypeError, match="treshold"):
        build(preset("sut-tiny"))(**data.collate([data[0]]), treshold=0.1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"training": {"output_dir": "x"}}, "no effect"),
        ({"training": {"optim": "sgd"}, "muon_learning_rate": 0.1}, "both choose"),
        ({"training": {"batch": 3}}, "not an argument"),
    ],
)
def test_training_arguments_without_effect_are_refused(tmp_path, change, message):
    """One sentence instead of silence."""
    recipe = tiny()
    change = {**change, "training": {**recipe.training, **change["training"]}}
    with pytest.raises(ValueError, match=message):
        train(replace(recipe, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_plan_is_no_recipe_and_a_recipe_no_plan(monkeypatch, tmp_path):
    """Each is named for what it is; a wrong key of the right one keeps its own message; YAML's `no` is a word."""
    from tenuto.compare import Comparison
    from tenuto.matrix import load_plan

    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=r"depth\.yaml is a plan of several models, not a recipe"):
        load_recipe("recipes/scan/depth.yaml")
    with pytest.raises(ValueError, match=r"ut\.yaml names no `base`: it is not a plan"):
        load_plan("recipes/scan/ut.yaml", Comparison)
    (tmp_path / "plan.yaml").write_text("base: recipes/scan/ut.yaml\nrows: {}\nagainst: ut\nlimits: 3\n")
    with pytest.raises(ValueError, match="limits"):
        load_plan(tmp_path / "plan.yaml", Comparison)
    with pytest.raises(ValueError, match="datas"):
        load_recipe("recipes/scan/ut.yaml", ["--datas=3"])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match=r"list\.yaml"):
        load_recipe(tmp_path / "list.yaml")
    recipe = load_recipe("recipes/scan/ut.yaml", ["--training.eval_strategy=no", "--training.bf16=no"])
    assert recipe.training["eval_strategy"] == "no" and recipe.training["bf16"] is False


def test_resume_refuses_another_recipe_and_splits_train(tmp_path):
    """A systematic split end to end; the resumed run keeps its recipe, and its processor time."""
    from tenuto.evaluate import evaluate

    recipe = tiny(max_steps=2, save_strategy="steps", save_steps=1, logging_steps=1)
    recipe = replace(recipe, data=Data(protocol="A", max_operators=2))
    train(recipe, tmp_path / "run")
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    with pytest.raises(ValueError, match="another config"):
        train(replace(recipe, config={**recipe.config, "num_loops": 5}), tmp_path / "run", resume=True)
    again = train(recipe, tmp_path / "run", resume=True)
    assert again["seconds"]["cpu"] > state["log_history"][-1]["cpu_seconds"] > 0
    result = evaluate(tmp_path / "run", ["A"])
    assert result["pairs"] == {"A": 6560} and result["majority"] == {"A": 53.89}


def watched(policy: str, task, tmp_path, **config) -> list[dict]:
    """The logs of a few steps of a looped model, the collapse detector at work from the first."""
    body = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_loops": 3,
        "dropout": 0.0,
    }
    config = {"policy": policy, "num_coda_layers": 0, **body, **config}
    recipe = Recipe(preset="looped-tiny", config=config, head="causal", training={"max_steps": 4})
    from transformers import TrainingArguments

    model = build(config_of(recipe, vocab_size=21), "causal")
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, logging_steps=1, report_to="none", save_strategy="no",
        per_device_train_batch_size=4, disable_tqdm=True, remove_unused_columns=False, use_cpu=True,
    )  # fmt: skip
    trainer = AdaptiveTrainer(model=model, args=args, train_dataset=task.train, recipe=recipe, task=task)
    trainer.train()
    return trainer.state.log_history


@pytest.fixture
def words():
    """A task of random tokens."""
    random = np.random.default_rng(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in random.integers(21, size=(16, 12))]
    sampler = lambda steps, batch, seed: range(16)  # noqa: E731
    return type("T", (), {"train": rows, "sampler": staticmethod(sampler), "answers": None})()


@pytest.mark.parametrize("policy, bias", [("pondernet", 6.0), ("pondernet", -9.0), ("stick_breaking", 6.0)])
def test_policies_with_a_distribution_are_watched(words, tmp_path, caplog, policy, bias):
    """PonderNet runs every step in training: its expected depth is logged, and warned of when it has no spread."""
    with caplog.at_level("WARNING", "tenuto"):
        logs = watched(policy, words, tmp_path, halt_bias=bias, halt_threshold=0.9)
    depths = [row["depth/expected"] for row in logs if "depth/expected" in row]
    assert len(depths) == 4 and max(abs(depth - (1 if bias > 0 else 3)) for depth in depths) < 0.1
    assert ("everything stops at the floor" if bias > 0 else "nothing stops before") in caplog.text
    if policy == "pondernet":
        assert {row["depth/mean"] for row in logs if "depth/mean" in row} == {3.0}
        assert "ponder_prior" in caplog.text and "act_weight" not in caplog.text


@pytest.mark.parametrize("policy", ["act", "exit_head", "fixed", "latent"])
def test_policies_without_a_distribution_log_no_expected_depth(words, tmp_path, policy):
    """ACT's N + R is a price, an exit head's probabilities are of one step each."""
    logs = watched(policy, words, tmp_path)
    assert any("depth/mean" in row for row in logs) and not any("depth/expected" in row for row in logs)


def test_depth_curves_are_of_what_was_learnt(tmp_path):
    """The expected depth where it is logged; else what was executed, if tokens stopped by themselves."""
    rows = [{"step": n, "depth/mean": 4.0, "loss": 1.0} for n in (1, 2)]
    assert depth_curve(rows, stops=True) == [[1, 4.0], [2, 4.0]] and depth_curve(rows, stops=False) == []
    expected = [*({**row, "depth/expected": 1.25} for row in rows), {"step": 2, "eval_loss": 1.0}]
    assert depth_curve(expected, stops=True) == depth_curve(expected, stops=False) == [[1, 1.25], [2, 1.25]]
    cells = [
        {"row": f"row {len(curve)}", "depth_curve": curve, "shares": [0.5, 0.5]}
        for curve in ([], [[1, 1.25]])
    ]
    picture(cells, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text().count("<!-- row ") == 2


# a value that each field takes, for every policy that its advice is for
TRIED = {
    "halt_bias": -3.0, "act_weight": 0.001, "depth_budget": 2.0, "halt_threshold": 0.5, "ponder_prior": 0.1,
    "ponder_weight": 0.001, "exit_margin": 0.01,
}  # fmt: skip


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fixed"])
def test_advice_is_accepted_by_the_config(policy):
    """Every field that the advice names exists and can be changed under the policy it is given for."""
    for depths in (np.ones(9), np.full(9, 4), np.full(9, 2), np.full(9, 1.02)):
        advice = collapse(depths, 1, 4, policy)["advice"]
        advice, *other = advice.split(" and read exits with policy exit_head")
        if other:
            advice = advice.replace("objective all or sampled", "")
            for objective in ("all", "sampled"):
                LoopedConfig(policy="exit_head", objective=objective, act_weight=0.0)
        words = set(re.findall(r"[\w.]+", advice))
        fields = {word for word in words if "_" in word}
        for name in fields:
            if name.startswith("schedule."):
                Schedule(**{name.removeprefix("schedule."): 0.2})
            else:
                LoopedConfig(policy=policy, num_coda_layers=0, **{name: TRIED[name]})
        if "objective" in words:
            for objective in ("all", "sampled"):
                LoopedConfig(policy=policy, num_coda_layers=0, objective=objective)
        assert fields
    assert set(ADVICE) == set(POLICIES) - {"fixed"}
