"""Encoder-decoder: cached decoding against the full forward, generation against slow loops, losses, averaging.

Random weights everywhere (`reference.make`), seeds under which no decision comes within 1e-3 of its threshold while
depths differ, float64 unless said otherwise.
"""

import json
from functools import lru_cache

import pytest
import reference
import torch
from reference import LENGTHS, batch, make, masked
from test_ledger import counted_macs
from test_verbs import parsed, run, sentence
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache

from tenuto.average import average_checkpoints, best_checkpoints
from tenuto.models import MoDForSeq2SeqLM
from tenuto.presets import build, preset

HEAD = "text-to-text"
UNEVEN = {
    "num_loops": 3,
    "num_decoder_loops": 5,
    "positions": "none",
    "relative_positions": "window",
    "window": 1,
}
# name -> case of reference.py, overrides: sinusoidal, T5 and window positions, experts, each kind of K/V
DECODERS = {
    "transformer": ("transformer", {"num_hidden_layers": 2}),
    "transformer-t5": ("transformer-pre", {}),
    "moa": ("moa", {}),
    "ut-fixed": ("ut-fixed", {}),
    "ut": ("ut", {}),
    "ut-uneven": ("ut", UNEVEN),
    "ut-inject": ("ut", {"input_injection": "add"}),
    "ut-hidden": ("ut", {"kv_source": "hidden"}),
    "sut-fixed": ("sut-fixed", {}),
    "sut": ("sut", {}),
    "sut-t5": ("sut-pre", {}),
    "sut-hidden": ("sut", {"kv_source": "hidden"}),
    "ut-geometric": ("ut-geometric", {}),
    "sut-geometric": ("sut-geometric-fixed", {}),
}
HALTING = [name for name, (case, _) in DECODERS.items() if case in reference.HALTING]
decoders = pytest.mark.parametrize("name", DECODERS)
halting = pytest.mark.parametrize("name", HALTING)
EACH = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64)  # one threshold for each sequence


@lru_cache
def seed_of(name):
    case, overrides = DECODERS[name]
    if name not in HALTING:
        return 0
    for seed in range(400):
        model = make(case, HEAD, seed, **overrides).eval()
        with torch.no_grad():
            out = model(**sources(), decoder_input_ids=targets())
            if min(len(grid[grid > 0].unique()) for grid in (out.depths, out.decoder_depths)) < 3:
                continue
            answer = masked(model, **batch(case, HEAD))
        if answer.closest > 1e-3 and len(answer.decoder.depths.unique()) >= 3:
            return seed
    raise AssertionError(f"no seed gives {name} a spread of depths")


def ready(name, dtype=torch.float64, **more):
    case, overrides = DECODERS[name]
    return make(case, HEAD, seed_of(name), dtype, **overrides, **more).eval()


def sources(side="right"):
    data = batch("ut", HEAD, side)
    return {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}


def targets(B=3, T=6, seed=3):
    return torch.randint(3, 32, (B, T), generator=torch.Generator().manual_seed(seed))


def knobs_of(name, value=EACH):
    return {"threshold": value} if name in HALTING else {}


def close(actual, expected, atol=1e-10):
    assert_close(actual, expected, atol=atol, rtol=atol)


@torch.no_grad()
def decode(model, data, ids, sizes, mask=None, **knobs):
    """The outputs of decoding in pieces, and the encoder's."""
    source = model.encode(**data, **knobs)
    outs, cache, done = [], None, 0
    for size in sizes:
        part = slice(done, done + size)
        done += size
        outs.append(
            model(
                encoder_outputs=source,
                attention_mask=data["attention_mask"],
                decoder_input_ids=ids[:, part],
                decoder_attention_mask=None if mask is None else mask[:, :done],
                cache=cache,
                use_cache=True,
                **knobs,
            )
        )
        cache = outs[-1].cache
    assert done == ids.shape[1] == cache.get_seq_length()
    return outs, source


def joined(outs, field):
    return torch.cat([getattr(out, field) for out in outs], 1)


# 1. the cache


@decoders
@pytest.mark.parametrize("side", ["right", "left"])
def test_decoding_equals_the_full_forward(name, side):
    """One token at a time, and in pieces; the config's threshold, and 0.5, 1 and 0 side by side."""
    model, data, ids = ready(name), sources(side), targets()
    for knobs, sizes in (({}, [1] * 6), (knobs_of(name), [1] * 6), (knobs_of(name), [2, 1, 3])):
        with torch.no_grad():
            full = model(**data, decoder_input_ids=ids, **knobs)
        outs, source = decode(model, data, ids, sizes, **knobs)
        close(joined(outs, "logits"), full.logits)
        close(joined(outs, "decoder_expected_depths"), full.decoder_expected_depths)
        assert torch.equal(joined(outs, "decoder_depths"), full.decoder_depths)
        assert torch.equal(source.depths, full.depths)
        assert name not in HALTING or len(full.decoder_depths.unique()) > 1 + (not knobs)


@pytest.mark.parametrize("name", ["transformer", "transformer-t5", "ut-uneven", "ut-hidden", "sut", "sut-t5"])
def test_decoding_with_padded_targets_equals_the_full_forward(name):
    """Target prefixes of three lengths, padded on the left, some pieces with pads alone in a sequence."""
    model, data, ids = ready(name), sources(), targets()
    mask = torch.ones_like(ids)
    for b, pads in enumerate((0, 2, 4)):
        mask[b, :pads] = 0
    with torch.no_grad():
        full = model(**data, decoder_input_ids=ids, decoder_attention_mask=mask, **knobs_of(name))
    outs, _ = decode(model, data, ids, [5, 1], mask, **knobs_of(name))
    close(joined(outs, "logits"), full.logits)
    assert torch.equal(joined(outs, "decoder_depths"), full.decoder_depths)
    for b, pads in enumerate((0, 2, 4)):
        one = {key: value[b : b + 1] for key, value in data.items()}
        with torch.no_grad():
            alone = model(**one, decoder_input_ids=ids[b : b + 1, pads:], **knobs_of(name, EACH[b : b + 1]))
        close(full.logits[b : b + 1, pads:], alone.logits, 1e-12)


@pytest.mark.parametrize("name", ["ut", "ut-inject", "sut-hidden"])
def test_each_call_has_its_own_steps(name):
    """Tokens of two steps show to steps 3 and 4 what tokens of four show to step 3: what their second step left."""
    model, data, ids, shown, outs = ready(name), sources(), targets(), [], []
    source = model.encode(**data)
    common = {"encoder_outputs": source, "attention_mask": data["attention_mask"], "threshold": 1.0}
    with torch.no_grad():
        for steps in (4, 2):
            cache = model(**common, decoder_input_ids=ids[:, :2], use_cache=True).cache
            for part, some in ((slice(2, 4), steps), (slice(4, 6), 4)):
                outs.append(model(**common, decoder_input_ids=ids[:, part], cache=cache, max_steps=some))
            shown.append([layer.keys[:, :, 2:4] for layer in cache.self_attention_cache.layers])
        with pytest.raises(ValueError, match="max_steps=5 exceeds the cache's 4 steps"):
            model(**common, decoder_input_ids=ids[:, :1], cache=cache, max_steps=5)
    assert [out.decoder_depths.unique().tolist() for out in outs] == [[4], [4], [2], [4]]
    deep, shallow = shown
    for step, same in enumerate((0, 1, 2, 2)):
        close(shallow[step], deep[same])
    assert (deep[3] - deep[2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["transformer-t5", "moa", "ut-inject", "ut-hidden", "sut"])
def test_reordered_cache_goes_on_with_the_chosen_sequences(name):
    """After `reorder_cache` every row continues as if it had been that sequence from the start."""
    model, data, ids, order = ready(name), sources("left"), targets(), torch.tensor([2, 0, 0])
    outs, source = decode(model, data, ids[:, :4], [1] * 4)
    outs[-1].cache.reorder_cache(order)
    memory = type(source)(last_hidden_state=source.last_hidden_state[order])
    with torch.no_grad():
        for t in (4, 5):
            out = model(encoder_outputs=memory, attention_mask=data["attention_mask"][order],
                        decoder_input_ids=ids[:, t : t + 1], cache=outs[-1].cache)  # fmt: skip
        text = torch.cat([ids[order, :4], ids[:, 4:]], 1)
        full = model(**{key: value[order] for key, value in data.items()}, decoder_input_ids=text)
    close(out.logits[:, -1], full.logits[:, -1])


@pytest.mark.parametrize("name", ["transformer", "moa", "ut", "sut"])
def test_cross_attention_is_projected_once_a_block_and_the_encoder_runs_once(name):
    """Of the whole generation: the encoder's stack is called once, cross K/V are made once for each block."""
    model, data, calls = ready(name), sources(), []
    blocks = getattr(model.decoder, "blocks", None) or [model.decoder.block]
    model.encoder.register_forward_hook(lambda *_: calls.append("encoder"))
    for block in blocks:
        block.cross.key.register_forward_hook(lambda *_: calls.append("cross"))
    model.generate(**data, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert sorted(calls) == ["cross"] * len(blocks) + ["encoder"]


# 2. the ledger of a call


@pytest.mark.parametrize("name", ["transformer", "transformer-t5", "moa", "ut-fixed", "ut-uneven", "sut"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_ledger_of_each_call_equals_flop_counter(name, kernel):
    """At full depth, to the last multiplication: encoding, the first call and a later one of three tokens and one."""
    model, data, ids = ready(name, torch.float32), sources(), targets()
    data["attention_mask"] = torch.ones_like(data["attention_mask"])
    model.set_attn_implementation(kernel)
    knobs, cache = knobs_of(name, 1.0), None
    with torch.no_grad():
        source = model.encode(**data, **knobs)
    for part in (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 6)):
        inputs = {
            "encoder_outputs": source,
            "decoder_input_ids": ids[:, part],
            "use_cache": True,
            "cache": cache,
        }
        out, macs = counted_macs(model, {**inputs, **knobs})
        assert out.compute.total == macs
        cache = out.cache


@halting
def test_ledger_counts_what_stopped_tokens_show(name):
    """K/V rows booked are the rows projected; a token that stops early is projected once more, for all later steps."""
    model, data, ids = ready(name), sources(), targets()
    seen = {"own": 0, "cross": 0}
    block = model.decoder.block
    for kind, part in (("own", block.attention), ("cross", block.cross)):

        def count(module, args, out, kind=kind):
            seen[kind] += len(args[0])

        part.key.register_forward_hook(count)
    outs, _ = decode(model, data, ids, [1] * 6, **knobs_of(name))
    depths = joined(outs, "decoder_depths")
    assert seen["own"] == int(depths.sum() + (depths < model.decoder.steps).sum())
    assert seen["cross"] == data["input_ids"].numel()
    size = 2 * block.attention.kv_heads * block.attention.head_dim * 8
    assert sum(int(out.compute.kv_bytes.sum()) for out in outs) == size * sum(seen.values())


def test_first_call_without_encoder_outputs_books_the_encoder_too():
    model, data, ids = ready("sut"), sources(), targets(T=1)
    with torch.no_grad():
        whole = model(**data, decoder_input_ids=ids, use_cache=True)
        source = model.encode(**data)
        part = model(encoder_outputs=source, attention_mask=data["attention_mask"], decoder_input_ids=ids,
                     use_cache=True)  # fmt: skip
    assert whole.compute.total == source.compute.total + part.compute.total


# 3. generation


@torch.no_grad()
def greedy(model, data, steps, **knobs):
    """Argmax, everything computed anew for each token."""
    ids = torch.full((len(data["input_ids"]), 1), model.config.bos_token_id)
    for _ in range(steps):
        logits = model(**data, decoder_input_ids=ids, **knobs).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@torch.no_grad()
def slow_beams(model, data, beams, steps, penalty, eos, **knobs):
    """Beam search for one source, every hypothesis computed anew: hypotheses that end among the best `beams`
    candidates are kept, those still running at the end join them; score = log-probability / length ** penalty."""
    running, ended = [(0.0, [model.config.bos_token_id])], []
    for step in range(steps):
        candidates = []
        texts = torch.tensor([ids for _, ids in running])
        out = model(data["input_ids"].expand(len(texts), -1), decoder_input_ids=texts, **knobs)
        for (score, ids), row in zip(running, out.logits[:, -1].log_softmax(-1).tolist(), strict=True):
            candidates += [(score + one, [*ids, token]) for token, one in enumerate(row)]
        candidates = sorted(candidates, key=lambda one: -one[0])[: 2 * beams]
        for score, ids in candidates[:beams]:
            if ids[-1] == eos:
                ended.append((score / (step + 1) ** penalty, ids))
        running = [one for one in candidates if one[1][-1] != eos][:beams]
    ended += [(score / steps**penalty, ids) for score, ids in running]
    return max(ended)


@decoders
def test_greedy_equals_the_argmax_loop(name):
    """With cache and without, left-padded sources, a threshold for each request, whatever the batch-mates."""
    model, data, knobs = ready(name), sources("left"), knobs_of(name)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    got = model.generate(**data, **settings, **knobs)
    assert torch.equal(got, greedy(model, data, 4, **knobs))
    if name in ("transformer", "sut-t5"):
        assert torch.equal(got, model.generate(**data, **settings, **knobs, use_cache=False))
    for b, n in enumerate(LENGTHS):
        alone = model.generate(
            data["input_ids"][b : b + 1, -n:], **settings, **knobs_of(name, float(EACH[b]))
        )
        assert torch.equal(alone[0], got[b])


@pytest.mark.parametrize("name", ["transformer-t5", "ut-uneven", "sut"])
@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_beam_search_equals_a_slow_one(name, penalty):
    """Cached, on a batch of padded sources, against one source at a time without a cache."""
    model, data, knobs, ends = ready(name), sources("left"), knobs_of(name), set()
    for eos in (2, int(greedy(model, data, 2, **knobs)[0, 2])):
        got = model.generate(
            **data, **knobs, num_beams=3, length_penalty=penalty, max_new_tokens=4, do_sample=False,
            early_stopping="never", eos_token_id=eos, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for b, n in enumerate(LENGTHS):
            one = {"input_ids": data["input_ids"][b : b + 1, -n:]}
            score, ids = slow_beams(model, one, 3, 4, penalty, eos, **knobs_of(name, float(EACH[b])))
            assert got.sequences[b, : len(ids)].tolist() == ids
            # transformers fills up with <eos> when the pad is token 0
            assert set(got.sequences[b, len(ids) :].tolist()) <= {eos}
            assert float(got.sequences_scores[b]) == pytest.approx(
                score, abs=1e-5
            )  # transformers' are float32
            ends.add(len(ids))
    if penalty == 0.0:
        assert len(ends) > 1  # some end, some run on


@pytest.mark.parametrize("name", ["ut-inject", "sut"])
def test_sampling_cached_equals_uncached(name):
    """The same seed draws the same tokens, several for each source."""
    model, data, drawn = ready(name), sources(), []
    for cached in (True, False):
        torch.manual_seed(5)
        drawn.append(model.generate(**data, do_sample=True, max_new_tokens=5, use_cache=cached, eos_token_id=None,
                                    num_return_sequences=2, **knobs_of(name)))  # fmt: skip
    assert torch.equal(*drawn) and len(drawn[0]) == 6


@pytest.mark.parametrize("name", ["transformer", "sut"])
def test_generation_goes_on_from_encoder_outputs_and_a_prefix(name):
    """`encode` once, then `generate(encoder_outputs=...)`; a forced beginning of the target is kept."""
    model, data = ready(name), sources()
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        source = model.encode(**data)
    got = model.generate(encoder_outputs=source, attention_mask=data["attention_mask"], **settings)
    assert torch.equal(got, model.generate(**data, **settings))
    begun = model.generate(**data, decoder_input_ids=got[:, :3], **{**settings, "max_new_tokens": 2})
    assert torch.equal(begun, got)


def test_depths_of_generated_tokens():
    """Each call's decoder_depths, one a token, are those of one forward over the generated text."""
    model, data, depths = ready("sut"), sources(), []
    model.register_forward_hook(lambda module, args, out: depths.append(out.decoder_depths))
    got = model.generate(**data, max_new_tokens=5, do_sample=False, eos_token_id=None, **knobs_of("sut"))
    each = torch.cat(depths, 1)
    with torch.no_grad():
        whole = model(**data, decoder_input_ids=got[:, :-1], **knobs_of("sut"))
    assert each.shape == (3, 5) and torch.equal(each, whole.decoder_depths)


@pytest.mark.parametrize("name", ["ut", "sut"])
def test_encoder_threshold_is_the_encoder_s_alone(name):
    """The encoder at 0.5 and the decoder at 1, in a forward and in generation."""
    model, data, ids = ready(name), sources(), targets()
    both = {"threshold": 1.0, "encoder_threshold": 0.5}
    with torch.no_grad():
        out = model(**data, decoder_input_ids=ids, **both)
        source = model.encode(**data, threshold=0.5)
        want = model(encoder_outputs=source, attention_mask=data["attention_mask"], decoder_input_ids=ids,
                     threshold=1.0)  # fmt: skip
        assert not torch.equal(out.depths, model(**data, decoder_input_ids=ids, threshold=1.0).depths)
    assert torch.equal(out.logits, want.logits) and out.decoder_depths.unique().tolist() == [4]
    assert torch.equal(out.depths, source.depths)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(**data, **settings, **both), greedy(model, data, 4, **both))


@pytest.mark.parametrize("name", ["transformer", "sut"])
def test_saved_and_loaded_it_generates_the_same(name, tmp_path):
    model, data = ready(name, torch.float32), sources()
    settings = {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    # in float64: loaded float32 weights lie at other addresses, which can change the last bit
    assert torch.equal(
        again.double().generate(**data, **settings), model.double().generate(**data, **settings)
    )


def test_routed_models_generate_without_a_cache():
    """With one they refuse, in one sentence."""
    model, data = build(preset("mod-tiny", positions="sinusoidal"), HEAD).eval(), sources()
    assert isinstance(model, MoDForSeq2SeqLM)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "threshold": 0.0}
    got = model.generate(**data, use_cache=False, **settings)
    assert torch.equal(got, greedy(model, data, 4, threshold=0.0))
    with pytest.raises(ValueError, match="MoDForSeq2SeqLM generates without a cache: give use_cache=False"):
        model.generate(**data, **settings)


# 4. K/V from h, losses, labels


@pytest.mark.parametrize("name", ["ut-hidden", "sut-hidden"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_kv_source_hidden_equals_its_masked_reference(name, side):
    """Outputs, losses and gradients, and one token at a time; it is not what "state" gives."""
    model, data = ready(name).train(), batch(DECODERS[name][0], HEAD, side)
    out, want = model(**data), masked(model, **data)
    assert want.closest > 1e-4
    close(out.logits, want.logits)
    close(out.loss, want.loss)
    assert torch.equal(out.depths, want.encoder.depths) and torch.equal(
        out.decoder_depths, want.decoder.depths
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    got, expected = (torch.autograd.grad(one.loss, weights) for one in (out, want))
    for one, other in zip(got, expected, strict=True):
        close(one, other)
    with torch.no_grad():
        close(reference.by_token(model, **data).logits, want.logits)
        usual = ready(name.removesuffix("-hidden"))
        usual.load_state_dict(model.state_dict())
        assert (usual(**data).logits - want.logits).abs().max() > 1e-3


def test_kv_source_hidden_at_threshold_one_is_not_neutral_but_at_one_step_is():
    """After one step s is h: with two steps nothing differs yet, with three it does."""
    data = batch("ut", HEAD)
    for steps, same in ((2, True), (3, False)):
        sides = {"num_loops": steps, "num_decoder_loops": steps, "halt_threshold": 1.0}
        models = [make("ut", HEAD, 0, kv_source=kind, **sides).eval() for kind in ("state", "hidden")]
        with torch.no_grad():
            assert torch.equal(*(model(**data).logits for model in models)) == same


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_label_smoothing_is_its_formula(smoothing):
    """(1 - e) times the label's loss plus e times the mean loss over the vocabulary; -100 is no label. Of training
    alone: outside it the loss is the likelihood's.
    """
    off = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    model, data = ready("ut", label_smoothing=smoothing, **off), batch("ut", HEAD)
    for training, share in ((True, smoothing), (False, 0.0)):
        with torch.no_grad():
            out = model.train(training)(**data)
        terms = []
        for row, labels in zip(out.logits.log_softmax(-1), data["labels"].tolist(), strict=True):
            for scores, label in zip(row, labels, strict=True):
                if label != -100:
                    terms.append(-(1 - share) * scores[label] - share * scores.mean())
        close(out.losses["task"], torch.stack(terms).mean())


def test_what_makes_no_sense_is_refused_in_one_sentence():
    model, data, ids = ready("sut"), sources(), targets()
    static = EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=8) for _ in range(2)))
    for cache in (static, DynamicCache()):
        with pytest.raises(ValueError, match="needs an EncoderDecoderCache of two dynamic caches"):
            model(**data, decoder_input_ids=ids, cache=cache)
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        model(**batch("sut", HEAD), logits_to_keep=1)
    with pytest.raises(ValueError, match="labels or decoder_input_ids"):
        model(**data)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(**data, decoder_input_ids=ids, decoder_attention_mask=torch.ones(3, 2))
    with pytest.raises(ValueError, match="threshold has shape"):
        model.generate(**data, threshold=EACH[:2], max_new_tokens=2)
    with pytest.raises(Exception, match='kv_source="hidden" differs in nothing with policy="fixed"'):
        preset("ut-tiny", policy="fixed", kv_source="hidden", act_weight=0.0)


def test_logits_to_keep_are_the_last_ones():
    model, data, ids = ready("ut"), sources(), targets()
    with torch.no_grad():
        full, last = (model(**data, decoder_input_ids=ids, logits_to_keep=keep) for keep in (0, 1))
    close(last.logits, full.logits[:, -1:])
    assert full.compute.summary()["head"] == 6 * last.compute.summary()["head"]


# 5. averaging


@pytest.fixture
def run_folder(tmp_path):
    """A run of four checkpoints with validation losses 3, 1, 2 and none."""
    history = []
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None)):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        make("ut", HEAD, step, torch.float32).save_pretrained(folder)
        history += [] if loss is None else [{"step": step, "eval_loss": loss}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "run" / "recipe.yaml").write_text("preset: ut-tiny\n")
    return tmp_path / "run"


def test_average_is_the_mean_of_the_weights(run_folder, tmp_path):
    folders = [run_folder / f"checkpoint-{step}" for step in (10, 20, 30)]
    made = average_checkpoints(folders, tmp_path / "mean")
    models = [AutoModelForSeq2SeqLM.from_pretrained(one) for one in (*folders, tmp_path / "mean")]
    *parts, mean = (model.state_dict() for model in models)
    for name, weight in mean.items():
        assert torch.equal(weight, (sum(part[name].double() for part in parts) / 3).float()), name
    assert made == {"checkpoints": [str(one) for one in folders], "parameters": models[0].num_parameters()}
    assert models[-1].lm_head.weight is models[-1].embed_tokens.weight
    assert (tmp_path / "mean" / "recipe.yaml").read_text() == "preset: ut-tiny\n"
    with pytest.raises(FileExistsError, match="holds a model already"):
        average_checkpoints(folders, tmp_path / "mean")


def test_average_of_different_configs_is_refused(run_folder, tmp_path):
    make("ut", HEAD, 0, torch.float32, dropout=0.3).save_pretrained(tmp_path / "other")
    folders = [run_folder / "checkpoint-10", tmp_path / "other"]
    with pytest.raises(ValueError, match=r"has dropout=0.0 and .* has 0.3: only checkpoints of one config"):
        average_checkpoints(folders, tmp_path / "mean")
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        average_checkpoints([run_folder], tmp_path / "mean")


def test_average_on_the_command_line(run_folder, tmp_path):
    """Named checkpoints, or a run's best; usage errors have exit code 2."""
    assert [one.name for one in best_checkpoints(run_folder, 2)] == ["checkpoint-20", "checkpoint-30"]
    figures = parsed("average", run_folder, "--best", 2, "--output", tmp_path / "best")
    assert figures["checkpoints"] == [str(run_folder / f"checkpoint-{step}") for step in (20, 30)]
    named = (run_folder / "checkpoint-20", run_folder / "checkpoint-30")
    assert parsed("average", *named, "--output", tmp_path / "named")["checkpoints"] == figures["checkpoints"]
    weights = [
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / one).state_dict() for one in ("best", "named")
    ]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert json.loads((tmp_path / "best" / "result.json").read_text())["figures"] == figures
    assert "holds 3 checkpoints with a validation loss, and 4 are wanted" in sentence(
        "average", run_folder, "--best", 4, "--output", tmp_path / "more"
    )
    assert run("average", run_folder)[0] == 2
    assert run("average", *named, "--best", 1, "--output", tmp_path / "more")[0] == 2
