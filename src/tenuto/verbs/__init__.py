"""The verbs of the command line: each returns its figures for --json, and what prints them as tables.

Heavy imports happen inside the verbs, so that --help answers at once.
"""

from .language import generate
from .making import average, convert, prepare, train
from .measuring import calibrate, depths, evaluate, experts, sweep
from .plans import compare, isoflops, matrix
from .sequences import translate
from .showing import demo, presets, report

__all__ = [
    "average",
    "calibrate",
    "compare",
    "convert",
    "demo",
    "depths",
    "evaluate",
    "experts",
    "generate",
    "isoflops",
    "matrix",
    "prepare",
    "presets",
    "report",
    "sweep",
    "train",
    "translate",
]
