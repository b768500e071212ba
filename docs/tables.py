"""Fills the tables of measurements.md and README.md from the result files: `python docs/tables.py [--write]`."""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTHS = [str(n) for n in range(7, 13)]
# result file: name in the table, and the runs that made the model
ROWS = {
    "transformer": ("Transformer, 8 layers", ["transformer"]),
    "ut": ("Universal Transformer, halting", ["ut"]),
    "ut-both-ways": ("the same, each pair read both ways", ["ut"]),
    "sut": ("Sparse Universal Transformer, halting", ["sut"]),
}


def result(name: str) -> dict:
    """A result file of the logic folder."""
    return json.loads((ROOT / "results" / "logic" / f"{name}.json").read_text())


def logic() -> str:
    """Accuracy by operator count, and what it costs."""
    lines = [
        "| model | parameters | CPU min | validation | "
        + " | ".join(LENGTHS)
        + " | steps at 12 | MMACs per pair at 12 |",
        "|---" * 12 + "|",
    ]
    for name, (title, stages) in ROWS.items():
        figures = result(name)["figures"]
        cpu = sum(result(f"{stage}-training")["figures"]["seconds"]["cpu"] for stage in stages)
        accuracy = " | ".join(f"{figures['accuracy'][n]:.1f}" for n in LENGTHS)
        lines.append(
            f"| {title} | {figures['parameters']:,} | {cpu / 60:.0f}"
            f" | {figures['accuracy']['validation']:.1f} | {accuracy}"
            f" | {figures['mean_steps']['12']:.2f} of {figures['full_depth']}"
            f" | {figures['macs_per_pair']['12'] / 1e6:.1f} |"
        )
    majority = result("ut")["figures"]["majority"]
    lines.append(
        "| always `#` | 0 | 0 | "
        + " | ".join(f"{majority[n]:.1f}" for n in ("validation", *LENGTHS))
        + " | | |"
    )
    return "\n".join(lines)


def knob(name: str) -> str:
    """The sweep of one model."""
    figures = result(f"{name}-sweep")["figures"]
    lines = [
        "| threshold | steps skipped % | MACs % | seconds % | accuracy % | difference, 95% interval |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        low, high = row["difference_interval"]
        lines.append(
            f"| {row['threshold']:g} | {row['steps_skipped']:.1f} | {100 * row['macs_share']:.1f}"
            f" | {100 * row['seconds_share']:.1f} | {row['accuracy']:.2f}"
            f" | {row['difference']:+.2f} [{low:+.2f}, {high:+.2f}] |"
        )
    return "\n".join(lines)


def cell(name: str) -> str:
    """The README's short figure of one model."""
    figures = result(name)["figures"]
    tests = " / ".join(f"{figures['accuracy'][n]:.1f}" for n in ("7", "9", "12"))
    return f"{figures['accuracy']['validation']:.1f}, then {tests}"


def bench(name: str) -> str:
    """The rows of benchmarks/rows.py."""
    figures = json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text())["figures"]
    lines = [
        "| batch x length | variant | tokens/s | time / masked | speed / packed |",
        "|---|---|---|---|---|",
    ]
    for row in figures["rows"]:
        lines.append(
            f"| {row['batch']} x {row['length']} | {row['variant']} | {row['tokens_per_second']:.0f}"
            f" | {row['time_over_masked']:.2f} | {row['speed_over_packed']:.2f} |"
        )
    return "\n".join(lines)


def language(name: str) -> str:
    """The sweep of a language model: fixed depths, then thresholds."""
    figures = json.loads((ROOT / "results" / "lm" / f"{name}-sweep.json").read_text())["figures"]
    lines = [
        "| setting | loss | % above full depth | loops/token | steps skipped % | MACs % | seconds %"
        " | better than fixed |",
        "|---" * 8 + "|",
    ]
    for row in (*figures["fixed"], *figures["rows"]):
        name = f"depth {row['max_steps']}" if "max_steps" in row else f"threshold {row['threshold']:g}"
        better = f"{row['saved_over_fixed']:+.4f}" if "saved_over_fixed" in row else ""
        lines.append(
            f"| {name} | {row['loss']:.4f} | {row['loss_percent']:+.2f} | {row['mean_depth']:.2f}"
            f" | {row['steps_skipped']:.1f} | {100 * row['macs_share']:.1f} | {100 * row['seconds_share']:.1f}"
            f" | {better} |"
        )
    return "\n".join(lines)


def tied(name: str) -> str:
    """The figure of benchmarks/tied.py."""
    figures = json.loads((ROOT / "results" / "benchmarks" / "tied.json").read_text())["figures"]
    return f"{figures['tokens_per_second_tied_over_dense']:.2f}"


def figures_of(name: str) -> dict:
    """What a result file holds, by its name below results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["figures"]


def _with(value: float | None, spread: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if spread is None else f" ± {spread:.4f}")


def _interval(ends: list[float] | None) -> str:
    return "" if ends is None else f" [{ends[0]:+.4f}, {ends[1]:+.4f}]"


def _ranged(value: dict, form: str) -> str:
    """A mean, with its interval where it has one."""
    ends = value["interval"]
    return f"{value['mean']:{form}}" + ("" if ends is None else f" [{ends[0]:{form}}, {ends[1]:{form}}]")


def compare(name: str) -> str:
    """Rows of `tenuto compare`: means over seeds, ± the standard deviation."""
    figures = figures_of(name)
    routed = any("realised" in row for row in figures["rows"])
    accuracy = any(row.get("accuracy") is not None for row in figures["rows"])
    saved = any("saved_over_fixed" in row for row in figures["rows"])
    titles = ["model", "seeds", "parameters", "loss", f"minus {figures['against']}", "MMACs/token"]
    titles += ["accuracy %"] * accuracy + ["better than fixed depth"] * saved
    titles += ["capacity realised", "above Top-K %", "K/V %"] * routed
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in figures["rows"]:
        cells = [
            row["row"], str(row["seeds"]), f"{row['parameters']:,}",
            _with(row["loss"], row["loss_spread"], ".4f"),
            _with(row["minus_against"], row["minus_against_spread"], "+.4f"),
            f"{row['macs_per_token'] / 1e6:.3f}",
        ]  # fmt: skip
        if accuracy:
            cells.append(f"{row['accuracy']:.2f}")
        if saved:
            cells.append(_with(row.get("saved_over_fixed"), row.get("saved_over_fixed_spread"), "+.4f"))
        if routed and "realised" in row:
            cells += [
                f"{row['realised']:.3f}",
                f"{row['over_topk_percent']:+.2f}",
                f"{100 * row['kv_share']:.1f}",
            ]
        elif routed:
            cells += ["", "", "100"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def isoflops(name: str) -> str:
    """The members of `tenuto isoflops`, each against the looped model, seed by seed."""
    lines = [
        "| model | seeds | parameters | loss | minus looped | MMACs/token | training CPU s |",
        "|---" * 7 + "|",
    ]
    for row in figures_of(name)["members"]:
        lines.append(
            f"| {row['member']} | {row['seeds']} | {row['parameters']:,}"
            f" | {_with(row['loss'], row['loss_spread'], '.4f')}"
            f" | {row['minus_looped']:+.4f}{_interval(row['minus_looped_interval'])}"
            f" | {row['macs_per_token'] / 1e6:.3f} | {row['train_cpu_seconds']:.0f} |"
        )
    return "\n".join(lines)


def routed(name: str) -> str:
    """The README's short figure of one routed row."""
    rows = {row["row"]: row for row in figures_of("routed/stories")["rows"]}
    row, equal = rows[name], rows["dense, without the fifth layer"]
    return f"{row['loss']:.3f} (dense {rows['dense']['loss']:.3f}, dense of equal MACs {equal['loss']:.3f})"


def headline(name: str) -> str:
    """The looped model of `tenuto isoflops` at every fixed depth and threshold, means over its seeds."""
    some = [one for one in figures_of(name)["results"] if one["member"] == "looped"]
    lines = [
        f"| setting ({len(some)} seeds) | loss | % above full depth | loops/token | MACs %"
        " | better than fixed depths |",
        "|---" * 6 + "|",
    ]
    for kind, label in (("fixed", "depth {max_steps}"), ("rows", "threshold {threshold:g}")):
        for rows in zip(*(one[kind] for one in some), strict=True):
            mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0] if key != "interval"}
            better = f"{mean['saved_over_fixed']:+.4f}" if kind == "rows" else ""
            lines.append(
                f"| {label.format(**rows[0])} | {mean['loss']:.4f} | {mean['loss_percent']:+.2f}"
                f" | {mean['mean_depth']:.2f} | {100 * mean['macs_share']:.1f} | {better} |"
            )
    return "\n".join(lines)


def target(name: str) -> str:
    """What the looped model's threshold for at most 0.5% more loss, chosen on half of the documents, on the rest."""
    some = [
        one["target"] for one in figures_of(name)["results"] if one["member"] == "looped" and one["target"]
    ]
    mean = {
        key: sum(one[key] for one in some) / len(some)
        for key in ("macs_share", "loss_percent", "saved_over_fixed")
    }
    thresholds = ", ".join(f"{one['threshold']:g}" for one in some)
    return (
        f"thresholds {thresholds}: {100 * (1 - mean['macs_share']):.0f}% fewer MACs, loss {mean['loss_percent']:+.2f}%,"
        f" {mean['saved_over_fixed']:+.4f} nats against fixed depths"
    )


def matrix(name: str) -> str:
    """The cells of `tenuto matrix`: a row for each body, policy and budget."""
    lines = [
        "| body | policy | loops | parameters | loss | mean depth | MMACs/token | tokens/CPU s | better than fixed"
        " | collapsed |",
        "|---" * 10 + "|",
    ]
    for row in figures_of(name)["rows"]:
        saved = row["saved_over_fixed"]
        lines.append(
            f"| {row['body']} | {row['policy']} | {row['loops']} | {row['parameters']:,}"
            f" | {_with(row['loss'], row['loss_spread'], '.4f')} | {row['mean_depth']:.2f}"
            f" | {row['macs_per_token'] / 1e6:.3f} | {row['tokens_per_cpu_second']:,}"
            f" | {'' if saved is None else f'{saved:+.4f}'} | {'yes' if row['collapsed'] else ''} |"
        )
    return "\n".join(lines)


def collapse(name: str) -> str:
    """Policies with published settings and ours: where held-out tokens stop."""
    lines = [
        "| policy, settings | loss | loops/token | stop after one loop % | run all loops % | MMACs/token | flagged |",
        "|---" * 7 + "|",
    ]
    for row in figures_of(name)["results"]:
        lines.append(
            f"| {row['row']} | {row['loss']:.4f} | {row['mean_depth']:.2f} | {100 * row['at_floor']:.0f}"
            f" | {100 * row['at_full']:.0f} | {row['macs_per_token'] / 1e6:.3f}"
            f" | {'yes' if row['collapsed'] else ''} |"
        )
    return "\n".join(lines)


def shift(name: str) -> str:
    """S_CU - S_CE of SDT and STT at the beginning and the end of training: does novelty give way to prediction?"""
    lines = ["| model | seeds | first tenth | last tenth | shift in |", "|---" * 5 + "|"]
    rows: dict[str, list[dict]] = {}
    for one in figures_of(name)["results"]:
        if one.get("shift"):
            rows.setdefault(one["row"], []).append(one["shift"])
    for row, some in rows.items():
        cells = []
        for part in ("first", "last"):
            difference, error = (
                sum(one[part][key] for one in some) / len(some) for key in ("difference", "error")
            )
            cells.append(f"{difference:+.4f} ± {error:.4f}")
        lines.append(
            f"| {row} | {len(some)} | {' | '.join(cells)} | {sum(one['shift'] for one in some)} of {len(some)} |"
        )
    return "\n".join(lines)


def routers(name: str) -> str:
    """Trained causal routers against their teacher's Top-K, beside the majority rate; means over seeds."""
    lines = ["| model | layer (from 0) | seeds | right % | majority % | F1 | beats it in |", "|---" * 7 + "|"]
    cells: dict[tuple[str, str], list[dict]] = {}
    for one in figures_of(name)["results"]:
        for layer, row in one.get("routers", {}).items():
            if "router" in row:
                cells.setdefault((one["row"], layer), []).append(row)
    for (row, layer), some in cells.items():
        right, majority, f1 = (
            sum(one[key] for one in some) / len(some) for key in ("router", "router_majority", "router_f1")
        )
        lines.append(
            f"| {row} | {layer} | {len(some)} | {100 * right:.1f} | {100 * majority:.1f} | {f1:.3f}"
            f" | {sum(one['beats'] for one in some)} of {len(some)} |"
        )
    return "\n".join(lines)


def smollm2(name: str) -> str:
    """Rows of benchmarks/smollm2.py: perplexity and BLiMP by capacity."""
    lines = ["| model | capacity | realised | perplexity | BLiMP % |", "|---" * 5 + "|"]
    for row in figures_of(name)["rows"]:
        asked = row.get("capacity", "dense")
        lines.append(
            f"| {row['model']} | {asked} | {row['realised']:.3f} | {row['perplexity']:.2f}"
            f" | {row['blimp']:.1f} |"
        )
    return "\n".join(lines)


def prefill(name: str) -> str:
    """Of benchmarks/routed.py, a skipping layer's share of the dense layer's time."""
    figures = figures_of(name)
    lines = [
        "| router | tokens | capacity | ms, dense layer | ms, skipping layer | share |",
        "|---" * 6 + "|",
    ]
    for kind in ("mod", "sdt", "stt"):
        for length, row in figures[kind]["layer"].items():
            lines.append(
                f"| {kind} | {int(length):,} | {row['capacity']:.3f} | {row['milliseconds_dense']:.1f}"
                f" | {row['milliseconds_routed']:.1f} | {row['layer_share']:.2f} |"
            )
    return "\n".join(lines)


def decoding(name: str) -> str:
    """Of benchmarks/routed.py, tokens a second and K/V bytes beside the dense model."""
    figures = figures_of(name)
    lines = [
        "| router | rows | capacity | tokens/s, dense | tokens/s | faster | K/V written % | allocated % | expected % |",
        "|---" * 9 + "|",
    ]
    for kind in ("mod", "sdt", "stt"):
        for rows, row in figures[kind]["decoding"].items():
            shares = (
                100 * row[key] for key in ("kv_written_share", "kv_allocated_share", "kv_share_expected")
            )
            lines.append(
                f"| {kind} | {rows} | {row['capacity']:.3f} | {row['tokens_per_second_dense']:.0f}"
                f" | {row['tokens_per_second']:.0f} | {row['faster']:.2f} | "
                + " | ".join(f"{share:.1f}" for share in shares)
                + " |"
            )
    return "\n".join(lines)


def int8(name: str) -> str:
    """Of benchmarks/int8.py: trained models with priors in int8."""
    lines = ["| model | loss, float32 | loss, int8 | difference | decided alike % |", "|---" * 5 + "|"]
    for row in figures_of(name)["rows"]:
        lines.append(
            f"| {row['checkpoint']} | {row['float32']['loss']:.4f} | {row['int8']['loss']:.4f}"
            f" | {row['loss_difference']:+.5f} | {100 * row['alike']:.2f} |"
        )
    return "\n".join(lines)


def int8_speed(name: str) -> str:
    """Of benchmarks/routed.py: the prior's time in int8 as a share of float32's, by width and rows."""
    figures = figures_of(name)["int8"]
    cells = {tuple(key.removesuffix(" rows").split(", ")): value for key, value in figures.items()}
    widths, rows = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    lines = [
        f"| width of the prior | {' | '.join(f'{row} rows' for row in rows)} |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for width in widths:
        lines.append(f"| {width} | {' | '.join(f'{cells[width, row]:.2f}' for row in rows)} |")
    return "\n".join(lines)


def pairs(name: str, part: str) -> str:
    """One set of `tenuto compare` for sequences or parallel text."""
    figures = figures_of(name)
    first = figures["rows"][0]["sets"][part]
    measure, title = ("bleu", "BLEU") if "bleu" in first else ("exact", "exact %")
    titles = ["model", "seeds", "parameters", title, f"minus {figures['against']} [95%]", "loss",
              "steps read / written", "MMACs/token", "tokens/s"]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in figures["rows"]:
        here = row["sets"][part]
        gap = here.get("minus_against")
        lines.append(
            f"| {row['row']} | {row['seeds']} | {row['parameters']:,}"
            f" | {_points(here[measure])} | "
            + ("" if gap is None else _gap(gap))
            + f" | {here['loss']:.4f} | {here['encoder_depth']:.2f} / {here['decoder_depth']:.2f}"
            f" | {here['macs_per_token'] / 1e6:.3f} | {here['tokens_per_second']:,.0f} |"
        )
    return "\n".join(lines)


def _points(quality: dict) -> str:
    """Percent or BLEU with its spread over seeds."""
    return f"{quality['mean']:.2f}" + ("" if quality["spread"] is None else f" ± {quality['spread']:.2f}")


def _gap(gap: dict) -> str:
    """A difference with its interval over seeds, and over the examples."""
    text = "{:+.2f} [{:+.2f}, {:+.2f}]".format(gap["difference"], *gap["interval"])
    return (
        text + "; [{:+.2f}, {:+.2f}]".format(*gap["examples_interval"])
        if "examples_interval" in gap
        else text
    )


def knob_pairs(name: str, part: str) -> str:
    """The knob of a text-to-text model on one set, beside threshold 1."""
    found = figures_of(name)["sets"][part]
    titles = ["threshold", "BLEU" if found["measure"] == "bleu" else "exact %", "difference [95%]", "steps skipped %",
              "encoder %", "decoder %", "MACs %", "seconds %"]  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in found["rows"]:
        gap = "{:+.2f} [{:+.2f}, {:+.2f}]".format(row["difference"], *row["difference_interval"])
        shares = (row["skipped"], row["encoder_skipped"], row["decoder_skipped"],
                  100 * row["macs_share"], 100 * row["seconds_share"])  # fmt: skip
        shown = " | ".join(f"{one:.1f}" for one in shares)
        lines.append(f"| {row['threshold']:g} | {row[found['measure']]:.2f} | {gap} | {shown} |")
    return "\n".join(lines)


def pooled(name: str) -> str:
    """BLEU of all tests of `tenuto compare` together: the differences, with the bootstrap over sentences."""
    figures = figures_of(name)
    some = [row for row in figures["rows"] if row.get("pooled")]
    lines = [
        f"| model | BLEU of {' + '.join(some[0]['pooled']['sets'])} | minus {figures['against']} [95%] |",
        "|---" * 3 + "|",
    ]
    for row in some:
        here = row["pooled"]
        low, high = here["interval"]
        lines.append(
            f"| {row['row']} | {here['second']:.2f} | {here['difference']:+.2f} [{low:+.2f}, {high:+.2f}] |"
        )
    return "\n".join(lines)


def kinds(name: str, part: str) -> str:
    """Exact match of `tenuto compare` by kind of example, means over seeds: one line a kind, one column a row."""
    figures = figures_of(name)
    rows: dict[str, list[dict]] = {}
    for one in figures["results"]:
        rows.setdefault(one["row"], []).append(one["quality"][part]["by_kind"])
    lines = [f"| | examples | {' | '.join(rows)} |", "|---" * (len(rows) + 2) + "|"]
    for kind, first in next(iter(rows.values()))[0].items():
        means = [sum(one[kind]["exact"] for one in some) / len(some) for some in rows.values()]
        lines.append(f"| {kind} | {first['examples']} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    return "\n".join(lines)


def grid(name: str) -> str:
    """The grid of the exponent: held-out loss by width and loops, means over seeds."""
    cells: dict[tuple[int, int], list[float]] = {}
    for one in figures_of(name)["results"]:
        if one["member"] == "grid":
            cells.setdefault((one["width"], one["r"]), []).append(one["loss"])
    widths, loops = (sorted({key[side] for key in cells}) for side in (0, 1))
    lines = [
        f"| width | {' | '.join(f'{r} x {max(loops) // r} layers' for r in loops)} |",
        "|---" * (1 + len(loops)) + "|",
    ]
    for width in widths:
        row = []
        for r in loops:
            some = cells.get((width, r), [])
            mean = sum(some) / len(some) if some else None
            spread = statistics.stdev(some) if len(some) > 1 else None
            row.append(_with(mean, spread, ".4f"))
        lines.append(f"| {width} | {' | '.join(row)} |")
    return "\n".join(lines)


def exponent(name: str) -> str:
    """The fitted exponent and its interval."""
    fit = figures_of(name)["exponent"]
    low, high = fit["interval"]
    return f"{fit['phi']:.2f} [{low:.2f}, {high:.2f}]"


def problems(name: str) -> str:
    """Rows of `tenuto compare` on problems, set by set: accuracy, loops, MACs, what halting adds to fixed depths."""
    figures = figures_of(name)["rows"]
    lines = [
        "| set | model | seeds | accuracy % | loops/token | MMACs/token | above fixed depths, points |",
        "|---" * 7 + "|",
    ]

    for part in figures[0]["problems"]:
        for row in figures:
            one = row["problems"][part]
            over = _ranged(one["over_fixed"], "+.1f") if "over_fixed" in one else ""
            lines.append(
                f"| {part} | {row['row']} | {row['seeds']} | {_ranged(one['accuracy'], '.1f')}"
                f" | {one['mean_depth']:.2f} | {one['macs_per_token'] / 1e6:.3f} | {over} |"
            )
    return "\n".join(lines)


def stopping(name: str) -> str:
    """benchmarks/depth.py: what stopping early saves."""
    lines = [
        "| case | seconds, full depth | seconds, adaptive | saved MACs % | saved seconds % | realised %, repeats |",
        "|---" * 6 + "|",
    ]
    for case, row in figures_of(name).items():
        lines.append(
            f"| {case} | {row['seconds_full']:.2f} | {row['seconds_adaptive']:.2f} | {100 * row['saving_macs']:.1f}"
            f" | {100 * row['saving_seconds']:.1f} | {100 * row['realised']:.0f}"
            f" [{100 * row['spread'][0]:.0f}, {100 * row['spread'][1]:.0f}] |"
        )
    return "\n".join(lines)


def products(name: str) -> str:
    """benchmarks/products.py: what a product of few rows costs."""
    figures = figures_of(name)
    rows = list(figures["linear"]["milliseconds"])
    lines = [
        f"| product, ms | {' | '.join(f'{n} rows' for n in rows)} | would realise % |",
        "|---" * (2 + len(rows)) + "|",
    ]
    for kind, one in figures.items():
        took = " | ".join(f"{one['milliseconds'][n]:.1f}" for n in rows)
        lines.append(f"| {kind} | {took} | {100 * one['realised']:.0f} |")
    return "\n".join(lines)


def topics(name: str) -> str:
    """Depth by topic, raw and adjusted, with the oracle's."""
    figures = figures_of(name)
    lines = [
        "| topic | tokens | loops/token | effect size | adjusted | oracle |",
        "|---" * 6 + "|",
    ]

    for topic, row in figures["by_topic"].items():
        lines.append(
            f"| {topic} | {row['tokens']:,} | {_ranged(row, '.3f')} | {row.get('effect', 0.0):+.2f}"
            f" | {_ranged(figures['by_topic_adjusted'][topic], '.3f')}"
            f" | {_ranged(figures['oracle']['by_topic'][topic], '.3f')} |"
        )
    return "\n".join(lines)


def tasks(name: str) -> str:
    """Groups of the harness at each threshold: accuracy with its standard error, chance, loops."""
    lines = ["| tasks | threshold | accuracy % | chance % | loops/token | MMACs/token |", "|---" * 6 + "|"]
    for row in figures_of(name)["rows"]:
        for group, one in row["groups"].items():
            lines.append(
                f"| {group} ({one['samples']:,}) | {row['threshold']:g} | {one['accuracy']:.1f} ± {one['stderr']:.1f}"
                f" | {one['chance']:.0f} | {one['depth_mean']:.2f} | {one['macs_per_token'] / 1e6:.3f} |"
            )
    return "\n".join(lines)


def memory(name: str) -> str:
    """`tenuto presets --memory` of one preset."""
    from tenuto.footprint import memory_table

    lines = ["| precision | checkpointing | largest batch | activations GiB | total GiB |", "|---" * 5 + "|"]
    for row in memory_table((name,)):
        gib = {part: f"{row[part] / 2**30:.2f}" for part in ("activations", "total")}
        lines.append(
            f"| {row['precision']} | {'each loop' if row['checkpointing'] else ''} | {row['batch']}"
            f" | {gib['activations']} | {gib['total']} |"
        )
    return "\n".join(lines)


def headroom(name: str) -> str:
    """What the oracle saves against the best fixed depth, nats."""
    return f"{figures_of(name)['oracle']['headroom']:.2f}"


def correlation(name: str) -> str:
    """Of the depths given with the oracle's."""
    return f"{figures_of(name)['correlation']['with the oracle depth']:.2f}"


def rules(name: str) -> str:
    """Exit rules: loss saved against a fixed depth of the same MACs, and how much of the oracle's headroom that is."""
    lines = [
        "| rule | threshold | loops/token | loss | better than fixed | % of the headroom |",
        "|---" * 6 + "|",
    ]
    for row in figures_of(name)["rules"]:
        share = "" if row["of_headroom"] is None else f"{100 * row['of_headroom']:.1f}"
        lines.append(
            f"| {row['rule']} | {row['threshold']:g} | {row['mean_depth']:.2f} | {row['loss']:.4f}"
            f" | {row['saved_over_fixed']:+.4f} | {share} |"
        )
    return "\n".join(lines)


def slots(name: str) -> str:
    """benchmarks/slots.py: the exact cache beside one slot a layer."""
    lines = ["| setting | cache | loss | loops/token | K/V bytes per token |", "|---" * 5 + "|"]
    for key, row in figures_of(name).items():
        if isinstance(row, dict):
            setting, kind = key.rsplit(", ", 1)
            lines.append(
                f"| {setting} | {kind} | {row['loss']:.4f} | {row['loops']:.2f} | {row['kv_bytes_per_token']:,.0f} |"
            )
    return "\n".join(lines)


def lines_of(name: str) -> str:
    """How long a model file is."""
    return str(len((ROOT / "src" / "tenuto" / "models" / f"{name}.py").read_text().splitlines()))


MAKERS = {
    "logic": logic,
    "knob": knob,
    "cell": cell,
    "bench": bench,
    "tied": tied,
    "language": language,
    "compare": compare,
    "isoflops": isoflops,
    "headline": headline,
    "routed": routed,
    "target": target,
    "matrix": matrix,
    "collapse": collapse,
    "grid": grid,
    "exponent": exponent,
    "stopping": stopping,
    "products": products,
    "problems": problems,
    "topics": topics,
    "tasks": tasks,
    "memory": memory,
    "headroom": headroom,
    "correlation": correlation,
    "shift": shift,
    "prefill": prefill,
    "decoding": decoding,
    "int8": int8,
    "int8_speed": int8_speed,
    "pairs": pairs,
    "pooled": pooled,
    "knob_pairs": knob_pairs,
    "kinds": kinds,
    "smollm2": smollm2,
    "routers": routers,
    "rules": rules,
    "slots": slots,
    "lines": lines_of,
}


def filled(text: str) -> str:
    """The text with what stands between <!-- MAKER ARGUMENT --> and <!-- end --> made anew."""

    def fill(match: re.Match) -> str:
        words = match["call"].split()
        made = MAKERS[words[0]](*words[1:])
        gap = "\n" if "\n" in made else ""
        return f"<!-- {match['call']} -->{gap}{made}{gap}<!-- end -->"

    return re.sub(r"<!-- (?P<call>\w+(?: [\w/+-]+)*) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in (ROOT / "README.md", ROOT / "docs" / "measurements.md"):
        before = page.read_text()
        if "--write" in sys.argv:
            page.write_text(filled(before))
        elif filled(before) != before:
            sys.exit(f"{page.name} differs from the result files; run python docs/tables.py --write")
