"""The Subjective Timescale Transformer (2511.21408): every second layer decides for itself when a token is news, by
foreseeing its own work from the token before.

    training     y = block(x) for every token, D = y - x
                 P_t = TransitionNet(norm(y_{t-1}))         foreseen from the token before; loss |P - sg(D)|^2 / d
                 surprise.py: D_st, D_ch -> g                        the teacher, which needs the block's result
                 chosen: Top-K of g, or g >= gate_threshold (`stt_capacity="variable"`)
                 student: r_t = router[x_t, x_{t-1}], binary cross-entropy with who was chosen
                 passed on: `trains_on="gated"`  x_t + scale (block(x of the chosen)_t - x_t), the others x_t
                            `trains_on="dense"`  y
    inference    sigmoid(r) decides; the chosen get the block's result, the others stay; no surprise is computed

The published runs never trained the student (its loss was looked up under another name and weighed 0) and one of them
trained on the dense result alone. Here its loss is part of the total.

Where paper and code are silent or differ:
- Training multiplies with g, inference with 1. scale="straight", the default, has the value 1 and the gradient of g,
  so that what is trained is what runs; scale="gate" is as published; scale="student" multiplies with sigmoid(r) in
  both, so that the task teaches the student too, and does not teach o, m and b.
- The student reads both states through a norm. router_width=0 is the published linear map, else a net of that width.
- y_{t-1} is the block's result on every token, in training; at inference the transition net is not needed.
- gate_weight, of the mean of g, is 0 unless asked for (published with variable capacity, 0.01: gates collapse).
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from .block import norm
from .causal import CausalModel
from .routed import (
    RoutedCausalLM,
    RoutedClassifier,
    RoutedDecoderStack,
    RoutedEncoderDecoder,
    RoutedEncoderStack,
)
from .routing import LayerRouter, Sight, Verdict, wide_scores
from .sdt import SurpriseConfig
from .surprise import Prior, Recent, Surprise, foreseen_loss, wide


@strict
class STTConfig(SurpriseConfig):
    """A decoder whose routed layers take the tokens whose change a causal router expects to be news."""

    model_type = "tenuto_stt"

    scale: Literal["gate", "straight", "student", "constant", "learned", "none"] = "straight"
    trains_on: Literal["gated", "dense"] = "gated"
    stt_capacity: Literal["fixed", "variable"] = "fixed"
    gate_threshold: float = 0.5  # g_th of variable capacity
    gate_weight: float = 0.0  # of the mean of g
    router_width: int = 0  # of the student's hidden layer; 0: linear

    def validate_gates(self):
        """A gate lies between 0 and 1."""
        if not 0 < self.gate_threshold < 1 or self.router_width < 0:
            raise ValueError(
                f"gate_threshold={self.gate_threshold} must lie between 0 and 1, router_width={self.router_width} be at"
                " least 0."
            )
        if self.scale == "student" and self.trains_on == "dense":
            raise ValueError(
                'scale="student" multiplies in training as well, trains_on="dense" passes on what is not multiplied:'
                " choose one of them."
            )
        if self.layer_capacities is not None and self.stt_capacity == "variable":
            raise ValueError(
                f'layer_capacities={self.layer_capacities} have nothing to set with stt_capacity="variable":'
                " gate_threshold decides."
            )

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses by name."""
        return {**super().loss_weights(), "gate": self.gate_weight}


class STTRouter(LayerRouter):
    """Transition net, teacher and student of one layer."""

    remembers = True

    def __init__(self, config):
        super().__init__(config)
        size, width = config.hidden_size, config.router_width
        self.transition, self.surprise = Prior(config, config.prior_width), Surprise(config)
        self.norm = norm(config)
        if width:
            self.student = nn.Sequential(
                nn.Linear(2 * size, width, bias=False), nn.SiLU(), nn.Linear(width, 1, bias=False)
            )
        else:
            self.student = nn.Sequential(nn.Linear(2 * size, 1, bias=False))
        for layer in self.student:
            layer.starts_normal = 0.02

    @property
    def row_macs(self) -> int:
        return sum(layer.weight.numel() for layer in self.student if isinstance(layer, nn.Linear))

    @property
    def teacher_macs(self) -> int:
        return self.transition.row_macs

    def look(self, sight: Sight) -> Verdict:
        # the task's loss does not reach the states through the student
        x_Nd = self.norm(sight.x.detach())
        pair_N2d = torch.cat([x_Nd, sight.previous("input", x_Nd)], -1)
        logit_N = wide_scores(self.student, pair_N2d)
        verdict = Verdict(logit_N.sigmoid(), None, taught=logit_N)
        if self.config.scale in ("constant", "learned"):
            verdict.scale = self.scaled(logit_N)
        elif self.config.scale == "student":
            verdict.scale = verdict.causal
        if sight.training or sight.watch:
            self._teach(verdict, sight)
        return verdict

    def _teach(self, verdict: Verdict, sight: Sight) -> None:
        """The teacher's score, from the block's result on every token."""
        config, y_Nd = self.config, sight.run()
        residual_Nd = wide(y_Nd) - wide(sight.x)
        foreseen_Nd = self.transition(sight.previous("result", y_Nd))
        change_N, error_N = self.surprise.distances(sight.x, residual_Nd, foreseen_Nd)
        recent = Recent(sight.rows, sight.position, config.surprise_window)
        gate_N, s_ce, s_cu = self.surprise(
            change_N, error_N, recent.average(recent.grid(change_N.detach(), None))
        )
        verdict.teacher = gate_N
        verdict.signs |= {"gate": gate_N.mean(), "s_ce": s_ce.mean(), "s_cu": s_cu.mean(),
                          "change": change_N.mean(), "error": error_N.mean()}  # fmt: skip
        if sight.training:
            if config.scale != "student":
                verdict.scale = self.scaled(gate_N)
            verdict.dense, verdict.passes_dense = y_Nd, config.trains_on == "dense"
            verdict.losses = {"prior": foreseen_loss(residual_Nd, foreseen_Nd), "gate": gate_N.mean()}

    def learn(self, verdict: Verdict, chosen_N: Tensor) -> None:
        verdict.teach(chosen_N)


class STTStack(RoutedDecoderStack):
    """Ordinary and routed layers in turn."""

    router_class = STTRouter


class STTModel(CausalModel):
    """Bare decoder."""

    config_class, stack_class = STTConfig, STTStack


class STTForCausalLM(RoutedCausalLM):
    """Decoder and language-model head."""

    config_class, stack_class = STTConfig, STTStack


class STTEncoderStack(RoutedEncoderStack):
    """The same for an encoder, or an encoder-decoder."""

    router_class = STTRouter


class STTForSequenceClassification(RoutedClassifier):
    """Encoder and classifier."""

    config_class, stack_class = STTConfig, STTEncoderStack


class STTForSeq2SeqLM(RoutedEncoderDecoder):
    """Encoder and decoder."""

    config_class, stack_class = STTConfig, STTEncoderStack
