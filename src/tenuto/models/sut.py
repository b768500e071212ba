"""Sparse Universal Transformer (Tan, Shen, Chen, Courville, Gan 2023; arXiv 2310.07096).

A Universal Transformer whose block is sparse: mixture of multi-head attention (MoMHA, attention.py), mixture of
experts in the feed-forward (SMoE, experts.py), the mutual-information loss that keeps experts both used and
specialised, stick-breaking halting (halting.py) and the ACT penalty. The loop is universal.py's; this file is the
paper's configuration of it. E = 1 everywhere gives the Universal Transformer back, to the last bit.

Errors of the released code that are not repeated, each with a test: the sign of the mutual-information loss; loss
weights that shrink with the batch; statistics kept between evaluation and training; the no-halting variant that
cannot run; relative offsets clipped at W-1; halted queries re-normalised; MIM gradient into the halting net.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict

from .heads import EncoderModel, SequenceClassifier
from .seq2seq import EncoderDecoder
from .universal import UniversalStack, UniversalTransformerConfig


@strict
class SparseUniversalTransformerConfig(UniversalTransformerConfig):
    """Defaults: `sut-base`, attention (E, k, H, D, W) = (24, 4, 4, 64, 64), feed-forward (24, 4, 512)."""

    model_type = "tenuto_sut"

    num_attention_heads: int = 4
    head_dim: int = 64
    attention_experts: int = 24
    attention_experts_per_token: int = 4
    intermediate_size: int = 512
    ffn_experts: int = 24
    ffn_experts_per_token: int = 4
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    relative_positions: Literal["window", "t5", "geometric", "none"] = "window"
    window: int = 64


class SparseUniversalTransformerModel(EncoderModel):
    """Bare encoder."""

    config_class, stack_class = SparseUniversalTransformerConfig, UniversalStack


class SparseUniversalTransformerForSequenceClassification(SequenceClassifier):
    """Encoder and classifier."""

    config_class, stack_class = SparseUniversalTransformerConfig, UniversalStack


class SparseUniversalTransformerForSeq2SeqLM(EncoderDecoder):
    """Encoder and decoder, halting in both."""

    config_class, stack_class = SparseUniversalTransformerConfig, UniversalStack
