"""Invariants of design section 7, over presets x policies x heads.

The models have random weights everywhere (`reference.make`), halting nets included, and seeds under
which no halting decision comes within 1e-3 of its threshold while depths differ within a batch
(`reference.settled`).
"""

import os
import subprocess
import sys

import pytest
import reference
import torch
from reference import CASES, HALTING, HEADS, batch, make, settled
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from tenuto.presets import build, preset

everything = pytest.mark.parametrize("head", HEADS)
cases = pytest.mark.parametrize("case", CASES)
halting = pytest.mark.parametrize("case", HALTING)
AUTO = {
    "classification": AutoModelForSequenceClassification,
    "text-to-text": AutoModelForSeq2SeqLM,
}


def model_and_batch(case, head, side="right", **overrides):
    return make(case, head, settled(case, head), **overrides), batch(case, head, side)


def named_gradients(model, loss):
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True), strict=True))


def close(actual, expected, atol=1e-10):
    assert_close(actual, expected, atol=atol, rtol=atol)


def stacks(model):
    return [model.stack] if hasattr(model, "stack") else [model.encoder, model.decoder]


def rows_computed(model, **inputs):
    """Output of a forward, and the rows that went through each stack's blocks."""
    counts = [0] * len(stacks(model))
    hooks = []
    for i, stack in enumerate(stacks(model)):
        for block in getattr(stack, "blocks", None) or [stack.block]:

            def count(module, args, out, i=i):
                counts[i] += len(out[0])

            hooks.append(block.register_forward_hook(count))
    out = model(**inputs)
    for hook in hooks:
        hook.remove()
    return out, counts


# 1. skipping equals the masked reference


@everything
@cases
@pytest.mark.parametrize("side", ["right", "left"])
def test_packed_equals_masked_in_outputs_losses_and_gradients(case, head, side):
    """Skipping computes the same function: logits, depths, every loss term and every gradient."""
    model, data = model_and_batch(case, head, side)
    model.train()
    out = model(**data)
    want = reference.masked(model, **data)
    assert case not in HALTING or len(out.depths.unique()) > 3
    close(out.logits, want.logits)
    assert torch.equal(out.depths, want.encoder.depths)
    if head == "text-to-text":
        assert torch.equal(out.decoder_depths, want.decoder.depths)
    close(out.expected_depths.to(want.encoder.expected.dtype), want.encoder.expected)
    assert set(out.losses) == set(want.losses)
    for name, value in want.losses.items():
        close(torch.as_tensor(out.losses[name], dtype=torch.float64), value.double())
    close(out.loss, want.loss)
    got, expected = named_gradients(model, out.loss), named_gradients(model, want.loss)
    for name, gradient in expected.items():
        assert gradient is not None, name
        close(got[name], gradient)


@everything
@cases
def test_packed_equals_the_token_by_token_loop(case, head):
    """The equations, one token at a time and without ever seeing a pad, give the same answer."""
    model, data = model_and_batch(case, head)
    model.train()
    with torch.no_grad():
        out = model(**data)
        want = reference.by_token(model, **data)
    close(out.logits, want.logits)
    assert torch.equal(out.depths, want.encoder.depths)
    close(out.expected_depths.to(want.encoder.expected.dtype), want.encoder.expected)
    for name, value in want.losses.items():
        close(torch.as_tensor(out.losses[name], dtype=torch.float64), value.double())


@halting
@everything
@pytest.mark.parametrize("knobs", [{"threshold": 0.5}, {"min_steps": 3}, {"max_steps": 2, "min_steps": 1},
                                   {"max_steps": 6}, {"threshold": 0.0, "min_steps": 2}])  # fmt: skip
def test_knobs_mean_the_same_in_packed_and_masked(case, head, knobs):
    """threshold, min_steps and max_steps of a call (above and below the config's) act as the equations
    say.
    """
    model, data = model_and_batch(case, head)
    with torch.no_grad():
        out = model.eval()(**data, **knobs)
        want = reference.masked(model, **data, **knobs)
    assert want.closest > 1e-4 or knobs.get("threshold") == 0.0  # at 0 there is nothing to decide
    close(out.logits, want.logits)
    assert torch.equal(out.depths, want.encoder.depths)


@pytest.mark.parametrize("case", ["transformer", "sut"])
def test_targets_with_holes_and_rows_without_labels(case):
    """-100 inside a target hides that label only: later labels are predicted from computed states. A row
    without any label keeps one place, and its loss counts nothing."""
    model, data = model_and_batch(case, "text-to-text")
    labels = torch.tensor([[4, -100, 11, 2], [-100, -100, 30, -100], [-100, -100, -100, -100]])
    data["labels"] = labels
    with torch.no_grad():
        out, want = model.train()(**data), reference.masked(model, **data)
    close(out.logits, want.logits)
    close(out.loss, want.loss)
    assert out.logits[labels != -100].abs().sum(-1).gt(0).all()
    assert (out.decoder_depths > 0).sum(1).tolist() == [4, 3, 1]


# 2. the neutral setting is the plain dense stack


def tied_dense(model, head):
    """A plain Transformer whose layers are all the looped model's block."""
    looped = model.config
    names = (
        "vocab_size num_labels hidden_size num_attention_heads head_dim attention_experts activation"
        " attention_experts_per_token intermediate_size ffn_experts ffn_experts_per_token router dropout"
        " balance_loss positions relative_positions window relative_buckets relative_max_distance norm"
        " norm_placement norm_eps classifier_pooling"
    ).split()
    fields = {name: getattr(looped, name) for name in names}
    dense = build(
        preset("transformer-tiny", **fields, num_hidden_layers=looped.num_loops,
               num_decoder_layers=looped.num_decoder_loops), head
    ).to(model.dtype)  # fmt: skip
    state = {}
    for name, weight in model.state_dict().items():
        if ".policy." in name:
            continue
        if "stack.block." in name or "coder.block." in name:
            for layer in range(looped.num_loops):
                state[name.replace(".block.", f".blocks.{layer}.")] = weight
        else:
            state[name] = weight
    dense.load_state_dict(state)
    return dense


@everything
@pytest.mark.parametrize("case", ["ut-fixed", "ut", "sut-fixed", "sut", "sut-pre"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_neutral_setting_equals_the_dense_stack(case, head, dtype):
    """Nobody stops and all mass lies on the last step: the loop is a stack of tied layers (bit-equal if
    fixed).
    """
    overrides = {"input_injection": "none"}
    if "fixed" not in case:
        overrides |= {"halt_bias": -200.0, "halt_threshold": 1.0}
    model, data = model_and_batch(case, head, dtype=dtype, **overrides)
    dense = tied_dense(model, head)
    with torch.no_grad():
        out, plain = model.eval()(**data), dense.eval()(**data)
    if "fixed" in case:
        assert torch.equal(out.logits, plain.logits)
    close(out.logits, plain.logits, 1e-10 if dtype == torch.float64 else 1e-5)
    assert torch.equal(out.depths, plain.depths)
    assert out.compute.summary()["attention"] == plain.compute.summary()["attention"]


@everything
@pytest.mark.parametrize("policy", ["fixed", "stick_breaking"])
def test_sparse_with_one_expert_equals_universal_to_the_last_bit(head, policy):
    """SUT with E = 1 is UT: same weights, same bits, gradients included."""
    shared = {
        **reference.SMALL, "policy": policy, "halt_threshold": 0.9, "act_weight": 0.01 * (policy != "fixed"),
        "relative_positions": "window", "window": 3, "activation": "gelu", "num_attention_heads": 2,
    }  # fmt: skip
    one = {f"{part}_experts{end}": 1 for part in ("attention", "ffn") for end in ("", "_per_token")}
    sparse = build(preset("sut-tiny", **shared, **one), head)
    names = "positions norm norm_placement input_injection balance_weight".split()
    names = {name: getattr(sparse.config, name) for name in names}
    universal = build(preset("ut-tiny", **shared, **names), head)
    with torch.no_grad():
        for weight in sparse.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    universal.load_state_dict(sparse.state_dict())
    data = batch("sut", head)
    ours, theirs = sparse.train()(**data), universal.train()(**data)
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.depths, theirs.depths)
    got, want = named_gradients(sparse, ours.loss), named_gradients(universal, theirs.loss)
    assert all(torch.equal(got[name], want[name]) for name in want if want[name] is not None)


# 4. causality


@pytest.mark.parametrize(
    "case,threshold",
    [*((case, None) for case in CASES), *((case, one) for case in HALTING for one in (0.5, 1.0))],
)
def test_decoder_is_causal_under_every_threshold(case, threshold):
    """Changing or dropping future target tokens changes no earlier logit and no earlier depth."""
    model, data = model_and_batch(case, "text-to-text")
    data.pop("labels")
    torch.manual_seed(3)
    full = torch.randint(3, 32, (3, 7))
    changed = full.clone()
    changed[:, 4:] = torch.randint(3, 32, (3, 3))
    with torch.no_grad():
        outs = [
            model.eval()(**data, decoder_input_ids=ids, threshold=threshold)
            for ids in (full, changed, full[:, :4])
        ]
    for other in outs[1:]:
        close(other.logits[:, :4], outs[0].logits[:, :4], 1e-12)
        assert torch.equal(other.decoder_depths[:, :4], outs[0].decoder_depths[:, :4])
    assert not torch.equal(outs[1].logits[:, 4:], outs[0].logits[:, 4:])


# 5. batch-mates and padding


@everything
@cases
@pytest.mark.parametrize("side", ["right", "left"])
def test_result_does_not_depend_on_batch_mates_or_padding(case, head, side):
    """Each sequence alone and unpadded gives what it gives in a batch, padded on either side, padded
    further.
    """
    model, data = model_and_batch(case, head)
    model.eval()
    grids = [batch(case, head, side), batch(case, head, side, longer=3)]
    with torch.no_grad():
        outs = [model(**grid) for grid in grids]
        for b, n in enumerate(reference.LENGTHS):
            alone = {"input_ids": data["input_ids"][b : b + 1, :n], "labels": data["labels"][b : b + 1]}
            if "token_type_ids" in data:
                alone["token_type_ids"] = data["token_type_ids"][b : b + 1, :n]
            want = model(**alone)
            for out, grid in zip(outs, grids, strict=True):
                live = grid["attention_mask"][b].bool()
                places = 1 if head == "classification" else int((alone["labels"] != -100).sum())
                if head == "classification":
                    close(out.logits[b], want.logits[0], 1e-12)
                else:
                    close(out.logits[b, :places], want.logits[0, :places], 1e-12)
                assert torch.equal(out.depths[b, live], want.depths[0])
                assert not out.depths[b, ~live].any()


@pytest.mark.parametrize("case", ["transformer-pre", "sut-pre", "ut"])
def test_states_of_pads_are_zero(case):
    """last_hidden_state is zero at pads (mean pooling relies on it), under every kind of norm."""
    name, values = CASES[case]
    model = build(preset(name, **{**reference.SMALL, **values}), "encoder").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
        data = batch(case, "classification")
        data.pop("labels")
        out = model(**data)
    assert not out.last_hidden_state[~data["attention_mask"].bool()].any()
    assert out.last_hidden_state[data["attention_mask"].bool()].abs().sum(-1).gt(0).all()


@everything
@halting
def test_threshold_per_sequence_equals_separate_calls(case, head):
    """One threshold a request: a tensor [B] gives each sequence what its own number gives it."""
    model, data = model_and_batch(case, head)
    wanted = torch.tensor([0.3, 1.0, 0.8], dtype=torch.float64)
    with torch.no_grad():
        out = model.eval()(**data, threshold=wanted)
        separate = [model(**data, threshold=float(one)) for one in wanted]
    for b, one in enumerate(separate):
        close(out.logits[b], one.logits[b], 1e-12)
        assert torch.equal(out.depths[b], one.depths[b])
    if head == "text-to-text":
        assert any(not torch.equal(one.logits, out.logits) for one in separate)


# 7. saving, loading, checkpointing, attention kernels, casts


@everything
@pytest.mark.parametrize("case", ["transformer-pre", "ut-pair", "sut"])
def test_save_and_load_change_nothing(case, head, tmp_path):
    """save_pretrained, from_pretrained and the Auto classes give back the config, the weights and the
    logits.

    Logits are compared in float64: loaded float32 weights lie at other addresses, which can change the
    last bit.
    """
    model, data = model_and_batch(case, head, dtype=torch.float32)
    model.eval().save_pretrained(tmp_path)
    again = AUTO[head].from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    state = again.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        assert_close(model(**data).logits, again(**data).logits, atol=2e-6, rtol=1e-5)
        assert torch.equal(model.double()(**data).logits, again.double()(**data).logits)
    skipped = {"_name_or_path", "dtype", "transformers_version", "architectures"}
    before, after = model.config.to_dict(), again.config.to_dict()
    assert {k: v for k, v in before.items() if k not in skipped} == {
        k: v for k, v in after.items() if k not in skipped
    }


def test_bare_encoder_loads_from_a_classifier_checkpoint(tmp_path):
    """AutoModel takes the encoder out of a classifier's checkpoint."""
    model, _ = model_and_batch("sut", "classification", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    encoder = AutoModel.from_pretrained(tmp_path)
    for name, weight in encoder.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_depth_fields_follow_an_override_at_loading(tmp_path):
    """num_hidden_layers (which sizes caches) is derived from num_loops also when a loaded config is
    changed.
    """
    config = preset("sut-tiny")
    config.save_pretrained(tmp_path)
    again = type(config).from_pretrained(tmp_path, num_loops=7)
    assert (again.num_loops, again.num_hidden_layers) == (7, 7)


REMOTE = """
import sys, torch
sys.modules["tenuto"] = None  # whatever is installed, importing it fails
from transformers import AutoModelForSequenceClassification, AutoModelForSeq2SeqLM
for folder in sys.argv[1:]:
    auto = AutoModelForSeq2SeqLM if folder.endswith("text-to-text") else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, trust_remote_code=True).eval().double()
    saved = torch.load(folder + "/io.pt")
    with torch.no_grad():
        out = model(**saved["inputs"])
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    assert torch.equal(out.logits, saved["logits"]), folder
    assert torch.equal(out.depths, saved["depths"]), folder
print("loaded", len(sys.argv) - 1)
"""


def test_checkpoints_load_where_tenuto_is_not_installed(tmp_path):
    """A checkpoint carries its code: an isolated process without tenuto gives the same logits and depths."""
    folders = []
    for case, head in (("moa", "classification"), ("ut", "text-to-text"), ("sut", "classification"),
                       ("sut", "text-to-text")):  # fmt: skip
        model, data = model_and_batch(case, head, dtype=torch.float32)
        folder = tmp_path / f"{case}-{head}"
        model.eval().save_pretrained(folder)
        with torch.no_grad():
            out = model.double()(**data)
        torch.save({"inputs": data, "logits": out.logits, "depths": out.depths}, folder / "io.pt")
        folders.append(str(folder))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-I", "-c", REMOTE, *folders], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().endswith("loaded 4")


@everything
@pytest.mark.parametrize("case", ["transformer-pre", "moa", "ut", "sut", "sut-pre"])
def test_gradient_checkpointing_changes_nothing(case, head):
    """Same loss, same gradients, and the blocks really are run again in the backward pass."""
    model, data = model_and_batch(case, head)
    model.train()
    plain = model(**data)
    want = named_gradients(model, plain.loss)
    model.activation_checkpointing_enable()
    runs = []
    part = next(module for module in model.modules() if type(module).__name__ == "FeedForward")
    part.register_forward_pre_hook(lambda *_: runs.append(1))
    again = model(**data)
    forward = len(runs)
    close(again.loss, plain.loss, 1e-12)
    for name, gradient in named_gradients(model, again.loss).items():
        close(gradient, want[name], 1e-12)
    assert len(runs) == 2 * forward


@everything
@cases
def test_eager_equals_sdpa(case, head):
    """The attention kernels agree, pads and causal masks included."""
    model, data = model_and_batch(case, head)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        sdpa = model.eval()(**data).logits
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
        close(model(**data).logits, sdpa, 1e-11)


@everything
@cases
def test_float32_and_bfloat16_stay_within_tolerance(case, head):
    """float32 agrees with float64 to 1e-4; bfloat16 runs, stays finite and keeps halting in float32."""
    model, data = model_and_batch(case, head)
    with torch.no_grad():
        want = model.eval()(**data)
        got = model.float()(**data)
        assert torch.equal(got.depths, want.depths)
        assert_close(got.logits, want.logits.float(), atol=1e-4, rtol=1e-4)
        rough = model.bfloat16()(**data)
    assert rough.logits.dtype == torch.bfloat16 and rough.logits.isfinite().all()
    if case in HALTING:
        assert rough.expected_depths.dtype == torch.float32


# 8. gradients and scales


@everything
@cases
@pytest.mark.parametrize("fresh", [False, True])
def test_every_parameter_gets_a_gradient(case, head, fresh):
    """Nothing is dead: every weight has a gradient, and a non-zero one away from the initial values."""
    name, values = CASES[case]
    if fresh:
        model, data = build(preset(name, **{**reference.SMALL, **values}), head), batch(case, head)
    else:
        model, data = model_and_batch(case, head)
    gradients = named_gradients(model, model.train()(**data).loss)
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.isfinite().all(), name
        assert fresh or gradient.abs().sum() > 0, name


@everything
@pytest.mark.parametrize("case", ["moa", "ut", "sut", "sut-pre"])
def test_published_defect_loss_scale_auxiliary_terms_do_not_shrink_with_the_batch(case, head):
    """sut.md 4.2: every loss term is the same for the batch twice over and for the batch padded further."""
    model, data = model_and_batch(case, head)
    model.train()
    once = model(**data)
    twice = model(**{name: torch.cat([value, value]) for name, value in data.items()})
    longer = batch(case, head, longer=5)
    if head == "text-to-text":
        longer["labels"] = torch.nn.functional.pad(longer["labels"], (0, 3), value=-100)
    padded = model(**longer)
    assert len(once.losses) >= 2
    for name, value in once.losses.items():
        close(twice.losses[name], value)
        close(padded.losses[name], value)
    close(twice.loss, once.loss)
    close(padded.loss, once.loss)


@pytest.mark.parametrize("head", HEADS)
def test_loss_is_the_weighted_sum_of_its_terms(head):
    """config weights by default, `loss_weights` for a call; the terms themselves are unweighted."""
    model, data = model_and_batch("sut", head)
    model.train()
    out = model(**data)
    terms = out.losses
    assert set(terms) == {"task", "act", "mim"}
    close(out.loss, terms["task"] + 0.01 * terms["act"] + 0.01 * terms["mim"], 1e-14)
    again = model(**data, loss_weights={"act": 3.0, "mim": 0.0})
    close(again.loss, terms["task"] + 3.0 * terms["act"], 1e-14)
    close(again.losses["act"], terms["act"], 1e-14)


def test_published_defect_mim_gradient_does_not_push_the_halting_net():
    """sut.md 4.9: with two loops the only way from MIM to the halting net is the survival weight; ACT
    gets there.
    """
    model, data = model_and_batch("sut", "classification", num_loops=2, halt_threshold=1.0)
    losses = model.train()(**data).losses
    weights = list(model.stack.policy.parameters())
    gradients = torch.autograd.grad(losses["mim"], weights, retain_graph=True, allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(losses["act"], weights))


@everything
@pytest.mark.parametrize("case", ["moa", "sut"])
def test_asking_for_routing_changes_no_number(case, head):
    """output_routing is a report: same logits and loss, in evaluation and in training.

    Places ascend within an application, gates sum to 1, pads are never routed.
    """
    model, data = model_and_batch(case, head)
    for mode in (model.eval(), model.train()):
        plain, told = mode(**data), mode(**data, output_routing=True)
        assert torch.equal(plain.logits, told.logits) and torch.equal(plain.loss, told.loss)
        assert plain.routing is None and plain.losses.keys() == told.losses.keys()
    routing = told.routing if head == "classification" else told.routing["encoder"]
    tokens = set(data["attention_mask"].flatten().nonzero().squeeze(1).tolist())
    for _, _, places, experts, gates in routing:
        assert places.tolist() == sorted(places.tolist()) and set(places.tolist()) <= tokens
        close(gates.sum(-1), torch.ones(len(places), dtype=torch.float64))
        assert all(len(set(row)) == len(row) for row in experts.tolist())
    assert sum(len(one[2]) for one in routing if one[1] == "attention") == int(told.depths.sum())


@halting
def test_task_gradient_reaches_the_halting_net(case):
    """Halting is trained by the task through Eq. 2, not by the penalty alone."""
    # every token counts: the first one alone may stop before it is asked
    pooling = {} if case == "ut-pair" else {"classifier_pooling": "mean"}
    model, data = model_and_batch(case, "classification", **pooling)
    task = model.train()(**data).losses["task"]
    weights = list(model.stack.policy.parameters())
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(task, weights))


# 9. depths


@everything
@cases
def test_depths_lie_within_bounds_and_count_the_rows_computed(case, head):
    """min <= depth <= max at tokens, 0 at pads; the depths' sum is the number of rows the blocks saw."""
    model, data = model_and_batch(case, head)
    out, rows = rows_computed(model.eval(), **data)
    grids = [out.depths] if head == "classification" else [out.depths, out.decoder_depths]
    low = getattr(model.config, "min_steps", 1)
    for grid, count, stack in zip(grids, rows, stacks(model), strict=True):
        high = stack.steps if hasattr(stack, "steps") else len(stack.blocks)
        alive = grid[grid > 0]
        assert low <= alive.min() and alive.max() <= high
        assert int(grid.sum()) == count
        if case in HALTING:
            assert alive.max() > alive.min()
    assert torch.equal(out.depths > 0, data["attention_mask"].bool())
    means = out.expected_depths[out.depths > 0]
    assert (means >= low - 1e-9).all() and (means <= out.depths[out.depths > 0] + 1e-9).all()


@halting
@pytest.mark.parametrize("threshold,depth", [(0.0, 1), (1.0, 4)])
def test_threshold_zero_stops_everybody_at_once_and_one_nobody(case, threshold, depth):
    """The ends of the knob; tokens that stop together leave no empty step behind."""
    model, data = model_and_batch(case, "text-to-text")
    out, rows = rows_computed(model.eval(), **data, threshold=threshold, min_steps=1)
    assert set(out.depths.unique().tolist()) == {0, depth}
    assert rows == [depth * int((g > 0).sum()) for g in (out.depths, out.decoder_depths)]


@pytest.mark.parametrize("case", ["ut", "sut", "sut-pre"])
def test_depth_is_monotone_in_the_threshold_on_a_recorded_trajectory(case):
    """A lone token reads itself alone, so its states do not change with the threshold: its depths are
    those its recorded halting probabilities demand, and only grow with the threshold.
    """
    model, _ = model_and_batch(case, "classification")
    stack, recorded, ids = model.eval().stack, [], torch.arange(3, 32)[:, None]
    hook = stack.policy.out.register_forward_hook(lambda module, args, out: recorded.append(out))
    previous, seen = torch.zeros(len(ids), dtype=torch.long), set()
    with torch.no_grad():
        model(ids, threshold=1.0, min_steps=1)
        hook.remove()
        logits = torch.stack(recorded, dim=1)
        halts = torch.sigmoid(logits[..., 1] - logits[..., 0] + stack.policy.bias).tolist()
        for threshold in (0.0, 0.2, 0.5, 0.8, 0.95, 0.999, 1.0):
            depths = model(ids, threshold=threshold, min_steps=1).depths.squeeze(1)
            want = [reference.stick(one, threshold, 1, stack.steps) for one in halts]
            assert depths.tolist() == [steps for _, steps in want]
            assert all(abs(sum(weights) - 1) < 1e-12 for weights, _ in want)
            assert (depths >= previous).all()
            previous, seen = depths, seen | set(depths.tolist())
    assert seen == {1, 2, 3, 4}


# 10. no state


@everything
@cases
def test_a_forward_leaves_nothing_on_the_modules(case, head):
    """sut.md 4.3 (published defect: statistics kept between evaluation and training). Two forwards give
    the same, evaluation in between changes nothing, no module gains or changes an attribute.
    """
    model, data = model_and_batch(case, head)
    model.train()

    def attributes():
        return {
            name: {k: repr(v) for k, v in vars(module).items() if not k.startswith("_")}
            for name, module in model.named_modules()
        }

    before = attributes()
    first = model(**data)
    with torch.no_grad():
        evaluated = model.eval()(**data)
    model.train()
    second = model(**data)
    assert attributes() == before
    assert not evaluated.balance
    assert bool(first.balance) == case.startswith(("moa", "sut"))
    assert first.losses.keys() == second.losses.keys()
    for name, value in first.losses.items():
        assert torch.equal(second.losses[name], value)
    assert torch.equal(first.loss, second.loss)


# refusals


def test_unknown_names_are_refused_in_one_sentence():
    """Presets, fields, heads, policies, loss terms: a wrong name says so, and what would be right."""
    with pytest.raises(ValueError, match="Did you mean 'sut-tiny'"):
        preset("sut-tinny")
    with pytest.raises(ValueError, match="no field num_lops"):
        preset("sut-tiny", num_lops=3)
    with pytest.raises(ValueError, match="no head 'classifier'"):
        build(preset("sut-tiny"), "classifier")
    with pytest.raises(Exception, match="policy"):
        preset("sut-tiny", policy="ponder")
    model, data = model_and_batch("sut", "classification")
    with pytest.raises(ValueError, match=r"loss_weights names .*'mimm'"):
        model(**data, loss_weights={"mimm": 1.0})


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("knob", [{"threshold": 0.5}, {"min_steps": 2}, {"max_steps": 2}])
def test_depth_knobs_are_refused_by_a_plain_transformer(head, knob):
    """A number that would be ignored is refused."""
    model, data = model_and_batch("transformer", head)
    with pytest.raises(ValueError, match=f"{next(iter(knob))}.*plain Transformer.*universal"):
        model(**data, **knob)


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan"), torch.tensor([0.5, 0.5, 2.0])])
def test_thresholds_outside_0_and_1_are_refused(threshold):
    """log(1 - threshold) would be NaN and every token would stop in silence."""
    model, data = model_and_batch("sut", "classification")
    with pytest.raises(ValueError, match="threshold"):
        model(**data, threshold=threshold)


@pytest.mark.parametrize("fields,sentence", [
    ({"min_steps": 5}, "min_steps=5 must lie between 1 and num_loops=4"),
    ({"min_steps": 0}, "min_steps=0 must lie between 1 and num_loops=4"),
    ({"halt_threshold": 1.2}, "halt_threshold=1.2 must lie between 0 and 1"),
    ({"policy": "fixed"}, 'act_weight=0.01 has nothing to weigh with policy="fixed"'),
    ({"ffn_experts_per_token": 7}, "ffn_experts_per_token=7 must lie between 1 and ffn_experts=6"),
    ({"router_samples": 2}, "router_samples=2 must be below"),
    ({"window": 0}, "window of at least 1"),
    ({"relative_positions": "t5", "relative_buckets": 2}, "relative_buckets=2 must be at least 4"),
    ({"relative_positions": "t5", "relative_max_distance": 16}, "relative_max_distance=16 above half"),
])  # fmt: skip
def test_wrong_combinations_of_fields_name_both(fields, sentence):
    """A config that cannot work says why when it is made."""
    with pytest.raises(Exception, match=sentence):
        preset("sut-tiny", **fields)


def test_masks_that_cannot_be_are_refused():
    """A mask of another shape, a sequence without a token, an encoder-decoder without a target."""
    model, data = model_and_batch("sut", "classification")
    with pytest.raises(ValueError, match="must be the same"):
        model(data["input_ids"], data["attention_mask"][:, :3])
    empty = data["attention_mask"].clone()
    empty[1] = 0
    with pytest.raises(ValueError, match="without any token"):
        model(data["input_ids"], empty)
    model, data = model_and_batch("sut", "text-to-text")
    with pytest.raises(ValueError, match="labels or decoder_input_ids"):
        model(data["input_ids"])
    with pytest.raises(ValueError, match=r"min_steps=3 .* max_steps=2"):
        model(**data, min_steps=3, max_steps=2)
