"""What stopping early is worth to a looped language model: prefill and cached decoding, wall-clock against MACs.

    python benchmarks/depth.py [--repeats N] [--json FILE]

One prelude layer, two core layers looped eight times, one coda layer; d = 512, 8 heads, grouped-query attention over
4, feed-forward 1,408, vocabulary 4,096; random weights, depths imposed (spread evenly over 1..8, so that 44% of the
token-steps are skipped; an exit head runs all the same). Prefill: one text of 4,096 tokens. Decoding: 64 and 16 rows
at once after 128 tokens of context, 24 tokens; and 64 rows of a model twice as wide (d = 1,024, feed-forward 2,816)
after 32 tokens, 12 tokens. The MACs are the ledger's, attention counted as pairs that the mask lets through.

    saving     1 - adaptive / full depth, of MACs and of seconds
    realised   saving of seconds / saving of MACs

Before timing, the cached decoding is checked against one pass over everything. Times are wall-clock on one thread; both
kinds take turns (in decoding, token by token), so that what slows the machine for a while slows both, and the sums are
compared. spread: of `realised` over the repeats, lowest and highest.
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


Took = dict[str, tuple[float, int, Tensor | None]]  # by kind: seconds, MACs, logits of the last token


def prefill(model: LoopedForCausalLM, ids: Tensor, plans: dict[str, Tensor], turn: int) -> Took:
    """One pass over ids without a cache, at the depths of each plan [B, T]; who is first changes with `turn`."""
    took: Took = {}
    for kind in list(plans)[:: 1 if turn % 2 else -1]:
        model.stack.policy.plan = plans[kind].reshape(-1)
        start = time.perf_counter()
        out = model(ids, use_cache=False, logits_to_keep=1)
        took[kind] = time.perf_counter() - start, out.compute.total_causal, None
    return took


def decode(model: LoopedForCausalLM, ids: Tensor, context: int, plans: dict[str, Tensor]) -> Took:
    """Decoding of ids[:, context:] one by one at the depths of each plan [B, T], the plans taking turns."""
    outs, seconds, total = {}, dict.fromkeys(plans, 0.0), dict.fromkeys(plans, 0)
    for kind, plan in plans.items():
        model.stack.policy.plan = plan[:, :context].reshape(-1)
        outs[kind] = model(ids[:, :context], use_cache=True, logits_to_keep=1)
    for place in range(context, ids.shape[1]):
        for kind in list(plans)[:: 1 if place % 2 else -1]:
            model.stack.policy.plan = plans[kind][:, place]
            start = time.perf_counter()
            outs[kind] = model(ids[:, place : place + 1], cache=outs[kind].cache)
            seconds[kind] += time.perf_counter() - start
            total[kind] += outs[kind].compute.total_causal
    return {kind: (seconds[kind], total[kind], out.logits[:, -1]) for kind, out in outs.items()}


def check() -> None:
    """Decoding one by one gives what one pass gives, whatever the depths."""
    model = build(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32).double()
    ids = torch.randint(3, 4096, (6, 20))
    plan = spread(120, 8).view(6, 20)
    model.stack.policy.plan = plan.reshape(-1)
    want = model(ids, use_cache=False).logits[:, -1]
    _, _, got = decode(model, ids, 8, {"any": plan})["any"]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def bench(repeats: int, tokens: int, context: int, new: int) -> dict:
    """The figures."""
    check()
    loops, wide = SHAPE["num_loops"], {"hidden_size": 1024, "num_attention_heads": 16,
                                       "num_key_value_heads": 8, "intermediate_size": 2816}  # fmt: skip
    cases: list[tuple[str, dict, int, tuple[int, int]]] = [  # name, changes, tokens before, shape
        (f"prefill of {tokens} tokens", {}, 0, (1, tokens)),
        (f"prefill of {tokens // 8} tokens", {}, 0, (1, tokens // 8)),
        ("decoding of 64 rows", {}, context, (64, context + new)),
        ("decoding of 16 rows", {}, context, (16, context + new)),
        ("decoding of 64 rows, d = 1,024", wide, context // 4, (64, context // 4 + new // 2)),
    ]
    figures = {}
    for name, changes, before, shape in cases:
        model = build(**changes)
        ids = torch.randint(3, 4096, shape)
        plans = {"adaptive": spread(ids.numel(), loops).view(shape), "full": torch.full(shape, loops)}
        runs = [
            prefill(model, ids, plans, turn) if not before else decode(model, ids, before, plans)
            for turn in range(repeats)
        ]
        saved_macs = 1 - runs[0]["adaptive"][1] / runs[0]["full"][1]
        each = [(1 - run["adaptive"][0] / run["full"][0]) / saved_macs for run in runs]
        seconds = {kind: sum(run[kind][0] for run in runs) / repeats for kind in plans}
        saved = 1 - seconds["adaptive"] / seconds["full"]
        figures[name] = {
            "saving_macs": round(saved_macs, 4),
            "saving_seconds": round(saved, 4),
            "realised": round(saved / saved_macs, 4),
            "spread": [round(min(each), 4), round(max(each), 4)],
            "seconds_full": round(seconds["full"], 3),
            "seconds_adaptive": round(seconds["adaptive"], 3),
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
