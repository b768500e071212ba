"""Models: first the architectures, each like its paper; then the rooms, each mechanism once.

    dense.py       Transformer                          Vaswani et al. 2017; with experts, MoA (Zhang et al. 2022)
    universal.py   Universal Transformer                Dehghani et al. 2019
    sut.py         Sparse Universal Transformer         Tan et al. 2023
    looped.py      looped language model                prelude, core x loops, coda; num_loops=1: dense decoder
    mod.py         Mixture-of-Depths                    Raposo et al. 2024
    sdt.py         Subjective Depth Transformer         Wieser et al. 2025
    stt.py         Subjective Timescale Transformer     Wieser et al. 2025

    base heads seq2seq causal                           config, output, heads
    routed                                              the stack whose layers some tokens go around
    block attention experts halting routing surprise rows cache ledger                          the mechanisms

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
from .mod import MoDConfig, MoDForCausalLM, MoDForSeq2SeqLM, MoDForSequenceClassification, MoDModel
from .sdt import SDTConfig, SDTForCausalLM, SDTForSeq2SeqLM, SDTForSequenceClassification, SDTModel
from .stt import STTConfig, STTForCausalLM, STTForSeq2SeqLM, STTForSequenceClassification, STTModel
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

DECODERS = (
    (LoopedConfig, LoopedModel, LoopedForCausalLM),
    (MoDConfig, MoDModel, MoDForCausalLM, MoDForSequenceClassification, MoDForSeq2SeqLM),
    (SDTConfig, SDTModel, SDTForCausalLM, SDTForSequenceClassification, SDTForSeq2SeqLM),
    (STTConfig, STTModel, STTForCausalLM, STTForSequenceClassification, STTForSeq2SeqLM),
)

for family, autos in (
    (ARCHITECTURES, (AutoModel, AutoModelForSequenceClassification, AutoModelForSeq2SeqLM)),
    (
        DECODERS,
        (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForSeq2SeqLM),
    ),
):
    for config, *models in family:
        AutoConfig.register(config.model_type, config)
        # a looped model has no encoder's heads
        for auto, model in zip(autos, models, strict=False):
            auto.register(config, model)
            # a saved checkpoint carries its code, so that it loads where tenuto is not installed
            model.register_for_auto_class(auto.__name__)
        config.register_for_auto_class()
