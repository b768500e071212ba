"""Converted pretrained models: equal to their source at the neutral setting, whole, and refused in one sentence."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tenuto import convert as conversion
from tenuto.cli import main
from tenuto.convert import TARGETS, convert, convert_folder, difference, fields_of, fill, read
from tenuto.evaluate import load
from tenuto.harness import evaluate_lm
from tenuto.presets import build
from tenuto.train import start_from

STORIES = Path(__file__).parents[2] / "shared" / "data" / "stories260k"
SIZES = {
    "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
SOURCES = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, wide heads, untied": LlamaConfig(**SIZES, head_dim=10, rms_norm_eps=1e-3),
    "llama, one head each": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama, llama3 positions": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, yarn positions": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama, linear positions": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, wide heads, untied": Qwen2Config(**SIZES, head_dim=10),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
}


def random_source(config):
    """A model with no weight at a special value, in float64: norms too, which transformers computes in float32."""
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, exact_norm(getattr(layer, name)))
    model.model.norm = exact_norm(model.model.norm)
    return model


def exact_norm(norm):
    exact = nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon, dtype=torch.float64)
    exact.load_state_dict(norm.state_dict())
    return exact


@pytest.fixture
def folder(tmp_path):
    """A small Llama as transformers saves it, with a tokenizer of bytes."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 258, "max_position_embeddings": 128})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Tokenizer(BPE({**alphabet, "<s>": 256, "</s>": 257}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SOURCES)
def test_neutral_setting_is_the_source(name, to):
    source = random_source(SOURCES[name])
    model = convert(source, to)
    assert difference(source, model, to, 48) < 1e-10
    # left padding, as in generation
    ids, mask = torch.randint(96, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours = model(ids, attention_mask=mask, use_cache=False, **TARGETS[to][1]).logits
    theirs = source(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert (ours - theirs).abs()[mask.bool()].max() < 1e-10


@pytest.mark.parametrize("to", TARGETS)
def test_a_changed_weight_is_noticed(to):
    source = random_source(SOURCES["llama, tied"])
    model = convert(source, to)
    next(iter(source.model.layers[2].mlp.parameters())).data[0, 0] += 0.1
    assert difference(source, model, to, 48) > 1e-4


@pytest.mark.parametrize("prelude, coda", [(0, 0), (1, 0), (0, 2), (2, 1)])
def test_loops_repeat_the_core(prelude, coda):
    """A converted model with two loops is the source with its middle layers written twice."""
    source = random_source(SOURCES["qwen2, tied"])
    model = convert(source, "looped", prelude=prelude, coda=coda, loops=2)
    assert model.config.num_loops == model.config.max_loops == 2
    assert difference(source, model, "looped", 48) < 1e-10
    layers = source.model.layers
    core = layers[prelude : len(layers) - coda]
    source.model.layers = nn.ModuleList([*layers[:prelude], *core, *core, *layers[len(layers) - coda :]])
    source.config.num_hidden_layers = len(source.model.layers)
    source.config.layer_types = ["full_attention"] * len(source.model.layers)
    ids = torch.randint(96, (2, 20))
    assert (model(ids).logits - source(ids, use_cache=False).logits).abs().max() < 1e-10


def test_an_injection_is_new_and_idle_in_one_loop():
    source = random_source(SOURCES["llama, tied"])
    model = convert(source, "looped", loops=3, injection="concat")
    assert model.stack.injection.linear.weight.dtype == torch.float64
    assert difference(source, model, "looped", 48) < 1e-10


@pytest.mark.parametrize("to", ["sdt", "stt", "mod"])
def test_new_parameters_follow_the_seed(to):
    source = random_source(SOURCES["llama, tied"])
    first, again, other = (dict(convert(source, to, seed=seed).named_parameters()) for seed in (0, 0, 1))
    new = [name for name in first if name.startswith(conversion.NEW)]
    assert new and all(first[name].dtype == torch.float64 for name in new)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in new)


@pytest.mark.parametrize("to", ["sdt", "stt", "mod"])
def test_routed_layers_are_chosen(to):
    config = convert(random_source(SOURCES["llama, tied"]), to, routed=[2]).config
    assert config.routed_layers == [2]


def test_dtype_and_random_state_are_kept():
    source = LlamaForCausalLM(SOURCES["llama, tied"]).to(torch.bfloat16)
    state = torch.get_rng_state()
    model = convert(source, "looped", loops=2, injection="decay")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(state, torch.get_rng_state())
    # a copy, not the source's own
    model.embed_tokens.weight.data.zero_()
    assert source.model.embed_tokens.weight.any()


@pytest.mark.parametrize("to", TARGETS)
def test_a_folder_goes_there_and_back(folder, tmp_path, to):
    source = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps({**source, "eos_token_id": [2, 7], "pad_token_id": 3})
    )
    figures = convert_folder(folder, to, tmp_path / "out")
    assert figures["difference"] < 1e-4 and figures["checked_tokens"] == 128
    original, _ = read(folder)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert difference(original, model, to, 48) < 1e-4
    start_from(build(model.config, "causal"), str(tmp_path / "out"))
    assert model.generation_config.eos_token_id == [2, 7] and model.generation_config.pad_token_id == 3
    ids = torch.randint(258, (1, 9))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings, **TARGETS[to][1]), original.generate(ids, **settings))
    with pytest.raises(FileExistsError, match="holds a model already"):
        convert_folder(folder, to, tmp_path / "out")


def test_the_command_line(folder, tmp_path):
    out = tmp_path / "out"
    words = ("convert", folder, "--to", "looped", "--prelude", 1, "--coda", 0, "--loops", 2, "--output", out)
    code, said, err = run(*words, "--json")
    assert code == 0, err
    figures = json.loads(said)
    assert figures["loops"] == 2 and figures["neutral"] == {"max_steps": 1} and figures["new_parameters"] == 0
    assert json.loads((out / "result.json").read_text())["figures"] == figures
    code, said, err = run("generate", out, "--prompt", "once", "--tokens", 5, "--greedy", "--json")
    assert code == 0 and json.loads(said)["mean_depth"] == 2, err
    (tmp_path / "text.txt").write_text("Once upon a time there was a text.")
    words = (
        "evaluate",
        out,
        "--files",
        tmp_path / "text.txt",
        "--max_steps",
        1,
        "--result",
        tmp_path / "r.json",
    )
    code, said, err = run(*words, "--json")
    assert code == 0 and json.loads(said)["depth_mean"] == 1, err
    assert json.loads((tmp_path / "r.json").read_text())["made_by"].startswith("tenuto convert")
    code, _, err = run("evaluate", out)
    assert code == 1 and "no recipe.yaml" in err and "--tasks" in err


@pytest.mark.parametrize("to", TARGETS)
def test_a_converted_model_takes_the_harness(folder, tmp_path, to):
    pytest.importorskip("lm_eval", reason="needs tenuto[eval]")
    convert_folder(folder, to, tmp_path / "out")
    loaded, neutral = load(tmp_path / "out", trained=False), TARGETS[to][1]
    task = "blimp_adjunct_island"
    figures = evaluate_lm(loaded.model, loaded.tokenizer, [task], limit=4, **neutral)["rows"][0]
    original = evaluate_lm(*read(folder), [task], limit=4)["rows"][0]
    assert figures["samples"] == 4
    assert figures["tasks"][task]["accuracy"] == original["tasks"][task]["accuracy"]
    if to == "looped":
        code, said, err = run("evaluate", tmp_path / "out", "--tasks", task, "--limit", 2, "--json")
        assert code == 0 and json.loads(said)["rows"][0]["samples"] == 2, err


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' cannot be converted"),
        ({"attention_bias": True}, "attention_bias=True cannot be converted"),
        ({"mlp_bias": True}, "mlp_bias=True cannot be converted"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters="),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}},
         "rope_parameters="),
    ],
)  # fmt: skip
def test_unsupported_fields_of_a_llama_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        fields_of(LlamaConfig(**SIZES, **changed))


def test_other_models_and_windows_are_named():
    with pytest.raises(
        ValueError, match="model_type='gpt2' cannot be converted; llama, mistral, qwen2, tenuto_looped can be"
    ):
        fields_of(GPT2Config())
    with pytest.raises(ValueError, match="sliding_window=16 cannot be converted"):
        fields_of(MistralConfig(**SIZES, sliding_window=16))
    slides = {"use_sliding_window": True, "sliding_window": 16}
    with pytest.raises(ValueError, match="sliding_window=16 cannot be converted"):
        fields_of(Qwen2Config(**SIZES, **slides, max_window_layers=2))
    # no layer slides, and no text is longer
    assert fields_of(Qwen2Config(**SIZES, **slides, max_window_layers=4))["attention_bias"]
    assert not fields_of(MistralConfig(**SIZES, sliding_window=64))["attention_bias"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop("model.layers.2.mlp.up_proj.weight"), "misses model.layers.2.mlp.up_proj.weight"),
        (lambda w: w.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(24)}),
         "more weights than its config.json says: model.layers.1.self_attn.q_proj.bias"),
        (lambda w: w.update({"model.norm.weight": torch.ones(23)}), "other shapes .*: model.norm.weight"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_the_source_are_named(folder, tmp_path, change, message):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        convert_folder(folder, "looped", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_fit_the_target_are_named():
    source = random_source(SOURCES["llama, tied"])
    model, blocks = (
        convert(source, "looped"),
        ["stack.prelude.0", "stack.core.0", "stack.core.1", "stack.coda.0"],
    )
    whole = {name: value for name, value in source.state_dict().items() if name != "lm_head.weight"}
    fill(model, whole, blocks)
    extra = {"model.layers.4.mlp.up_proj.weight": torch.zeros(40, 24), "model.other": torch.zeros(1)}
    with pytest.raises(
        ValueError, match=r"without a place: model.layers.4.mlp.up_proj.weight, model.other\."
    ):
        fill(model, {**whole, **extra}, blocks)
    less = {name: value for name, value in whole.items() if name != "model.layers.0.self_attn.o_proj.weight"}
    with pytest.raises(ValueError, match=r"nothing for stack.prelude.0.attention.output.weight\."):
        fill(model, less, blocks)
    with pytest.raises(
        ValueError, match=r"k_proj.weight has shape \(24, 12\), which does not fit .*key.weight"
    ):
        fill(model, {**whole, "model.layers.1.self_attn.k_proj.weight": torch.zeros(24, 12)}, blocks)


def test_wrong_words_are_refused(folder, tmp_path, monkeypatch):
    source = random_source(SOURCES["llama, tied"])
    with pytest.raises(ValueError, match=r"no target 'rnn'.*looped, sdt, stt, mod"):
        convert(source, "rnn")
    with pytest.raises(ValueError, match="routed has nothing to set with the target looped"):
        convert(source, "looped", routed=[1])
    with pytest.raises(ValueError, match="loops has nothing to set with the target mod"):
        convert(source, "mod", loops=2)
    with pytest.raises(ValueError, match="prelude=2 and coda=2 leave no layer of 4 for the core"):
        convert(source, "looped", prelude=2, coda=2)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no small\.gguf"):
        read(folder, "small.gguf")
    (folder / "small.gguf").touch()
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    for words in ((folder, "small.gguf"), (folder / "small.gguf",)):
        with pytest.raises(ImportError, match="pip install gguf accelerate"):
            read(*words)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        read(folder)
    code, _, err = run("convert", folder, "--output", tmp_path / "out")
    assert code == 2 and err.startswith("tenuto: --to is missing")
    code, _, err = run("convert", folder, "--to", "mod", "--output", tmp_path / "out", "--routed", "1.5")
    assert code == 2 and "'1.5' is not a list of layers" in err
    code, _, err = run("convert", folder, "--to", "looped")
    assert code == 2 and err.startswith("tenuto: --output is missing")


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the shared folder with stories260k")
@pytest.mark.parametrize("to", TARGETS)
def test_a_pretrained_model_stays_itself(to, tmp_path):
    figures = convert_folder(STORIES, to, tmp_path)
    assert figures["checked_tokens"] == 512 and figures["difference"] < 1e-4
    if to == "looped":
        words = ("--prompt", "Once upon a time", "--tokens", 12, "--greedy", "--json")
        code, said, err = run("generate", tmp_path, *words)
        assert code == 0, err
        original, tokenizer = read(STORIES)
        ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
        wanted = original.generate(ids, max_new_tokens=12, do_sample=False)[0]
        assert json.loads(said)["text"] == tokenizer.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize("to", ["looped", "sdt", "stt", "mod"])
def test_our_own_dense_model_converts(to):
    """A looped model of one loop, with norms and scales that no pretrained source has."""
    from tenuto.presets import build, preset

    torch.manual_seed(0)
    config = preset(
        "looped-tiny", num_loops=1, num_core_layers=2, input_injection="none", num_key_value_heads=2
    )
    source = build(config, "causal").double().eval()
    for weight in source.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    chosen = {"prelude": 2, "coda": 1} if to == "looped" else {"routed": [1, 3]}
    model = convert(source, to, **chosen)
    assert model.config.norm_placement == "sandwich" and model.config.scale_embeddings
    assert difference(source, model, to, 40) < 1e-10
    if to == "looped":
        less = convert(source, to, drop=[2])
        assert less.config.num_hidden_layers == 3
    halting = build(preset("looped-tiny"), "causal")
    with pytest.raises(ValueError, match="num_loops=4 cannot be converted"):
        convert(halting, to)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_starts_from_what_a_gguf_gives(dtype, monkeypatch):
    """transformers says of a dequantised model that it is quantised, and then casts it no more."""
    from tenuto.recipe import Recipe
    from tenuto.train import start_converted

    source = random_source(SOURCES["llama, tied"]).to(dtype)
    source.is_quantized = True
    monkeypatch.setattr(conversion, "read", lambda path: (source, None))
    target, recipe = convert(source, "sdt").float(), Recipe(start="small.gguf", convert={"to": "sdt"})
    model = build(target.config, "causal")
    start_converted(model, recipe)
    for name, weight in target.state_dict().items():
        if not name.startswith(conversion.NEW):
            got = model.state_dict()[name]
            assert got.dtype == torch.float32 and torch.equal(got, weight), name
