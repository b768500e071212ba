"""Muon for the matrices of the blocks, AdamW for everything else (Jordan et al. 2024).

    M <- b M + (1-b) G        U = NewtonSchulz((1-b) G + b M)        W <- (1 - lr wd) W - lr max(1, out/in)^0.5 U

U is the nearest matrix to the momentum with all singular values near 1. torch.optim.Muon does the same, but in
bfloat16 (which a CPU without native support runs a hundred times slower) and for 2-D weights only: here an expert
stack [E, in, out] is E matrices, in the weights' own precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# coefficients of the quintic iteration, from the same source
_A, _B, _C = 3.4445, -4.7750, 2.0315
_MATRICES = ("query", "key", "value", "output", "up", "gate", "down")
# a vector for each loop, expert or offset: of more than one dimension, and no matrix
_STACKED = ("bias", "scale")


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """[..., n, m] -> the same singular vectors with singular values near 1 (0.7 to 1.2)."""
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x if matrix.shape[-2] <= matrix.shape[-1] else x.mT


class MuonAdamW(Optimizer):
    """One optimizer, so that one schedule drives both: groups with `muon` true take Muon's step, others AdamW's."""

    def __init__(self, groups: list[dict], betas=(0.9, 0.98), momentum=0.95, eps=1e-8):
        super().__init__(groups, {"betas": betas, "momentum": momentum, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    (self._muon if group["muon"] else self._adam)(group, weight, self.state[weight])
        return loss

    def _muon(self, group: dict, weight: Tensor, state: dict) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        b, grad = group["momentum"], weight.grad
        state["momentum"].lerp_(grad, 1 - b)
        update = orthogonalize(grad.lerp(state["momentum"], b))
        # nn.Linear keeps [out, in], an expert stack [E, in, out]
        n_out, n_in = weight.shape if weight.ndim == 2 else (weight.shape[2], weight.shape[1])
        weight.add_(update, alpha=-group["lr"] * max(1.0, n_out / n_in) ** 0.5)

    def _adam(self, group: dict, weight: Tensor, state: dict) -> None:
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(weight), "second": torch.zeros_like(weight)}
        state["step"] += 1
        (b1, b2), grad = group["betas"], weight.grad
        state["first"].lerp_(grad, 1 - b1)
        state["second"].lerp_(grad * grad, 1 - b2)
        first = state["first"] / (1 - b1 ** state["step"])
        second = state["second"] / (1 - b2 ** state["step"])
        weight.addcdiv_(first, second.sqrt() + group["eps"], value=-group["lr"])


def parameter_groups(
    model: nn.Module, muon_lr: float, lr: float, weight_decay: float, rates: dict[str, float] | None = None,
    late: str | None = None,
) -> list[dict]:  # fmt: skip
    """Parameter groups of a tenuto model: block matrices to Muon (to AdamW if muon_lr is 0), the rest to AdamW; no
    decay for vectors, stacked ones (loop_scale, biases of experts and of offsets) included. rates: AdamW's rate by a
    part of the parameter's name, the first that fits; ValueError if one fits none. late: parameters with this in their
    name come in groups of their own, marked `late`.
    """
    groups: dict[tuple[bool, float, bool, bool], list] = {}
    rates, used = rates or {}, set()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        parts = name.split(".")
        block = len(parts) > 1 and parts[-2] in _MATRICES and parts[-1] == "weight"
        pattern = next((one for one in rates if one in name), None)
        used.add(pattern)
        muon = bool(muon_lr) and block and pattern is None
        rate = muon_lr if muon else rates.get(pattern, lr)
        decays = weight.ndim > 1 and parts[-1] not in _STACKED
        groups.setdefault((muon, rate, decays, late is not None and late in name), []).append(weight)
    idle = sorted(set(rates) - used)
    if idle:
        raise ValueError(
            f"learning_rates: {idle[0]!r} fits no parameter's name, or none that a pattern before it leaves."
        )
    return [
        {
            "params": some,
            "muon": muon,
            "lr": rate,
            "weight_decay": weight_decay if decays else 0.0,
            "late": last,
        }
        for (muon, rate, decays, last), some in sorted(
            groups.items(), key=lambda pair: (not pair[0][0], not pair[0][2])
        )
    ]
