"""The Subjective Depth Transformer (2511.21408): a layer looks how surprising each token was, the next one takes the
most surprising half.

    Decision layer, every token:     x' = x + D              D the block's residual
                                     P = PriorFFN(norm(x))   foreseen; loss |P - sg(D)|^2 / d
    surprise.py:                     D_st, D_ch -> S_CE, S_CU -> g
    Dynamic layer, Top-K of g:       x'_t + g_t (block(x' of the chosen)_t - x'_t)       the others stay x'

The Decision layer is the one before a routed layer; every token runs it, so a token's g is known before the Dynamic
layer and without any later token. Only Top-K is not causal: at inference a token is chosen if g reaches a level
calibrated on some text, or is among the highest of the last ones (routing.py). It stays scaled by g: training and
inference differ in nothing else. The paper and its code use Top-K, or an untrained router, there.

Variants, for comparison: `score` "change" ranks by D_st alone, "random" by chance; `scale` "constant"
multiplies with 0.757, what published gates come out as, "learned" with one learned number (ReZero).
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor

from .causal import CausalModel
from .routed import (
    RoutedCausalLM,
    RoutedClassifier,
    RoutedConfig,
    RoutedDecoderStack,
    RoutedEncoderDecoder,
    RoutedEncoderStack,
)
from .routing import LayerRouter, Sight, Verdict
from .surprise import Prior, Recent, Surprise, foreseen_loss, wide


@strict
class SurpriseConfig(RoutedConfig):
    """Fields of the two models that route by surprise."""

    surprise_window: int = 100  # W
    surprise_terms: Literal["both", "expected", "unexpected"] = "both"
    inverse_temperature: Literal["learned", "scheduled"] = "learned"
    normalise_surprise: bool = False

    def validate_window(self):
        """A window holds one token at least."""
        if self.surprise_window < 1:
            raise ValueError(f"surprise_window={self.surprise_window} must be at least 1.")


@strict
class SDTConfig(SurpriseConfig):
    """A decoder whose routed layers take the tokens that surprised the layer before them most."""

    model_type = "tenuto_sdt"

    score: Literal["gate", "change", "random"] = "gate"

    def validate_decisions(self):
        """Before every routed layer stands one that every token runs."""
        both = [layer for layer in self.routed_layers if layer - 1 in self.routed_layers]
        if both:
            raise ValueError(
                f"routed_layers={self.routed_layers}: layer {both[0]} follows another routed layer; every Dynamic layer"
                " needs a Decision layer, which every token runs, before it."
            )


class SDTRouter(LayerRouter):
    """The Decision layer's prior, and its surprise."""

    remembers = True

    def __init__(self, config):
        super().__init__(config)
        self.prior, self.surprise = Prior(config, config.prior_width), Surprise(config)

    @property
    def row_macs(self) -> int:
        return self.prior.row_macs

    def look(self, sight: Sight) -> Verdict:
        x_Nd, after_Nd = sight.before
        residual_Nd, foreseen_Nd = wide(after_Nd) - wide(x_Nd), self.prior(x_Nd)
        change_N, error_N = self.surprise.distances(x_Nd, residual_Nd, foreseen_Nd)
        recent = Recent(sight.rows, sight.position, self.config.surprise_window)
        grid = recent.grid(change_N.detach(), sight.past.get("change"))
        sight.past["change"] = recent.history(grid)
        gate_N, s_ce, s_cu = self.surprise(change_N, error_N, recent.average(grid))
        score_N = {
            "gate": lambda: gate_N,
            "change": lambda: change_N / (1 + change_N),
            "random": lambda: chance(sight),
        }[self.config.score]()
        signs = {"gate": gate_N.mean(), "s_ce": s_ce.mean(), "s_cu": s_cu.mean(),
                 "change": change_N.mean(), "error": error_N.mean()}  # fmt: skip
        losses = {"prior": foreseen_loss(residual_Nd, foreseen_Nd)} if sight.training else {}
        return Verdict(score_N, score_N, self.scaled(gate_N), losses=losses, signs=signs)


def chance(sight: Sight) -> Tensor:
    """[N] numbers in 0..1: drawn in training; else a hash of layer and position, the same in one pass and in pieces."""
    if sight.training:
        return torch.rand(len(sight.rows), device=sight.x.device)
    mixed = (sight.position * 2654435761 + sight.layer * 40503) % 4294967296
    for _ in range(2):
        mixed = ((mixed >> 16) ^ mixed) * 73244475 % 4294967296
    return ((mixed >> 8) % 65536).float() / 65536


class SDTStack(RoutedDecoderStack):
    """Decision and Dynamic layers in turn."""

    router_class = SDTRouter


class SDTModel(CausalModel):
    """Bare decoder."""

    config_class, stack_class = SDTConfig, SDTStack


class SDTForCausalLM(RoutedCausalLM):
    """Decoder and language-model head."""

    config_class, stack_class = SDTConfig, SDTStack


class SDTEncoderStack(RoutedEncoderStack):
    """The same for an encoder, or an encoder-decoder."""

    router_class = SDTRouter


class SDTForSequenceClassification(RoutedClassifier):
    """Encoder and classifier."""

    config_class, stack_class = SDTConfig, SDTEncoderStack


class SDTForSeq2SeqLM(RoutedEncoderDecoder):
    """Encoder and decoder."""

    config_class, stack_class = SDTConfig, SDTEncoderStack
