"""Mixture-of-Depths (Raposo et al. 2024, 2404.02258): a linear router ranks the tokens, a layer takes the first k.

    r_i = w . x_i
    Top-K of r:   x_i <- x_i + sigmoid(r_i) (block(x)_i - x_i)                    the others stay as they are

What decides at inference (`causal_router`), where Top-K of the whole sequence is not to be had:
    router      the router itself; with router_weight > 0 a binary cross-entropy teaches sigmoid(r) to be "among the k"
    predictor   a small net beside it that is taught so, from states without gradient: costs the task nothing

The paper multiplies with r itself; sigmoid(r), which cannot blow up, is what users of it came to. The published SDT
baseline multiplied with r, at the base learning rate and without auxiliary loss: not a strong one. Unlike there, each
sequence has its own Top-K, its own attention, and padding is never chosen.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from .causal import CausalModel
from .routed import (
    RoutedCausalLM,
    RoutedClassifier,
    RoutedConfig,
    RoutedDecoderStack,
    RoutedEncoderDecoder,
    RoutedEncoderStack,
)
from .routing import LayerRouter, Sight, Verdict, wide_scores


@strict
class MoDConfig(RoutedConfig):
    """A decoder whose routed layers take the tokens that a linear router ranks first."""

    model_type = "tenuto_mod"

    causal_router: Literal["router", "predictor"] = "router"


class MoDRouter(LayerRouter):
    """The linear router, and the predictor where that decides."""

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.router = nn.Linear(size, 1, bias=False)
        self.router.starts_normal = 0.02
        self.predictor = None
        if config.causal_router == "predictor":
            self.predictor = nn.Sequential(
                nn.Linear(size, max(1, size // 4)), nn.GELU(), nn.Linear(max(1, size // 4), 1)
            )

    @property
    def row_macs(self) -> int:
        nets = (
            [self.router] if self.predictor is None else [self.router, self.predictor[0], self.predictor[2]]
        )
        return sum(net.weight.numel() for net in nets)

    def look(self, sight: Sight) -> Verdict:
        logit_N = wide_scores(self.router, sight.x)
        gate_N, taught_N = logit_N.sigmoid(), logit_N
        if self.predictor is not None:
            taught_N = wide_scores(self.predictor, sight.x.detach())
        signs = {"gate": gate_N.mean()}
        return Verdict(taught_N.sigmoid(), gate_N, self.scaled(gate_N), taught=taught_N, signs=signs)

    def learn(self, verdict: Verdict, chosen_N: Tensor) -> None:
        verdict.teach(chosen_N)


class MoDStack(RoutedDecoderStack):
    """The decoder's blocks and their routers."""

    router_class = MoDRouter


class MoDModel(CausalModel):
    """Bare decoder."""

    config_class, stack_class = MoDConfig, MoDStack


class MoDForCausalLM(RoutedCausalLM):
    """Decoder and language-model head."""

    config_class, stack_class = MoDConfig, MoDStack


class MoDEncoderStack(RoutedEncoderStack):
    """The same for an encoder, or an encoder-decoder."""

    router_class = MoDRouter


class MoDForSequenceClassification(RoutedClassifier):
    """Encoder and classifier."""

    config_class, stack_class = MoDConfig, MoDEncoderStack


class MoDForSeq2SeqLM(RoutedEncoderDecoder):
    """Encoder and decoder."""

    config_class, stack_class = MoDConfig, MoDEncoderStack
