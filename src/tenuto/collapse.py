"""The collapse detector: depths without spread decide nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

SPREAD, SHARE = 0.1, 0.9
FOUND = {
    "floor": "everything stops at the floor",
    "ceiling": "nothing stops before the last step",
    "between": "all tokens stop at the same step",
}
# what to try, by policy: only fields that a config of that policy takes
MIXING = {
    "floor": "deepen the start (halt_bias -3), lower act_weight or, in a looped model, give it a depth_budget, begin"
    " halting later (schedule.halting_from) and raise the price slowly (schedule.act_warmup)",
    "ceiling": "raise act_weight, or lower halt_threshold, which needs no training",
    "between": "lower act_weight, or, in a looped model, supervise every loop (objective all or sampled) and read exits"
    " with policy exit_head (act_weight 0)",
}
PONDERNET = {
    "floor": "deepen the start (halt_bias -3), move the prior deeper (a lower ponder_prior; null is uniform), begin"
    " halting later (schedule.halting_from), or raise halt_threshold, which needs no training",
    "ceiling": "move the prior to fewer steps (a higher ponder_prior) and raise ponder_weight, or lower halt_threshold,"
    " which needs no training",
    "between": "lower ponder_weight, which pulls all tokens to one prior, or supervise every loop (objective all or"
    " sampled) and read exits with policy exit_head",
}
EXIT_HEAD = {
    "floor": "raise halt_threshold, which needs no training, lower exit_margin, or begin halting later"
    " (schedule.halting_from)",
    "ceiling": "lower halt_threshold, which needs no training, raise exit_margin, or supervise every loop (objective"
    " all or sampled)",
    "between": "supervise every loop (objective all or sampled), or try other values of halt_threshold, which needs no"
    " training",
}
RULE = {
    "floor": "raise halt_threshold, which needs no training",
    "ceiling": "lower halt_threshold, which needs no training, or supervise every loop (objective all or sampled)",
    "between": "try other values of halt_threshold, which needs no training, or supervise every loop (objective all or"
    " sampled)",
}
ADVICE = {
    **dict.fromkeys(("stick_breaking", "act", "depth_router"), MIXING),
    "pondernet": PONDERNET,
    "exit_head": EXIT_HEAD,
    **dict.fromkeys(("latent", "second_difference", "kl", "margin"), RULE),
}


def collapse(depths: np.ndarray, floor: int, full: int, policy: str = "stick_breaking") -> dict[str, Any]:
    """Whether the depths [N] of tokens (floor..full steps) have lost their spread, and what to try with their `policy`.

    spread: standard deviation in steps; at_floor, at_full: shares of the tokens (an expected depth, which is no whole
    number, is at the nearest step); collapsed: the spread is below 0.1 or 90% of the tokens are at the floor; advice: a
    sentence, None when all is well. A floor that equals the full depth leaves nothing to decide and is not called
    collapsed.
    """
    at_floor, at_full = float((depths < floor + 0.5).mean()), float((depths >= full - 0.5).mean())
    spread = float(depths.std())
    collapsed = floor < full and (spread < SPREAD or at_floor > SHARE)
    kind = "floor" if at_floor > 0.5 else "ceiling" if at_full > 0.5 else "between"
    return {
        "spread": round(spread, 3),
        "at_floor": round(at_floor, 4),
        "at_full": round(at_full, 4),
        "collapsed": collapsed,
        "advice": f"{FOUND[kind]}: {ADVICE[policy][kind]}" if collapsed else None,
    }
