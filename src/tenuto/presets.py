"""The papers' configurations by name, and what each costs by the papers' counting rule."""

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

# Table 1 of SUT counts 10 source and 10 target tokens, every linear and expert weight used (the output projection
# too), and leaves attention scores out. Sizes of the vocabulary: 32,000 reproduces the baselines, 37,200 the SUT rows.
SOURCE_TOKENS = TARGET_TOKENS = 10

MACS_RULE = (
    "10 source + 10 target tokens; linear and expert weights, routers, halting nets and output projection;"
    " keys and values projected at every step; attention scores not counted"
)

CAUSAL_LENGTH = 1024
CAUSAL_RULE = (
    "per token at length 1,024, nobody stopping: linear weights, attention scores over the tokens before (half of the"
    " length on average), halting nets and output projection"
)


@dataclass(frozen=True)
class Preset:
    """architecture: name of a config class's family; values: config fields; paper: where it comes from.

    macs_published: Table 1's figure in MACs, parameters_published: its figure, where there is one.
    """

    architecture: str
    values: dict[str, Any]
    paper: str
    macs_published: int | None = None
    parameters_published: int | None = None
    note: str = ""


_SUT = "Tan et al. 2023 (2310.07096)"
_BASE = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "intermediate_size": 2048}
_BIG = {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64, "intermediate_size": 4096}
_UT_WMT = {
    "relative_positions": "window", "window": 64, "activation": "gelu", "num_loops": 6, "num_decoder_loops": 6,
    "dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2, "label_smoothing": 0.1,
}  # fmt: skip
_SUT_WMT = {
    **_UT_WMT, "vocab_size": 37200, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 64,
    "attention_experts": 24, "attention_experts_per_token": 4, "intermediate_size": 512, "ffn_experts": 24,
    "ffn_experts_per_token": 4, "router_dropout": 0.2, "balance_weight": 1.2e-5, "act_weight": 1.2e-4,
}  # fmt: skip
_TINY = {
    "vocab_size": 32, "num_labels": 7, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 8,
    "intermediate_size": 32, "dropout": 0.0,
}  # fmt: skip
_UT_NOTE = (
    "The published UT rows follow no rule we could find: six passes of a 45M block at 10 tokens are 2.9G"
    " (base) and 5.3G (big); 1998M and 3707M are 4.0 and 4.1 passes, or the 33% skip quoted for WMT."
)
_VOCAB_NOTE = (
    "The published MACs are those of 32,000 tokens; the published parameters hold a joint dictionary of about"
    " 37,000, 2.7M more."
)

_LOOPED = "ours, after 2502.05171 and 2510.25741"
_LOOPED_100M = {
    "vocab_size": 32000, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2816, "loss_chunk": 2048,
}  # fmt: skip
_LOOPED_4M = {
    "vocab_size": 4096, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 704,
}  # fmt: skip
_LOOPED_1M = {
    "vocab_size": 2048, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 352,
}  # fmt: skip

_MOD, _SDT = "2404.02258", "2511.21408"
_QWEN = {
    "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 4864, "attention_bias": True, "norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "max_position_embeddings": 32768,
}  # fmt: skip
_ROUTED_1M = {
    "vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 32,
    "intermediate_size": 344, "max_position_embeddings": 1024,
}  # fmt: skip
_ROUTED_TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 512, "score_window": 5,
}  # fmt: skip

PRESETS: dict[str, Preset] = {
    "transformer-base": Preset(
        "transformer", {**_BASE, "vocab_size": 32000}, "Vaswani et al. 2017 (1706.03762)", 604_000_000, 65_000_000,
        _VOCAB_NOTE,
    ),
    "transformer-big": Preset(
        "transformer", {**_BIG, "vocab_size": 32000, "dropout": 0.3}, "Ott et al. 2018 (1806.00187)",
        2_090_000_000, 210_000_000,
    ),
    "admin-18l-18l": Preset(
        "transformer", {**_BASE, "vocab_size": 32000, "num_hidden_layers": 18, "num_decoder_layers": 18},
        "Liu et al. 2020 (2004.08249), sizes only", 1_490_000_000, 151_000_000, _VOCAB_NOTE,
    ),
    "admin-60l-12l": Preset(
        "transformer", {**_BASE, "vocab_size": 32000, "num_hidden_layers": 60, "num_decoder_layers": 12},
        "Liu et al. 2020 (2004.08249), sizes only", 2_550_000_000, 256_000_000,
    ),
    "moa-base": Preset(
        "transformer",
        {**_BASE, "vocab_size": 32000, "num_attention_heads": 1, "head_dim": 128, "attention_experts": 8,
         "attention_experts_per_token": 8, "router": "linear", "balance_loss": "switch", "balance_weight": 0.01,
         "dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.1},
        "Zhang et al. 2022 (2210.05144)", 628_000_000, 65_000_000, _VOCAB_NOTE,
    ),
    "ut-base": Preset(
        "universal",
        {**_UT_WMT, "vocab_size": 37200, "hidden_size": 512, "num_attention_heads": 32, "head_dim": 64,
         "intermediate_size": 15360},
        _SUT, 1_998_000_000, 64_000_000, _UT_NOTE,
    ),
    "ut-big": Preset(
        "universal",
        {**_UT_WMT, "vocab_size": 37200, "hidden_size": 512, "num_attention_heads": 64, "head_dim": 64,
         "intermediate_size": 29184},
        _SUT, 3_707_000_000, 105_000_000, _UT_NOTE,
    ),
    "sut-base": Preset("sut", _SUT_WMT, _SUT, 787_000_000, 66_000_000),
    "sut-base-no-halting": Preset(
        "sut", {**_SUT_WMT, "policy": "fixed", "act_weight": 0.0}, _SUT, None, 65_000_000,
        "Table 2's row without halting; its MACs are not published.",
    ),
    "sut-big": Preset(
        "sut", {**_SUT_WMT, "attention_experts": 48, "ffn_experts": 48, "router_samples": 1},
        _SUT, 787_000_000, 110_000_000,
        "Published with sut-base's MACs; the routers over 48 experts are larger (k, not E, sets the rest).",
    ),
    "sut-logic": Preset(
        "sut",
        {"vocab_size": 21, "num_labels": 7, "hidden_size": 256, "num_loops": 12, "num_decoder_loops": 12,
         "num_attention_heads": 2, "head_dim": 32, "attention_experts": 12, "attention_experts_per_token": 4,
         "window": 1, "intermediate_size": 128, "ffn_experts": 12, "ffn_experts_per_token": 4},
        _SUT, note="Attention (12,4,2,32,1), feed-forward (12,4,128), 12 steps as published; d is not, 256 is ours.",
    ),
    "ut-cfq": Preset(
        "universal",
        {"vocab_size": 32000, "hidden_size": 512, "num_loops": 8, "num_decoder_loops": 8, "num_attention_heads": 8,
         "head_dim": 64, "intermediate_size": 1024, "positions": "none", "relative_positions": "t5",
         "norm_placement": "pre"},
        _SUT, note="Attention (1,1,8,64,1), feed-forward (1,1,1024), T5-like; d and the vocabulary are not published."
        " The published 654M MACs could not be reconstructed.",
    ),
    "transformer-tiny": Preset("transformer", {**_TINY, "num_hidden_layers": 3, "num_decoder_layers": 3}, "for tests"),
    "moa-tiny": Preset(
        "transformer",
        {**_TINY, "num_hidden_layers": 3, "num_decoder_layers": 3, "num_attention_heads": 1,
         "attention_experts": 4, "attention_experts_per_token": 2, "router": "linear", "balance_loss": "switch",
         "balance_weight": 0.01},
        "for tests",
    ),
    "ut-tiny": Preset(
        "universal",
        {**_TINY, "num_loops": 4, "num_decoder_loops": 4, "positions": "none", "relative_positions": "t5",
         "norm": "rmsnorm", "norm_placement": "sandwich", "activation": "swiglu", "input_injection": "add",
         "act_weight": 0.01},
        "for tests",
    ),
    "sut-tiny": Preset(
        "sut",
        {**_TINY, "num_loops": 4, "num_decoder_loops": 4, "attention_experts": 6, "attention_experts_per_token": 2,
         "ffn_experts": 6, "ffn_experts_per_token": 2, "window": 3, "act_weight": 0.01, "balance_weight": 0.01},
        "for tests",
    ),
    "looped-100m": Preset(
        "looped", {**_LOOPED_100M, "num_core_layers": 4, "num_loops": 7}, _LOOPED,
        note="1 + 4 x 7 + 1 layers: dense-400m unrolled, with a quarter of its parameters.",
    ),
    "dense-100m": Preset(
        "looped", {**_LOOPED_100M, "num_core_layers": 4, "num_loops": 1, "input_injection": "none"}, _LOOPED,
        note="The same 6 layers, each run once: the yardstick of equal parameters.",
    ),
    "dense-400m": Preset(
        "looped", {**_LOOPED_100M, "num_core_layers": 28, "num_loops": 1, "input_injection": "none"}, _LOOPED,
        note="30 distinct layers: the yardstick of equal arithmetic.",
    ),
    "looped-4m": Preset("looped", {**_LOOPED_4M, "num_core_layers": 2, "num_loops": 4}, _LOOPED),
    "dense-4m": Preset(
        "looped", {**_LOOPED_4M, "num_core_layers": 2, "num_loops": 1, "input_injection": "none"}, _LOOPED
    ),
    "dense-4m-unrolled": Preset(
        "looped", {**_LOOPED_4M, "num_core_layers": 8, "num_loops": 1, "input_injection": "none"}, _LOOPED
    ),
    "looped-1m": Preset("looped", {**_LOOPED_1M, "num_core_layers": 2, "num_loops": 4}, _LOOPED),
    "dense-1m": Preset(
        "looped", {**_LOOPED_1M, "num_core_layers": 2, "num_loops": 1, "input_injection": "none"}, _LOOPED
    ),
    "dense-1m-unrolled": Preset(
        "looped", {**_LOOPED_1M, "num_core_layers": 8, "num_loops": 1, "input_injection": "none"}, _LOOPED
    ),
    **{
        f"{kind}-{size}": Preset(kind, {**values, **(window if kind != "mod" else {})}, paper, note=note)
        for kind, paper in (("mod", _MOD), ("sdt", _SDT), ("stt", _SDT))
        for size, values, window, note in (
            ("qwen-0.5b", _QWEN, {}, "Qwen2.5-0.5B's shape, as published: every second layer routed, capacity 0.5."),
            ("1m", _ROUTED_1M, {}, ""),
            ("tiny", _ROUTED_TINY, {"surprise_window": 5}, "for tests"),
        )
    },
    "looped-tiny": Preset(
        "looped",
        {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "num_loops": 4, "max_position_embeddings": 512},
        "for tests",
    ),
}  # fmt: skip


def preset(name: str, **overrides):
    """The config of a preset, with fields overridden. Unknown names and fields are refused in one sentence."""
    from . import models

    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " `tenuto presets` lists them."
        raise ValueError(f"There is no preset {name!r}.{hint}")
    chosen = PRESETS[name]
    config_class = getattr(models, _CONFIGS[chosen.architecture])
    unknown = sorted(set(overrides) - {field.name for field in fields(config_class)} - {"num_labels"})
    if unknown:
        raise ValueError(f"{name} ({config_class.__name__}) has no field {', '.join(unknown)}.")
    return config_class(**{**chosen.values, **overrides})


def config_of(recipe, **defaults):
    """A recipe's config: of its preset, or of the checkpoint it starts from; `defaults` are fields it may change."""
    if recipe.preset is not None:
        return preset(recipe.preset, **{**defaults, **recipe.config})
    from transformers import AutoConfig

    from . import models  # noqa: F401 - registers the architectures

    folder, file = Path(recipe.start), "config.json"
    if folder.suffix == ".gguf":
        folder, file = folder.parent, folder.name
    if not (folder / file).is_file():
        raise FileNotFoundError(f"There is no checkpoint {recipe.start} (looked for {folder / file}).")
    base = AutoConfig.from_pretrained(folder, **({} if file == "config.json" else {"gguf_file": file}))
    if recipe.convert:
        from .convert import target_config

        base, _ = target_config(base, tied=base.tie_word_embeddings, **recipe.convert)
    if not base.model_type.startswith("tenuto"):
        raise ValueError(
            f"{recipe.start} is of model_type {base.model_type!r}; `tenuto convert` makes a tenuto model of it."
        )
    unknown = sorted(set(recipe.config) - {field.name for field in fields(type(base))} - {"num_labels"})
    if unknown:
        raise ValueError(f"{recipe.start} ({type(base).__name__}) has no field {', '.join(unknown)}.")
    return type(base).from_dict({**base.to_dict(), **recipe.config})


CAUSAL = ("looped", "mod", "sdt", "stt")  # architectures whose presets are causal language models
HEADS = {"encoder": 0, "classification": 1, "text-to-text": 2}
DECODER_HEADS = {
    "decoder": 0,
    "causal": 1,
    "classification": 2,
    "text-to-text": 3,
}  # the last two: routed models
_CONFIGS = {
    "transformer": "TransformerConfig",
    "universal": "UniversalTransformerConfig",
    "sut": "SparseUniversalTransformerConfig",
    "looped": "LoopedConfig",
    "mod": "MoDConfig",
    "sdt": "SDTConfig",
    "stt": "STTConfig",
}


def build(config, head: str = "classification"):
    """A freshly initialised model of the config's architecture; `head` is one of `HEADS` or `DECODER_HEADS`."""
    from .models import ARCHITECTURES, DECODERS

    for family, heads in ((ARCHITECTURES, HEADS), (DECODERS, DECODER_HEADS)):
        for config_class, *models in family:
            if type(config) is config_class:
                known = [name for name, place in heads.items() if place < len(models)]
                if head not in known:
                    raise ValueError(
                        f"{config_class.__name__} has no head {head!r}; choose from {', '.join(known)}."
                    )
                return models[heads[head]](config)
    raise ValueError(f"{type(config).__name__} is not one of tenuto's configs.")


def costs(name: str) -> dict[str, Any]:
    """One row of `tenuto presets`: parameters and MACs, beside the published figures.

    Encoder-decoders are counted by Table 1's rule; causal models per token at length `CAUSAL_LENGTH`, everything
    included, nobody stopping.
    """
    import torch

    chosen = PRESETS[name]
    config = preset(name)
    causal = chosen.architecture in CAUSAL
    with torch.device("meta"):
        model = build(config, "causal" if causal else "text-to-text")
    model.tie_weights()
    head = config.hidden_size * config.vocab_size
    if causal:
        # a token sees half of the length on average
        macs = model.stack.token_macs() + head + model.stack.pair_macs() * (CAUSAL_LENGTH + 1) // 2
    else:
        source, target = model.encoder.token_macs(), model.decoder.token_macs() + head
        macs = SOURCE_TOKENS * source + TARGET_TOKENS * target
    return {
        "name": name,
        "architecture": chosen.architecture,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_published": chosen.parameters_published,
        "vocab": config.vocab_size,
        "macs": macs,
        "macs_rule": CAUSAL_RULE if causal else MACS_RULE,
        "macs_published": chosen.macs_published,
        "paper": chosen.paper,
        "note": chosen.note,
    }
