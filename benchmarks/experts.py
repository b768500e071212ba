"""The expert feed-forward, forward and backward, against three other ways to multiply rows by their experts.

    python benchmarks/experts.py [--repeats N] [--rows N] [--json FILE]

    ours     sorted rows, PyTorch's grouped matmul
    loop     sorted rows, a Python loop with weight[e]
    unbind   sorted rows, split, one product an expert with unbound weights
    padded   every expert's rows padded to the largest count, one batched product

Outputs and gradients are compared before timing. Routing is balanced (random) or skewed (expert e's logit falls with
e). Times are CPU seconds on one thread, medians of interleaved runs; the figures are time relative to ours.
"""

import argparse
import itertools
import shlex
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from tenuto.models import experts
from tenuto.models.experts import Dispatch, FeedForward
from tenuto.presets import preset
from tenuto.results import write_result


def loop(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """weight[e], expert by expert."""
    return torch.cat([part @ weight[e] for e, part in enumerate(rows.split(counts.tolist()))])


def unbind(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same without a full-size gradient for every expert."""
    parts = zip(rows.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([part @ one for part, one in parts])


def padded(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One batched product over experts padded to the same number of rows."""
    slots = int(counts.max())
    rank = torch.arange(len(rows)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.arange(len(counts)).repeat_interleave(counts) * slots + rank
    grid = rows.new_zeros(len(counts) * slots, rows.shape[1]).index_copy(0, place, rows)
    return torch.bmm(grid.view(len(counts), slots, -1), weight).flatten(0, 1).index_select(0, place)


VARIANTS = {"ours": experts.grouped_matmul, "loop": loop, "unbind": unbind, "padded": padded}


def build(count: int, chosen: int, width: int, skewed: bool, rows: int):
    """A feed-forward of `count` experts, its input and a fixed routing."""
    torch.manual_seed(0)
    config = preset(
        "sut-logic", ffn_experts=count, ffn_experts_per_token=chosen, intermediate_size=width, dropout=0.0
    )
    layer = FeedForward(config)
    for weight in (layer.up.weight, layer.down.weight):
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    slope = torch.linspace(2, -2, count) if skewed else 0.0
    probs = (torch.randn(rows, count) + slope).softmax(-1)
    top, which = probs.topk(chosen)
    gates = (top / top.sum(-1, keepdim=True)).requires_grad_()
    return layer, torch.randn(rows, config.hidden_size, requires_grad=True), (probs, gates, which)


def run(product, layer: FeedForward, x: Tensor, routing: tuple) -> list[Tensor]:
    """Forward and backward -> output and gradients."""
    dispatch = Dispatch(*routing)
    with mock.patch.object(experts, "grouped_matmul", product):
        with mock.patch.object(layer.router, "forward", lambda rows: dispatch):
            out, _ = layer(x)
    inputs = [x, dispatch.gates, layer.up.weight, layer.down.weight]
    return [out, *torch.autograd.grad(out.square().mean(), inputs)]


def main() -> None:
    """Checks, measures, prints a table and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.time()
    figures = []
    print("| E | k | width | routing | ours ms | " + " | ".join(list(VARIANTS)[1:]) + " |")
    print("|---|---|---|---|---|" + "---|" * (len(VARIANTS) - 1))
    for count, chosen, width, skewed in itertools.product((8, 16, 24, 48), (4, 2), (128, 512), (False, True)):
        case = build(count, chosen, width, skewed, options.rows)
        reference = run(VARIANTS["ours"], *case)
        for name, product in VARIANTS.items():
            for ours, theirs in zip(reference, run(product, *case), strict=True):
                assert (ours - theirs).norm() <= 1e-4 * ours.norm(), name
        seconds = {name: [] for name in VARIANTS}
        for _, (name, product) in itertools.product(range(options.repeats), VARIANTS.items()):
            start = time.process_time()
            run(product, *case)
            seconds[name].append(time.process_time() - start)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        routing = "skewed" if skewed else "balanced"
        figures.append(
            {"experts": count, "chosen": chosen, "width": width, "routing": routing, "seconds": median}
        )
        ratios = " | ".join(f"{median[name] / median['ours']:.2f}" for name in list(VARIANTS)[1:])
        print(
            f"| {count} | {chosen} | {width} | {routing} | {median['ours'] * 1e3:.1f} | {ratios} |",
            flush=True,
        )
    if options.json:
        write_result(
            options.json,
            recipe=None,
            command=shlex.join(["python", *sys.argv]),
            seed=0,
            seconds=time.time() - begun,
            figures={"rows": figures},
        )


if __name__ == "__main__":
    main()
