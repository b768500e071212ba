"""What going around a layer is worth: wall-clock and memory of routed layers at capacity 0.5 beside dense ones.

    python benchmarks/routed.py [--repeats N] [--json FILE]

d = 512, 8 heads, grouped-query attention over 4, feed-forward 1,408, vocabulary 4,096; random weights, levels
calibrated on random text, so that the realised capacity is what the rule gives, and is reported.

    layer      a skipping layer's prefill of one text of T tokens as a share of the dense layer's, router included: the
               layer's own part of a forward, its cache written, timed between two layers; asked 0.55 at T >= 512
    decoding   tokens a second of a whole model of 8 layers, every second one routed, 1, 16 and 64 rows after a context
               of 256, beside the same model without routed layers; and its K/V bytes, slots written and slots
               allocated, by the cache itself
    int8       seconds of an SDT prior with int8 weights as a share of float32's, by width and number of rows

Times are wall-clock on one thread, the fastest of interleaved runs.
"""

import argparse
import copy
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import torch
from transformers import DynamicCache

from tenuto.models.cache import ChosenLayer
from tenuto.presets import build, preset
from tenuto.results import write_result

SHAPE = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1408, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
KINDS = ("mod", "sdt", "stt")


def model_of(kind: str, layers: int, routed: list[int]):
    """A model with levels calibrated to random text."""
    torch.manual_seed(0)
    model = build(
        preset(f"{kind}-tiny", **{**SHAPE, "num_hidden_layers": layers, "routed_layers": routed}), "causal"
    )
    model = model.eval()
    if routed:
        model.calibrate(input_ids=torch.randint(3, 4096, (4, 512)), batch=4)
    return model


def fastest(cases: dict, repeats: int) -> dict[str, float]:
    """Seconds of each case, the fastest of interleaved runs."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - start)
    return {name: min(some) for name, some in times.items()}


def layer(kind: str, lengths: list[int], repeats: int) -> dict:
    """A skipping layer's prefill beside the dense layer's."""
    model = model_of(kind, 3, [1])
    stack, figures = model.stack, {}
    marks: list[float] = []

    def mark(module, given, *more):
        marks.append(time.perf_counter())

    # from the end of layer 0 to the beginning of layer 2: layer 1 with all that belongs to it
    stack.blocks[0].register_forward_hook(mark)
    keys = stack.blocks[2].attention.key
    keys.register_forward_pre_hook(mark)
    for length in lengths:
        ids = torch.randint(3, 4096, (1, length))
        share = float(model(ids, use_cache=False).executed[..., 1].float().mean())
        each: dict[str, float] = {}
        for _ in range(3 * repeats):
            for name, knobs in (("routed", {}), ("dense", {"selection": "dense"})):
                marks.clear()
                model(ids, cache=DynamicCache(config=model.config), logits_to_keep=1, **knobs)
                spent = marks[1] - marks[0]
                each[name] = min(each.get(name, spent), spent)
        figures[str(length)] = {
            "capacity": round(share, 3),
            "layer_share": round(each["routed"] / each["dense"], 3),
            "milliseconds_routed": round(1000 * each["routed"], 2),
            "milliseconds_dense": round(1000 * each["dense"], 2),
        }
        print(kind, length, figures[str(length)], file=sys.stderr, flush=True)
    return figures


def decode(model, ids: torch.Tensor, context: int) -> tuple[float, DynamicCache]:
    """Seconds of decoding ids[:, context:] one by one, and the cache."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :context], cache=cache, logits_to_keep=1)
    start = time.perf_counter()
    for place in range(context, ids.shape[1]):
        model(ids[:, place : place + 1], cache=cache)
    return time.perf_counter() - start, cache


def slots(cache: DynamicCache, rows: int) -> tuple[int, int]:
    """K/V bytes written, and allocated."""
    written = allocated = 0
    for one in cache.layers:
        size = 2 * one.keys.shape[1] * one.keys.shape[3] * one.keys.element_size()
        if isinstance(one, ChosenLayer):
            written += int(one.bytes_used.sum())
            allocated += 2 * one.keys.numel() * one.keys.element_size()
        else:
            written += rows * one.keys.shape[2] * size
            allocated += rows * one.keys_room.shape[2] * size
    return written, allocated


def decoding(kind: str, rows: int, context: int, new: int, repeats: int) -> dict:
    """Tokens a second and bytes of a whole model, beside dense."""
    models = {"routed": model_of(kind, 8, [1, 3, 5, 7]), "dense": model_of(kind, 8, [])}
    model = models["routed"]
    ids = torch.randint(3, 4096, (rows, context + new))
    best: dict[str, float] = {}
    caches = {}
    for _ in range(repeats):
        for name, one in models.items():
            seconds, caches[name] = decode(one, ids, context)
            best[name] = min(best.get(name, seconds), seconds)
    written, allocated = (
        [slots(caches[name], rows)[place] for name in ("routed", "dense")] for place in (0, 1)
    )
    realised = float(model(ids, use_cache=False).executed[..., [1, 3, 5, 7]].float().mean())
    figures = {
        "capacity": round(realised, 3),
        "tokens_per_second": round(rows * new / best["routed"], 1),
        "tokens_per_second_dense": round(rows * new / best["dense"], 1),
        "faster": round(best["dense"] / best["routed"], 3),
        "kv_written_share": round(written[0] / written[1], 4),
        "kv_allocated_share": round(allocated[0] / allocated[1], 4),
        "kv_share_expected": round(1 - 0.5 * (1 - realised), 4),
    }
    print(kind, rows, figures, file=sys.stderr, flush=True)
    return figures


def int8(repeats: int) -> dict:
    """Time of the surprise estimator's net in int8 as a share of float32."""
    figures: dict = {}
    for width in (0.0625, 0.25, 0.5):
        model = build(preset("sdt-tiny", **{**SHAPE, "num_hidden_layers": 2, "prior_width": width}), "causal")
        prior = model.eval().stack.routers["1"].prior
        whole = copy.deepcopy(prior)
        whole.quantise()
        for rows in (1, 64, 1024):
            x = torch.randn(rows, SHAPE["hidden_size"])

            def run(net, x=x):
                for _ in range(20):
                    net(x)

            seconds = fastest({"float": partial(run, prior), "int8": partial(run, whole)}, 3 * repeats)
            figures[f"{width}, {rows} rows"] = round(seconds["int8"] / seconds["float"], 3)
    print("int8", figures, file=sys.stderr, flush=True)
    return figures


@torch.inference_mode()
def bench(repeats: int) -> dict:
    """The figures."""
    figures: dict = {"int8": int8(repeats)}
    for kind in KINDS:
        figures[kind] = {
            "layer": layer(kind, [512, 1024, 4096], repeats),
            "decoding": {str(rows): decoding(kind, rows, 256, 12, repeats) for rows in (1, 16, 64)},
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    figures = bench(options.repeats)
    if options.json:
        write_result(
            options.json, recipe=None, command=shlex.join(["python", *sys.argv]), seed=0,
            seconds=time.time() - start, figures=figures,
        )  # fmt: skip


if __name__ == "__main__":
    main()
