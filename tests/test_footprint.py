"""Computed training memory against what autograd keeps on a CPU."""

import pytest
import torch

from tenuto.footprint import GIB, measured_saved_bytes, memory_table, training_memory
from tenuto.presets import build, preset

# name -> preset, overrides
CONFIGS = {
    "one loop": ("looped-tiny", {"num_loops": 1}),
    "layers around": ("looped-tiny", {"num_loops": 2, "num_prelude_layers": 2, "num_coda_layers": 0}),
    "four loops": ("looped-tiny", {"num_key_value_heads": 4}),
    "chunks": ("looped-tiny", {"num_loops": 2, "loss_chunk": 16}),
    "every loop": ("looped-tiny", {"num_loops": 2, "objective": "all"}),
    "truncated": ("looped-tiny", {"backprop_loops": 1, "input_injection": "decay", "loop_scale": True}),
    "plain": ("looped-tiny", {"num_loops": 1, "activation": "relu", "norm_placement": "pre", "dropout": 0.1}),
    "two layers": ("looped-1m", {"num_loops": 2, "loss_chunk": 16}),
}
configs = pytest.mark.parametrize("name", CONFIGS)


def both(name, checkpointing, precision="fp32", batch=2, length=24):
    """Measured and computed figures of one of the configurations."""
    base, overrides = CONFIGS[name]
    config = preset(base, **overrides)
    model = build(config, "causal")
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = torch.randint(3, config.vocab_size, (batch, length))
    inputs = {"input_ids": ids, "labels": ids}
    measured = measured_saved_bytes(model, inputs, autocast=precision == "bf16-mixed")
    computed = training_memory(config, batch, length, precision, checkpointing=checkpointing, device="cpu")
    return measured, computed


@configs
def test_activations(name):
    """Every tensor that autograd keeps is in the formula: equal to 1%."""
    measured, computed = both(name, checkpointing=False)
    assert computed["activations"] + computed["logits"] == pytest.approx(measured["saved"], rel=0.01)


@configs
def test_checkpointed(name):
    """What a checkpointed forward leaves, keys and values included; and the bound on the peak is one."""
    measured, computed = both(name, checkpointing=True)
    kept = computed["activations"] + computed["logits"]
    assert kept == pytest.approx(measured["alive"], rel=0.1)
    assert measured["peak"] <= kept + computed["working"] + computed["gradients"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mixed(checkpointing):
    """Autocast's copies of rows and weights."""
    measured, computed = both("two layers", checkpointing, "bf16-mixed")
    kept = computed["activations"] + computed["logits"]
    assert kept == pytest.approx(measured["alive" if checkpointing else "saved"], rel=0.1)


def test_shared_weights():
    """Weights, gradients and optimizer state do not depend on the loops; activations do."""
    one, four = (training_memory(preset("looped-4m", num_loops=loops), 4, 64) for loops in (1, 4))
    assert all(one[part] == four[part] for part in ("weights", "gradients", "optimizer"))
    assert one["activations"] < four["activations"]
    config = preset("looped-4m")
    parameters = sum(weight.numel() for weight in build(config, "causal").parameters())
    memory = training_memory(config, 4, 64, "bf16-mixed")
    assert (memory["weights"], memory["optimizer"]) == (4 * parameters, 8 * parameters)
    muon = training_memory(config, 4, 64, "bf16-mixed", "muon")
    assert 4 * parameters < muon["optimizer"] < 8 * parameters
    truncated = training_memory(config, 4, 64, backprop_loops=1)
    assert truncated["activations"] == one["activations"]


def test_table():
    """A row's batch fits the card and twice as much does not (64 is the most tried); what has no formula is refused."""
    rows = memory_table(("looped-100m", "dense-400m"))
    assert len(rows) == 12
    for row in rows[:6:2]:
        if row["batch"]:
            assert row["total"] <= 11 * GIB
        if row["batch"] < 64:
            config, batch = preset(row["name"]), max(1, 2 * row["batch"])
            again = training_memory(config, batch, 1024, row["precision"], checkpointing=row["checkpointing"])
            assert again["total"] > 11 * GIB
    with pytest.raises(ValueError, match="no formula for policy='act'"):
        training_memory(preset("looped-tiny", policy="act"), 1, 8)
