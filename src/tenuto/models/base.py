"""What every tenuto model shares: configuration fields, output form, weight initialisation."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .attention import BucketBias, RelativeWindow
from .experts import ExpertLinear
from .linear_attention import LinearAttention
from .memory import Memory

TERMS = {"task", "act", "mim", "switch", "ponder", "exit", "prior", "router", "gate", "forecast"}


@strict
class AdaptiveConfig(PreTrainedConfig):
    """Fields of a block and of the heads; the papers' symbols stand beside them.

    Architectures add their topology: see `TransformerConfig`, `UniversalTransformerConfig`,
    `SparseUniversalTransformerConfig`.
    """

    is_encoder_decoder: bool = False
    vocab_size: int = 32000
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = True  # source, target and output embeddings are one matrix

    hidden_size: int = 512  # d
    num_attention_heads: int = 8  # H, of one expert
    num_key_value_heads: int | None = (
        None  # below num_attention_heads: grouped-query attention; None: as many
    )
    head_dim: int = 64  # D
    attention_bias: bool = False  # on queries, keys and values, as Qwen2 has
    attention_experts: int = 1  # E; 1: ordinary multi-head attention
    attention_experts_per_token: int = 1  # k
    intermediate_size: int = 2048  # D of the feed-forward, of one expert
    ffn_experts: int = 1  # E; 1: ordinary feed-forward
    ffn_experts_per_token: int = 1  # k
    activation: Literal["relu", "gelu", "swiglu"] = "relu"

    router: Literal["mlp", "linear"] = "mlp"
    router_samples: int = 0  # sample_topk: how many of the k are drawn at random in training
    balance_loss: Literal["mim", "switch"] = "mim"
    balance_weight: float = 0.0  # per token: does not change with batch size or length

    positions: Literal["sinusoidal", "none"] = "sinusoidal"  # added once, to the input
    relative_positions: Literal["window", "t5", "none"] = "none"
    window: int = 64  # W
    relative_buckets: int = 32
    relative_max_distance: int = 128

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_placement: Literal["post", "pre", "sandwich"] = "post"
    norm_eps: float = 1e-5

    dropout: float = 0.1  # embeddings and residual branches
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    router_dropout: float = 0.0
    type_vocab_size: int = 0  # segments told apart by a learned vector (0: none)
    classifier_pooling: Literal["first", "mean", "pair"] = "first"
    encode_apart: bool = False  # of pooling "pair": each sentence as if the other were not there (apart.py)
    label_smoothing: float = 0.0

    keys_to_ignore_at_inference = [
        "losses", "last_hidden_state", "depths", "expected_depths", "decoder_depths", "decoder_expected_depths",
        "compute", "routing", "balance", "cache", "signs", "executed",
    ]  # fmt: skip

    def validate_experts(self):
        """A token cannot choose more experts than there are, nor heads be shared unevenly."""
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if shared is not None and (shared < 1 or heads % shared):
            raise ValueError(f"num_key_value_heads={shared} must divide num_attention_heads={heads}.")
        for part in ("attention", "ffn"):
            experts = getattr(self, f"{part}_experts")
            chosen = getattr(self, f"{part}_experts_per_token")
            if not 1 <= chosen <= experts:
                raise ValueError(
                    f"{part}_experts_per_token={chosen} must lie between 1 and {part}_experts={experts}."
                )
            if self.router_samples >= chosen and experts > 1:
                raise ValueError(
                    f"router_samples={self.router_samples} must be below"
                    f" {part}_experts_per_token={chosen}: at least one expert is chosen, not drawn."
                )

    def validate_positions(self):
        """A window of relative positions reaches at least one token to each side."""
        pair, kinds = self.classifier_pooling == "pair", self.type_vocab_size
        if pair and kinds < 2 and not self.encode_apart:
            raise ValueError(
                f'classifier_pooling="pair" compares two segments and needs type_vocab_size of at least 2, got {kinds}.'
            )
        if self.encode_apart and (not pair or kinds):
            raise ValueError(
                f'encode_apart needs classifier_pooling="pair" and type_vocab_size=0, got {self.classifier_pooling!r}'
                f" and {kinds}: nothing but their tokens tells the sentences apart."
            )
        if self.relative_positions == "window" and self.window < 1:
            raise ValueError(f'relative_positions="window" needs window of at least 1, got {self.window}.')
        buckets, far = self.relative_buckets, self.relative_max_distance
        if self.relative_positions == "t5" and not (buckets >= 4 and far > buckets // 2):
            raise ValueError(
                f"relative_buckets={buckets} must be at least 4, and relative_max_distance={far} above half of it."
            )


@dataclass
class StackOutput(ModelOutput):
    """What a stack gives: states of every token, and what it did for each.

    hidden: [B, T, d] s_L. depths: [B, T] int, steps executed (0 at pads). expected_depths: [B, T] sum_l a_l l.
    balance: sum of statistics for each router, by name. routing: with `output_routing`, one
    (step, module, places [N], experts [N, k], gates [N, k]) for each application. compute: the ledger.
    losses, signs: terms of the loss and figures to log that routed layers have, by name. executed: [B, T, L] bool,
    which layers each token ran, of a routed stack.
    """

    hidden: Tensor | None = None
    depths: Tensor | None = None
    expected_depths: Tensor | None = None
    balance: dict | None = None
    routing: list | None = None
    compute: Any = None
    losses: dict | None = None
    signs: dict | None = None
    executed: Tensor | None = None


@dataclass
class AdaptiveOutput(ModelOutput):
    """Output of the models with heads.

    loss: the task's loss plus the weighted auxiliary ones. losses: every term, unweighted, by name.
    depths: [B, T] steps executed per token; expected_depths: [B, T] the mean of the halting distribution.
    decoder_depths, decoder_expected_depths: the same for the decoder.
    compute: `Ledger`, MACs by kind and K/V bytes per sequence.
    balance: router statistics by name (training, or `output_routing`). routing: see `StackOutput`.
    cache: keys and values of a causal language model's tokens, to go on from.
    signs, executed: of routed models, see `StackOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    losses: dict | None = None
    last_hidden_state: Tensor | None = None
    depths: Tensor | None = None
    expected_depths: Tensor | None = None
    decoder_depths: Tensor | None = None
    decoder_expected_depths: Tensor | None = None
    compute: Any = None
    balance: dict | None = None
    routing: list | None = None
    cache: Any = None
    signs: dict | None = None
    executed: Tensor | None = None


class AdaptivePreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by every architecture."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    # transformers' Trainer must divide the loss by the accumulation steps: our loss is a mean, not a sum
    accepts_loss_kwargs = False
    _keep_in_fp32_modules_strict = {"levels"}
    stack_class: type

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif isinstance(module, ExpertLinear):
            n_in, n_out = module.weight.shape[1:]
            bound = (6 / (n_in + n_out)) ** 0.5
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RelativeWindow):
            init.zeros_(module.embedding)
        elif isinstance(module, BucketBias):
            init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, LinearAttention | Memory):
            module.reset_parameters()
        elif hasattr(module, "original_inv_freq"):
            # rotary frequencies are not in a checkpoint: transformers computes them
            super()._init_weights(module)
        if getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)
        if getattr(module, "starts_normal", None):
            init.normal_(module.weight, std=module.starts_normal)
        if getattr(module, "starts_as_sum", False):
            init.copy_(module.weight, torch.eye(len(module.weight)).repeat(1, 2))
        for name, value in getattr(module, "starts_at", {}).items():
            init.constant_(getattr(module, name), value)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    @staticmethod
    def refuse(unknown: dict) -> None:
        """Arguments that a forward does not know; transformers' own bookkeeping passes."""
        names = sorted(set(unknown) - {"return_dict", "num_items_in_batch"})
        if names:
            raise TypeError(f"The model takes no argument {', '.join(names)}.")

    def knobs_of(self, stack: nn.Module, knobs: dict[str, Any]) -> dict[str, Any]:
        """Those knobs of a call that the stack has; ValueError for another that was given."""
        given = [name for name, value in knobs.items() if value is not None and value is not False]
        foreign = [name for name in given if name not in stack.knobs]
        if foreign:
            raise ValueError(
                f"{type(self).__name__} has no {foreign[0]}; its knobs are {', '.join(stack.knobs)}."
            )
        return {name: value for name, value in knobs.items() if name in stack.knobs}

    def auxiliary(self, balance: dict) -> dict[str, Tensor]:
        """The balance loss over every router; {} without routers, and in evaluation, whatever it reports."""
        if not balance or not self.training:
            return {}
        kind = self.config.balance_loss
        terms = [getattr(statistics, kind)() for statistics in balance.values()]
        return {kind: torch.stack(terms).sum()}

    def weigh(self, losses: dict[str, Tensor], loss_weights: dict[str, float] | None) -> Tensor:
        """Sum of the terms: the task's with weight 1, the others with the config's or the call's weight."""
        weights = {"task": 1.0, **self.config.loss_weights(), **(loss_weights or {})}
        unknown = set(weights) - TERMS
        if unknown:
            raise ValueError(
                f"loss_weights names {sorted(unknown)}; the terms are {', '.join(sorted(TERMS))}."
            )
        return sum(weights.get(name, 0.0) * value for name, value in losses.items())
