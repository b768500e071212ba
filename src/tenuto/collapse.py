"""The collapse detector: depths without spread decide nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

SPREAD, SHARE = 0.1, 0.95
ADVICE = {
    "floor": "everything stops at the floor: deepen the start (halt_bias -3), lower act_weight or give it a"
    " depth_budget, begin halting later (schedule.halting_from) and raise the price slowly (schedule.act_warmup)",
    "ceiling": "nothing stops before the last step: raise act_weight, or lower the threshold, which needs no training",
    "between": "all tokens stop at the same step: supervise every loop (objective all or sampled) and read exits with"
    " an exit head, or lower act_weight",
}


def collapse(depths: np.ndarray, floor: int, full: int) -> dict[str, Any]:
    """Whether the depths [N] of tokens (floor..full steps) have lost their spread, and what to try.

    spread: standard deviation in steps; at_floor, at_full: shares of the tokens; collapsed: the spread is below 0.1
    or 95% of the tokens are at the floor; advice: a sentence, None when all is well. A floor that equals the full
    depth leaves nothing to decide and is not called collapsed.
    """
    at_floor, at_full = float((depths <= floor).mean()), float((depths >= full).mean())
    spread = float(depths.std())
    collapsed = floor < full and (spread < SPREAD or at_floor > SHARE)
    kind = "floor" if at_floor > 0.5 else "ceiling" if at_full > 0.5 else "between"
    return {
        "spread": round(spread, 3),
        "at_floor": round(at_floor, 4),
        "at_full": round(at_full, 4),
        "collapsed": collapsed,
        "advice": ADVICE[kind] if collapsed else None,
    }
