"""Training speed of the tied model: 4 loops of 1 layer against 4 distinct layers of the same block.

    python benchmarks/tied.py [--repeats N] [--json FILE]

The same arithmetic, a quarter of the weights: forward, backward and an AdamW step on 8 rows of 256 tokens, d = 256.
Times are CPU seconds of this process on one thread, the median of interleaved runs.
"""

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

from tenuto.models import LoopedForCausalLM
from tenuto.presets import preset
from tenuto.results import write_result

SHAPE = {"num_prelude_layers": 0, "num_coda_layers": 0, "policy": "fixed", "input_injection": "none"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    ids = torch.randint(3, 4096, (8, 256))
    runs, times = {}, {}
    for name, layers, loops in (("tied", 1, 4), ("dense", 4, 1)):
        torch.manual_seed(0)
        model = LoopedForCausalLM(
            preset("looped-4m", **SHAPE, num_core_layers=layers, num_loops=loops)
        ).train()
        runs[name], times[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4)), []
    macs = {name: model(ids, labels=ids).compute.total for name, (model, _) in runs.items()}
    assert macs["tied"] == macs["dense"], macs
    for _ in range(options.repeats):
        for name, (model, optimizer) in runs.items():
            before = time.process_time()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times[name].append(time.process_time() - before)
    median = {name: statistics.median(some) for name, some in times.items()}
    figures = {
        "tokens_per_second_tied_over_dense": round(median["dense"] / median["tied"], 4),
        "tokens_per_second_dense": round(ids.numel() / median["dense"]),
        "macs_per_token": macs["tied"] // ids.numel(),
    }
    print(figures)
    if options.json:
        write_result(
            options.json, recipe=None, command=shlex.join(["python", *sys.argv]), seed=0,
            seconds=time.time() - start, figures=figures,
        )  # fmt: skip


if __name__ == "__main__":
    main()
