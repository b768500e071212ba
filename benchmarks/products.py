"""What a matrix product of few rows costs: why decoding realises less of a saving of MACs than reading a prompt.

    python benchmarks/products.py [--repeats N] [--json FILE]

Milliseconds of one product of M rows of 1,024 with weights of 1,024 x 2,816, float32, one thread, the best of the
repeats: `linear` as the models do it, `blocked` by oneDNN with weights laid out for it beforehand. realised: of a
model that were nothing but these products, 64 rows at depths spread evenly over 1..8 (as in depth.py), the share of its
saving of MACs that it would save in time.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tenuto.results import write_result

ROWS = (4, *range(8, 65, 8))


def best(product: Callable[[Tensor], Tensor], rows: int, repeats: int) -> float:
    """Milliseconds of the fastest call."""
    x, seconds = torch.randn(rows, 1024), []
    for _ in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        product(x)
        seconds.append(time.perf_counter() - start)
    return 1000 * min(seconds[1:])


@torch.inference_mode()
def bench(repeats: int) -> dict:
    """The figures, by kind of product."""
    torch.manual_seed(0)
    weight = torch.randn(2816, 1024)
    laid_out = weight.to_mkldnn()
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: F.linear(x, weight),
        "blocked": lambda x: torch.ops.mkldnn._linear_pointwise(x, laid_out, None, "none", [], ""),
    }
    few = torch.randn(5, 1024)
    torch.testing.assert_close(kinds["blocked"](few), kinds["linear"](few), rtol=1e-3, atol=1e-3)
    figures = {}
    for kind, product in kinds.items():
        took = {rows: best(product, rows, repeats) for rows in ROWS}
        # loop l of 8 runs the 64 - 8 (l - 1) rows that are left
        adaptive, full = sum(took[rows] for rows in range(8, 65, 8)), 8 * took[64]
        saved_macs = 1 - sum(range(8, 65, 8)) / (8 * 64)
        figures[kind] = {
            "milliseconds": {str(rows): round(value, 2) for rows, value in took.items()},
            "realised": round((1 - adaptive / full) / saved_macs, 3),
        }
        print(kind, figures[kind], file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50)
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
