"""LoRA (Hu et al. 2021) through PEFT: low-rank steps on frozen block matrices; what is new is trained in full."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from .convert import NEW

LAYERS = ("key", "value")  # nn.Linear
# stacks of experts [E, in, out], which PEFT knows as parameters
STACKS = ("query.weight", "output.weight", "gate.weight", "up.weight", "down.weight")
NEW_PARTS = (*(name.removeprefix("stack") for name in NEW), ".policy.")


def add_lora(model: nn.Module, settings: dict[str, Any]):
    """Puts adapters into the model's blocks, in place, and freezes the rest but for routers and halting nets.

    settings: of PEFT's LoraConfig, {r: 16, lora_alpha: 32}; dropout is not to be had on a parameter. Returns PEFT's
    tuner, whose `merge_and_unload` makes an ordinary model again. ImportError without the package peft.
    """
    if find_spec("peft") is None:
        raise ImportError("lora needs one more package: pip install peft.")
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    if settings.get("lora_dropout"):
        raise ValueError("lora: lora_dropout does not work on parameters; leave it out.")
    blocks = r".*\.(blocks|prelude|core|coda)\.\d+\.(attention|cross)\."
    matrices = [
        name
        for name, _ in model.named_parameters()
        if name.endswith(STACKS) and not any(part in name for part in NEW_PARTS)
    ]
    config = LoraConfig(
        **settings, target_modules=rf"{blocks}({'|'.join(LAYERS)})", target_parameters=matrices
    )
    tuner = LoraModel(model, config, "default")
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name or any(part in name for part in NEW_PARTS))
    return tuner
