"""Models: first the architectures, each like its paper; then the rooms, each mechanism once.

    dense.py       Transformer                          Vaswani et al. 2017; with experts, MoA (Zhang et al. 2022)
    universal.py   Universal Transformer                Dehghani et al. 2019
    sut.py         Sparse Universal Transformer         Tan et al. 2023
    looped.py      looped language model                prelude, core x loops, coda; num_loops=1: dense decoder

    base heads seq2seq causal                           config, output, heads
    block attention experts halting rows cache ledger   the mechanisms

Importing this module registers every architecture with transformers' Auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from .dense import (
    TransformerConfig,
    TransformerForSeq2SeqLM,
    TransformerForSequenceClassification,
    TransformerModel,
)
from .looped import LoopedConfig, LoopedForCausalLM, LoopedModel
from .sut import (
    SparseUniversalTransformerConfig,
    SparseUniversalTransformerForSeq2SeqLM,
    SparseUniversalTransformerForSequenceClassification,
    SparseUniversalTransformerModel,
)
from .universal import (
    UniversalTransformerConfig,
    UniversalTransformerForSeq2SeqLM,
    UniversalTransformerForSequenceClassification,
    UniversalTransformerModel,
)

ARCHITECTURES = (
    (
        TransformerConfig,
        TransformerModel,
        TransformerForSequenceClassification,
        TransformerForSeq2SeqLM,
    ),
    (
        UniversalTransformerConfig,
        UniversalTransformerModel,
        UniversalTransformerForSequenceClassification,
        UniversalTransformerForSeq2SeqLM,
    ),
    (
        SparseUniversalTransformerConfig,
        SparseUniversalTransformerModel,
        SparseUniversalTransformerForSequenceClassification,
        SparseUniversalTransformerForSeq2SeqLM,
    ),
)

DECODERS = ((LoopedConfig, LoopedModel, LoopedForCausalLM),)

for family, autos in (
    (ARCHITECTURES, (AutoModel, AutoModelForSequenceClassification, AutoModelForSeq2SeqLM)),
    (DECODERS, (AutoModel, AutoModelForCausalLM)),
):
    for config, *models in family:
        AutoConfig.register(config.model_type, config)
        for auto, model in zip(autos, models, strict=True):
            auto.register(config, model)
            # a saved checkpoint carries its code, so that it loads where tenuto is not installed
            model.register_for_auto_class(auto.__name__)
        config.register_for_auto_class()
