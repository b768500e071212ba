"""What packing rows is worth: the Sparse Universal Transformer's encoder stack, forward and backward.

    python benchmarks/rows.py [--repeats N] [--json FILE]

The stack is the paper's logic preset (12 steps, attention (12, 4, 2, 32, 1), feed-forward (12, 4, 128), d = 256).
Half of the token-steps are halted: depths are spread evenly over 1..11 of 12, whatever the halting net says; the net
runs in every variant. The variants compute the same function, which is checked, gradients included, before timing:

    packed   the library: a stopped token is not computed
    loop     packed, with a Python loop over the experts instead of the grouped product
    masked   every token is computed at every step, then selected

`full depth` is the library when nobody halts. Times are CPU seconds of this process on one thread, the median of
interleaved runs: other work on the machine changes them little, and their ratios less.
"""

import argparse
import itertools
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from tenuto.models import experts, halting
from tenuto.models.experts import Balance
from tenuto.models.halting import HaltState
from tenuto.models.rows import Rows
from tenuto.models.universal import UniversalStack
from tenuto.presets import preset
from tenuto.results import write_result


class PlannedDepths(halting.StickBreaking):
    """Stick-breaking whose decisions to stop are given: the rows' depths, in `plan` [N]. The net runs all the same."""

    plan: Tensor

    def start(self, x_Nd: Tensor) -> HaltState:
        """kept: the steps that each row has still to run."""
        return replace(super().start(x_Nd), kept=(self.plan,))

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """One step less to run."""
        return replace(super().ask(state, h_Nd, step), kept=(state.kept[0] - 1,))

    def go_on(self, state: HaltState, threshold_N) -> Tensor:
        """Whether there is a step left."""
        return state.kept[0] > 0


def packed(stack: UniversalStack, x_BTd: Tensor) -> Tensor:
    """The library's forward pass -> loss."""
    out = stack(x_BTd)
    return loss_of(out.hidden, out.expected_depths, out.balance.values())


def loop(stack: UniversalStack, x_BTd: Tensor) -> Tensor:
    """The same with one product an expert."""

    def one_by_one(rows, weight, counts):
        parts = rows.split(counts.tolist())
        return torch.cat([part @ weight[e] for e, part in enumerate(parts)])

    with mock.patch.object(experts, "grouped_matmul", one_by_one):
        return packed(stack, x_BTd)


def masked(stack: UniversalStack, x_BTd: Tensor) -> Tensor:
    """The same with every token computed at every step, and the stopped ones' results thrown away."""
    policy, block, rows = stack.policy, stack.block, Rows.of(x_BTd, None)
    h_Nd = s_Nd = rows.pack(x_BTd)
    reach, _ = stack.reaches(rows.length, None, None, None)
    state, balance = policy.start(h_Nd), {}
    expected, running = state.depth, torch.ones(len(rows), dtype=torch.bool)
    for step in range(1, stack.steps + 1):
        if step > 1:
            asked = policy.ask(state, h_Nd, step - 1)
            running = running & policy.go_on(asked, None)
            kept = (
                torch.where(running if new.dim() == 1 else running[:, None], new, old)
                for new, old in zip((asked.log_left, asked.spent, asked.depth),
                                    (state.log_left, state.spent, state.depth), strict=True)
            )  # fmt: skip
            state = HaltState(*kept, asked.kept)
        kv = block.keys_values(s_Nd, rows, None)
        new_Nd, dispatches = block(h_Nd, rows, kv, reach.views(rows))
        h_Nd = torch.where(running[:, None], new_Nd, h_Nd)
        s_Nd = torch.where(running[:, None], policy.combine(state, new_Nd), s_Nd)
        expected = torch.where(running, policy.expected_depth(state, step), expected)
        for name, dispatch in dispatches.items():
            used = Balance.of(dispatch, state.log_left.exp() * running)
            balance[name] = balance[name] + used if name in balance else used
    return loss_of(rows.unpack(s_Nd), rows.unpack(expected), balance.values())


def loss_of(hidden_BTd: Tensor, expected_BT: Tensor, balance) -> Tensor:
    """A loss that reaches everything a training loss reaches."""
    direction = torch.linspace(-1, 1, hidden_BTd.shape[-1], dtype=hidden_BTd.dtype)
    return (hidden_BTd @ direction).mean() + expected_BT.mean() + sum(one.mim() for one in balance)


VARIANTS = {"packed": packed, "loop": loop, "masked": masked}


def build(batch: int, length: int, dtype=torch.float32) -> tuple[UniversalStack, Tensor, Tensor]:
    """The stack with planned depths (half of the token-steps), and an input."""
    torch.manual_seed(0)
    config = preset("sut-logic", dropout=0.0)
    config._attn_implementation = "sdpa"
    with mock.patch.dict(halting.POLICIES, stick_breaking=PlannedDepths):
        stack = UniversalStack(config).to(dtype)
    for parameter in stack.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-2] ** -0.5)
    depths = torch.arange(batch * length) % (stack.steps - 1) + 1
    depths = depths[torch.randperm(len(depths))]
    stack.policy.plan = depths
    x_BTd = torch.randn(batch, length, config.hidden_size, dtype=dtype, requires_grad=True)
    return stack, x_BTd, depths


def run(variant, stack: UniversalStack, x_BTd: Tensor) -> Tensor:
    """Forward and backward -> loss."""
    stack.zero_grad()
    x_BTd.grad = None
    loss = variant(stack, x_BTd)
    loss.backward()
    return loss.detach()


def check() -> None:
    """All variants give the same loss and gradients; the library does nothing for a token that stopped."""
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        stack, x_BTd, depths = build(8, 32, dtype)
        assert torch.equal(stack(x_BTd).depths.flatten(), depths)
        results = {}
        for name, variant in VARIANTS.items():
            loss = run(variant, stack, x_BTd)
            results[name] = [loss, x_BTd.grad] + [p.grad for p in stack.parameters()]
        for name, result in results.items():
            for ours, theirs in zip(results["packed"], result, strict=True):
                assert (ours - theirs).norm() <= tolerance * ours.norm(), (name, dtype)


def measure(batch: int, length: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each variant."""
    stack, x_BTd, depths = build(batch, length)
    nobody = torch.full_like(depths, stack.steps)
    plans = {name: (variant, depths) for name, variant in VARIANTS.items()}
    plans["full depth"] = (packed, nobody)
    seconds = {name: [] for name in plans}
    for _, (name, (variant, plan)) in itertools.product(range(repeats), plans.items()):
        stack.policy.plan = plan
        run(variant, stack, x_BTd)  # not timed: the allocator settles on this variant's memory
        start = time.process_time()
        run(variant, stack, x_BTd)
        seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Checks, measures, prints a table and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.time()
    check()
    print("All variants give the same loss and gradients.\n")
    print("| batch x length | variant | CPU s | tokens/s | time / masked | speed / packed |")
    print("|---|---|---|---|---|---|")
    figures = []
    for batch, length in ((64, 32), (64, 64)):
        seconds = measure(batch, length, options.repeats)
        for name, time_taken in seconds.items():
            speed = batch * length / time_taken
            to_masked, to_packed = time_taken / seconds["masked"], seconds["packed"] / time_taken
            figures.append(
                {"batch": batch, "length": length, "variant": name, "seconds": time_taken, "tokens_per_second": speed,
                 "time_over_masked": to_masked, "speed_over_packed": to_packed}
            )  # fmt: skip
            print(
                f"| {batch} x {length} | {name} | {time_taken:.3f} | {speed:.0f} | {to_masked:.2f} | {to_packed:.2f} |"
            )
    if options.json:
        write_result(
            options.json,
            recipe="preset sut-logic, dropout 0",
            command=shlex.join(["python", *sys.argv]),
            seed=0,
            seconds=time.time() - begun,
            figures={"rows": figures},
        )


if __name__ == "__main__":
    main()
