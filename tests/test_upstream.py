"""Canaries: each fails loudly when a workaround of ours is no longer needed, and names what to remove."""

import importlib.metadata
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry
from transformers import Trainer, TrainingArguments

from tenuto.models.base import AdaptivePreTrainedModel
from tenuto.presets import build, preset

aten = torch.ops.aten


def grouped(dtype=torch.float32, n_in=8, n_out=8, offsets=torch.int32, device="cpu"):
    rows = torch.ones(4, n_in, dtype=dtype, device=device)
    weight = torch.ones(2, n_in, n_out, dtype=dtype, device=device)
    return F.grouped_mm(rows, weight, offs=torch.tensor([1, 4], dtype=offsets, device=device))


def test_grouped_mm_works_where_we_use_it():
    """float32, int32 offsets, aligned rows, an empty group."""
    assert grouped().eq(8).all()
    rows, weight = torch.ones(4, 8), torch.ones(3, 8, 8)
    out = F.grouped_mm(rows, weight, offs=torch.tensor([4, 4, 4], dtype=torch.int32))
    assert out.eq(8).all()


@pytest.mark.parametrize("remedy,arguments", [
    ("experts.grouped_matmul: drop the float64 fallback", {"dtype": torch.float64}),
    ("experts.grouped_matmul: drop the 16-byte alignment test", {"n_in": 6, "n_out": 8}),
    ("experts.grouped_matmul: drop the 16-byte alignment test", {"n_in": 8, "n_out": 6}),
    ("experts.grouped_matmul: drop the cast of offsets to int32", {"offsets": torch.int64}),
    ("experts.grouped_matmul: drop the is_compiling() test", {"device": "meta"}),
])  # fmt: skip
def test_grouped_mm_still_refuses(remedy, arguments):
    """Each limit of F.grouped_mm that experts.py goes around."""
    try:
        grouped(**arguments)
    except (RuntimeError, ValueError):
        return
    pytest.fail(f"PyTorch {torch.__version__} accepts {arguments}. {remedy}.")


def test_grouped_mm_still_wants_dense_rows():
    """An expanded gradient has strides of 0: rows.contiguous() in experts.grouped_matmul."""
    weight = torch.ones(2, 8, 8)
    try:
        F.grouped_mm(torch.ones(1, 8).expand(4, 8), weight, offs=torch.tensor([1, 4], dtype=torch.int32))
    except RuntimeError:
        return
    pytest.fail("F.grouped_mm takes expanded rows: drop .contiguous() in experts.grouped_matmul.")


@pytest.mark.parametrize("name", ["_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu"])
def test_flop_counter_still_lacks(name):
    """pytorch#195460; the formulas in test_ledger.MAPPING stand in."""
    assert getattr(aten, name) not in flop_registry, (
        f"FlopCounterMode knows aten.{name}: drop it from MAPPING in test_ledger.py."
    )


def test_trainer_still_stops_dividing_when_forward_takes_keyword_arguments():
    """Without `accepts_loss_kwargs = False` the Trainer would not divide our mean losses when it
    accumulates.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, report_to="none")
        decided = {}
        for wanted in (None, False):
            with pytest.MonkeyPatch.context() as patch:
                if wanted is None:
                    patch.delattr(AdaptivePreTrainedModel, "accepts_loss_kwargs")
                model = build(preset("ut-tiny"))
                decided[wanted] = Trainer(model=model, args=arguments).model_accepts_loss_kwargs
    assert decided == {None: True, False: False}, "drop accepts_loss_kwargs in base.py if it changes nothing"


def test_transformers_is_the_version_the_code_was_read_against():
    """cache=, attribute_map, activation_checkpointing_enable, register_for_auto_class: re-read at a
    major version.
    """
    major, minor = importlib.metadata.version("transformers").split(".")[:2]
    assert int(major) == 5 and int(minor) >= 24, "re-read ecosystem.md section 11 and move this pin"
