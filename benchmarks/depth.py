"""What stopping early is worth to a looped language model: prefill and cached decoding, wall-clock against MACs.

    python benchmarks/depth.py [--repeats N] [--json FILE]

One prelude layer, two core layers looped eight times, one coda layer; d = 512, 8 heads, grouped-query attention over
4, feed-forward 1,408, vocabulary 4,096; random weights, depths imposed (spread evenly over 1..8, so that 44% of the
token-steps are skipped; an exit head runs all the same). Prefill: one text of 4,096 tokens. Decoding: 64 and 16 rows
at once after 128 tokens of context, 24 tokens. The MACs are the ledger's, attention counted as pairs that the mask
lets through.

    saving     1 - adaptive / full depth, of MACs and of seconds
    realised   saving of seconds / saving of MACs

Before timing, the cached decoding is checked against one pass over everything. Times are wall-clock on one thread,
the fastest of interleaved runs.
"""

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tenuto.models import LoopedForCausalLM
from tenuto.models.halting import ExitHead, HaltState
from tenuto.presets import preset
from tenuto.results import write_result

SHAPE = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1408, "vocab_size": 4096, "num_prelude_layers": 1, "num_core_layers": 2,
    "num_coda_layers": 1, "num_loops": 8, "policy": "exit_head", "max_position_embeddings": 8192,
}  # fmt: skip


class ImposedDepths(ExitHead):
    """An exit head that runs and is not listened to: the rows' depths are given, in `plan` [N]."""

    plan: Tensor

    def start(self, x_Nd: Tensor) -> HaltState:
        """kept: the loops that each row has still to run."""
        return replace(super().start(x_Nd), kept=(self.plan,))

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """One loop less to run."""
        return replace(super().ask(state, h_Nd, step), kept=(state.kept[0] - 1,))

    def go_on(self, state: HaltState, threshold_N) -> Tensor:
        """Whether there is a loop left."""
        return state.kept[0] > 0


def build(**changes) -> LoopedForCausalLM:
    """The model, its depths to be imposed."""
    torch.manual_seed(0)
    model = LoopedForCausalLM(preset("looped-tiny", **{**SHAPE, **changes})).eval()
    model.stack.policy.__class__ = ImposedDepths
    return model


def spread(count: int, loops: int) -> Tensor:
    """[count] depths, evenly 1..loops in random order."""
    return (torch.arange(count) % loops + 1)[
        torch.randperm(count, generator=torch.Generator().manual_seed(0))
    ]


def prefill(model: LoopedForCausalLM, ids: Tensor, plan: Tensor) -> tuple[float, int]:
    """Seconds and MACs of one pass without a cache."""
    model.stack.policy.plan = plan
    start = time.perf_counter()
    out = model(ids, use_cache=False, logits_to_keep=1)
    return time.perf_counter() - start, macs(out.compute)


def decode(model: LoopedForCausalLM, ids: Tensor, context: int, plan: Tensor) -> tuple[float, int, Tensor]:
    """Seconds and MACs of decoding ids[:, context:] one by one; the logits of the last token."""
    model.stack.policy.plan = plan[:, :context].reshape(-1)
    out = model(ids[:, :context], use_cache=True, logits_to_keep=1)
    total, start = 0, time.perf_counter()
    for place in range(context, ids.shape[1]):
        model.stack.policy.plan = plan[:, place]
        out = model(ids[:, place : place + 1], cache=out.cache)
        total += macs(out.compute)
    return time.perf_counter() - start, total, out.logits[:, -1]


def macs(ledger) -> int:
    """All MACs, attention as the pairs that the mask lets through."""
    return ledger.total - int(ledger.macs["attention"].sum()) + int(ledger.attention_causal.sum())


def check() -> None:
    """Decoding one by one gives what one pass gives, whatever the depths."""
    model = build(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32).double()
    ids = torch.randint(3, 4096, (6, 20))
    plan = spread(120, 8).view(6, 20)
    model.stack.policy.plan = plan.reshape(-1)
    want = model(ids, use_cache=False).logits[:, -1]
    _, _, got = decode(model, ids, 8, plan)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def bench(repeats: int, tokens: int, context: int, new: int) -> dict:
    """The figures."""
    check()
    model, loops = build(), SHAPE["num_loops"]
    text = torch.randint(3, 4096, (1, tokens))
    cases = {f"prefill of {tokens} tokens": lambda plan: prefill(model, text, plan(tokens).reshape(-1))}
    for rows in (64, 16):
        ids = torch.randint(3, 4096, (rows, context + new))

        def run(plan, ids=ids):
            return decode(model, ids, context, plan(ids.numel()).view(ids.shape))[:2]

        cases[f"decoding of {rows} rows"] = run
    plans = {
        "adaptive": lambda count: spread(count, loops),
        "full": lambda count: torch.full((count,), loops),
    }
    figures = {}
    for name, case in cases.items():
        times: dict[str, list[float]] = {plan: [] for plan in plans}
        cost = {}
        for _ in range(repeats):
            for kind, plan in plans.items():
                seconds, cost[kind] = case(plan)
                times[kind].append(seconds)
        saved = {
            "macs": 1 - cost["adaptive"] / cost["full"],
            "seconds": 1 - min(times["adaptive"]) / min(times["full"]),
        }
        figures[name] = {
            "saving_macs": round(saved["macs"], 4),
            "saving_seconds": round(saved["seconds"], 4),
            "realised": round(saved["seconds"] / saved["macs"], 4),
            "seconds_full": round(min(times["full"]), 3),
            "seconds_adaptive": round(min(times["adaptive"]), 3),
        }
        print(name, figures[name], file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    figures = bench(options.repeats, options.tokens, options.context, options.new)
    if options.json:
        write_result(
            options.json, recipe=None, command=shlex.join(["python", *sys.argv]), seed=0,
            seconds=time.time() - start, figures=figures,
        )  # fmt: skip


if __name__ == "__main__":
    main()
