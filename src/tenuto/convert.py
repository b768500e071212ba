"""Pretrained decoders (Llama, Mistral, Qwen2, our own dense ones) as tenuto models: the same weights, other names.

    looped          the first layers are the prelude, the last the coda, the rest the core; neutral: one loop
    sdt, stt, mod   every layer in its place, routers on some; neutral: every token passes every layer ("dense")

At the neutral setting the converted model computes what its source computes. Every tensor of the source must find its
parameter and every parameter its tensor, but for those in `NEW`, which keep their initial values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from . import models
from .models.base import AdaptiveConfig
from .presets import build

# the config's class, and the call at which the model is its source
TARGETS = {
    "looped": ("LoopedConfig", {"max_steps": 1}),
    "sdt": ("SDTConfig", {"selection": "dense"}),
    "stt": ("STTConfig", {"selection": "dense"}),
    "mod": ("MoDConfig", {"selection": "dense"}),
}
SOURCES = ("llama", "mistral", "qwen2", "tenuto_looped")
OURS = SOURCES[-1]
# parameters that no source has
NEW = ("stack.routers.", "stack.injection.")
ROPE = ("default", "linear", "llama3", "yarn")
CHECKED = 512
# transformers' own fields, which are not of the model; the ids of special tokens are
_PRETRAINED = {one.name for one in dataclasses.fields(PreTrainedConfig)} - {
    "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
}  # fmt: skip

_PLACES = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "input_layernorm": "attention_branch.before",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
    "post_attention_layernorm": "feed_forward_branch.before",
}
_TOP = {"model.embed_tokens": "embed_tokens", "model.norm": "stack.final_norm", "lm_head": "lm_head"}


def read(source: str | Path, gguf: str | None = None) -> tuple[Any, Any]:
    """The model, in evaluation mode, and the tokenizer of a folder or a GGUF file.

    FileNotFoundError when there is none; ValueError when weights are missing, left over or of another shape, each
    named; ImportError when a GGUF is to be read without the package gguf.
    """
    folder = Path(source)
    if folder.suffix == ".gguf" and folder.is_file():
        folder, gguf = folder.parent, folder.name
    if not (folder / (gguf or "config.json")).is_file():
        raise FileNotFoundError(
            f"{folder} has no {gguf or 'config.json'}; convert reads a folder with config.json, its weights and a"
            " tokenizer, or a GGUF file (--gguf NAME)."
        )
    if gguf and not (find_spec("gguf") and find_spec("accelerate")):
        raise ImportError("Reading a GGUF file needs two more packages: pip install gguf accelerate.")
    more = {"gguf_file": gguf} if gguf else {}
    # other shapes are refused below, by name
    model, notes = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **more
    )
    _refuse_names(str(folder), "misses", notes["missing_keys"])
    _refuse_names(str(folder), "has more weights than its config.json says:", notes["unexpected_keys"])
    _refuse_names(
        str(folder),
        "has weights of other shapes than its config.json says:",
        [name for name, *_ in notes["mismatched_keys"]],
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **more)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no tokenizer that transformers can load: put its files there."
        ) from error
    return model.eval(), tokenizer


def _refuse_names(source: str, what: str, names: Iterable[str]) -> None:
    if some := sorted(names):
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        raise ValueError(f"{source} {what} {', '.join(some[:3])}{more}.")


def fields_of(config) -> dict[str, Any]:
    """A transformers config -> the fields of ours that say the same; ValueError naming a field that none can say."""
    if config.model_type not in SOURCES:
        raise ValueError(
            f"model_type={config.model_type!r} cannot be converted; {', '.join(SOURCES)} can be."
        )
    if config.model_type == OURS:
        return _our_fields(config)
    rope = dict(config.rope_parameters)
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0
    refused = {
        "hidden_act": (config.hidden_act != "silu", "the feed-forward is gated by silu alone"),
        "attention_bias": (getattr(config, "attention_bias", False), "attention's output has no bias"),
        "mlp_bias": (getattr(config, "mlp_bias", False), "the gated feed-forward has no biases"),
        "sliding_window": (_slides(config), "attention reads all that is before a token"),
        "rope_parameters": (
            partial or rope["rope_type"] not in ROPE,
            f"rotary positions turn whole heads and are of type {', '.join(ROPE)}",
        ),
    }
    for field, (wrong, why) in refused.items():
        if wrong:
            raise ValueError(f"{field}={getattr(config, field)!r} cannot be converted: in tenuto {why}.")
    ends = config.eos_token_id
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "attention_bias": config.model_type == "qwen2",
        "attention_dropout": config.attention_dropout,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_placement": "pre",
        "norm_eps": config.rms_norm_eps,
        "positions": "rotary",
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "scale_embeddings": False,
        "dropout": 0.0,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        # the generation settings keep them all
        "eos_token_id": ends[0] if isinstance(ends, list) else ends,
    }


def _our_fields(config) -> dict[str, Any]:
    """As `fields_of`, of a looped model that runs every layer once."""
    plain = {"num_loops": 1, "policy": "fixed", "mixer": "attention", "memory_chunk": 0, "loop_scale": False}
    for field, value in plain.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"{field}={getattr(config, field)!r} cannot be converted: a tenuto source is a plain dense decoder,"
                f" {field}={value!r}."
            )
    shared = {one.name for one in dataclasses.fields(AdaptiveConfig)} - {"is_encoder_decoder"}
    ours = ("positions", "rope_parameters", "max_position_embeddings", "scale_embeddings")
    return {name: getattr(config, name) for name in (*sorted(shared - _PRETRAINED), *ours)}


def _slides(config) -> bool:
    """Whether some layer's window is shorter than the longest text."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return window is not None and window < config.max_position_embeddings and "sliding_attention" in kinds


def target_config(source, to: str, tied: bool, **chosen):
    """The config of the target `to` for a transformers config, and the block of each layer by name, None if dropped.

    chosen: prelude, coda (1), loops (1), injection ("none") and drop, a list of layers to leave out, of `looped`;
    routed, a list of layers, of the others.
    """
    if to not in TARGETS:
        raise ValueError(f"There is no target {to!r} to convert to; choose from {', '.join(TARGETS)}.")
    own = ("prelude", "coda", "loops", "injection", "drop") if to == "looped" else ("routed",)
    idle = [name for name in chosen if name not in own]
    if idle:
        raise ValueError(f"{idle[0]} has nothing to set with the target {to}; it takes {', '.join(own)}.")
    fields, layers = {**fields_of(source), "tie_word_embeddings": tied}, source.num_hidden_layers
    config_class = getattr(models, TARGETS[to][0])
    if to != "looped":
        if "routed" in chosen:
            fields["routed_layers"] = chosen["routed"]
        return config_class(**fields, num_hidden_layers=layers), [f"stack.blocks.{i}" for i in range(layers)]
    drop = chosen.get("drop", [])
    if any(not 0 <= layer < layers for layer in drop) or len(set(drop)) < len(drop):
        raise ValueError(f"drop={drop} must name different layers from 0 to {layers - 1}.")
    whole, layers = layers, layers - len(drop)
    prelude, coda = chosen.get("prelude", 1), chosen.get("coda", 1)
    if min(prelude, coda) < 0 or prelude + coda >= layers:
        raise ValueError(
            f"prelude={prelude} and coda={coda} leave no layer of {layers} for the core; both must be at least 0 and"
            f" their sum at most {layers - 1}."
        )
    parts = {"prelude": prelude, "core": layers - prelude - coda, "coda": coda}
    config = config_class(
        **fields,
        **{f"num_{name}_layers": count for name, count in parts.items()},
        num_loops=chosen.get("loops", 1),
        input_injection=chosen.get("injection", "none"),
    )
    blocks = iter(f"stack.{name}.{i}" for name, count in parts.items() for i in range(count))
    return config, [None if layer in drop else next(blocks) for layer in range(whole)]


def renamed(name: str, blocks: list[str | None]) -> str | None:
    """The parameter that takes a source's tensor; "" when its layer is dropped, None when there is none."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    # a tenuto source has our names already
    place = _PLACES.get(part) or (part if part.startswith(("attention", "feed_forward")) else None)
    if not layer.isdigit() or int(layer) >= len(blocks) or place is None:
        return None
    block = blocks[int(layer)]
    return "" if block is None else f"{block}.{place}.{kind}"


@torch.no_grad()
def fill(model, source: dict[str, Tensor], blocks: list[str | None]) -> None:
    """Sets the parameters to the source's tensors; ValueError naming those that do not go with one another."""
    # a tied head is listed once, as the embedding
    own = dict(model.named_parameters())
    places = {name: renamed(name, blocks) for name in source}
    places = {name: place for name, place in places.items() if place != ""}
    lost = [name for name, place in places.items() if place not in own]
    _refuse_names("The source", "has tensors without a place:", lost)
    needed = [name for name in own if not name.startswith(NEW)]
    _refuse_names("The source", "has nothing for", set(needed) - set(places.values()))
    for name, place in places.items():
        tensor, parameter = source[name], own[place]
        if tensor.dim() < parameter.dim():
            # an expert stack [E, in, out] of one, where nn.Linear keeps [out, in]
            tensor = tensor.t().unsqueeze(0)
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {tuple(source[name].shape)}, which does not fit {place}"
                f" {tuple(parameter.shape)}."
            )
        parameter.data = tensor.clone(memory_format=torch.contiguous_format)


def tensors_of(source) -> tuple[dict[str, Tensor], bool]:
    """A transformers model's tensors by name, a tied head once, as the embedding; and whether it is tied."""
    tied = source.get_output_embeddings().weight is source.get_input_embeddings().weight
    kept = {name: one for name, one in source.state_dict().items() if not (tied and name == "lm_head.weight")}
    if source.config.model_type != OURS:
        return kept, tied
    names = {place: name for name, place in _TOP.items()}
    layers = [
        f"stack.{part}.{i}"
        for part in ("prelude", "core", "coda")
        for i in range(len(getattr(source.stack, part)))
    ]
    names |= {block: f"model.layers.{number}" for number, block in enumerate(layers)}
    found = {}
    for name, one in kept.items():
        begin = max((place for place in names if name.startswith(f"{place}.")), key=len, default=name)
        found[names.get(begin, begin) + name[len(begin) :]] = one
    return found, tied


def convert(source, to: str, seed: int = 0, **chosen):
    """A causal model of transformers -> the tenuto model `to`, of the same dtype and in evaluation mode.

    seed: of the parameters that the source lacks. chosen: see `target_config`. ValueError naming a field or a tensor
    that cannot be converted.
    """
    tensors, tied = tensors_of(source)
    config, blocks = target_config(source.config, to, tied, **chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, "causal")
    fill(model, tensors, blocks)
    for name, parameter in model.named_parameters():
        if name.startswith(NEW):
            parameter.data = parameter.data.to(source.dtype)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(source.generation_config, name))
    return model.eval()


@torch.inference_mode()
def difference(source, model, to: str, tokens: int = CHECKED) -> float:
    """The largest difference of two models' logits over random tokens, the converted one at its neutral setting."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(source.config.vocab_size, (1, tokens), generator=draw).to(source.device)
    ours = model(ids, use_cache=False, **TARGETS[to][1]).logits
    return float((ours - source(ids, use_cache=False).logits).abs().max())


def convert_folder(
    source: str | Path, to: str, output: str | Path, gguf: str | None = None, seed: int = 0, **chosen
) -> dict[str, Any]:
    """Converts a folder into the folder `output`: model, tokenizer, ids of generation; returns what was made.

    difference: of the logits at the neutral setting, over `checked_tokens` random tokens. FileExistsError when the
    output holds a model already; else see `read` and `convert`.
    """
    output = Path(output)
    if (output / "config.json").is_file():
        raise FileExistsError(f"{output} holds a model already; choose another --output.")
    original, tokenizer = read(source, gguf)
    model = convert(original, to, seed, **chosen)
    tokens = min(CHECKED, original.config.max_position_embeddings)
    figures = {
        "source": str(source),
        "model_type": original.config.model_type,
        "to": to,
        **chosen,
        "parameters": model.num_parameters(),
        "new_parameters": sum(p.numel() for name, p in model.named_parameters() if name.startswith(NEW)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "neutral": TARGETS[to][1],
        "checked_tokens": tokens,
        "difference": difference(original, model, to, tokens),
    }
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return figures
