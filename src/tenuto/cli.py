"""The command line: parses the words, runs a verb, prints its answer or one sentence on what went wrong."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from . import verbs
from .verbs.making import PRINT_CONFIG
from .verbs.shared import SELECTIONS, UsageError


class _Help(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the examples."""


def _search(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--beams", type=int, help="of answers and translations; 1, the likeliest token always"
    )
    parser.add_argument(
        "--length_penalty", type=float, help="power of the length that beams' scores are divided by"
    )


def _parser() -> ArgumentParser:
    from . import __version__

    parser = ArgumentParser(
        prog="tenuto",
        description="Transformers that decide, token by token, how deep, how wide and when to compute.",
        epilog="example:\n  tenuto train recipes/demo.yaml --output runs/first",
        formatter_class=_Help,
        version=__version__,
    )
    group = parser.add_subcommands(dest="verb", metavar="VERB")

    def add(verb: Callable, example: str, *options: str) -> ArgumentParser:
        """A verb with those of the shared options that it takes."""
        epilog = f"example:\n  tenuto {verb.__name__} {example}"
        one = ArgumentParser(description=verb.__doc__, epilog=epilog, formatter_class=_Help)
        if "checkpoint" in options:
            one.add_argument("checkpoint", help="a folder made by `tenuto train`")
        if "sets" in options:
            one.add_argument("--sets", help="such as 7,8 or validation; all test sets when left out")
        if "knobs" in options:
            one.add_argument(
                "--threshold",
                type=float,
                help="halting mass at which a token stops, 0..1; of a routed model the score that a layer asks for",
            )
            one.add_argument("--min_steps", type=int, help="steps that every token runs")
            one.add_argument("--max_steps", type=int, help="steps that no token exceeds")
        if "knobs" in options or "routing" in options:
            one.add_argument(
                "--capacity", type=float, help="of a routed model: share of tokens that its layers take"
            )
            one.add_argument("--selection", help=f"of a routed model: {', '.join(SELECTIONS)}")
        if "result" in options:
            one.add_argument("--result", help="write a result file (JSON) here as well")
        one.add_argument(
            "--json", action="store_true", help="one JSON document on stdout, nothing else there"
        )
        one.add_argument("--debug", action="store_true", help="the whole traceback when something fails")
        group.add_subcommand(verb.__name__, one, help=verb.__doc__)
        return one

    one = add(verbs.train, "recipes/demo.yaml --output runs/first --training.seed=1", "result")
    one.add_argument("recipe", help="a YAML file; `--KEY.SUB=VALUE` changes single keys of it")
    one.add_argument("--output", help="folder for the model, its logs and checkpoints")
    one.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    one.add_argument(PRINT_CONFIG, action="store_true", help="print the recipe as it would run, and stop")
    one = add(verbs.prepare, "wmt14 --input FOLDER --output data/wmt14")
    one.add_argument("corpus", help="wmt14")
    one.add_argument(
        "--input",
        help="folder with the published files, unpacked, plain or .gz; or hf:wmt/wmt14, read with `datasets`"
        " (fetched only with HF_HUB_OFFLINE=0)",
    )
    one.add_argument("--vocab_size", type=int, help="tokens of the joint BPE (37200)")
    one.add_argument("--output", help="folder for training, validation and test files and the tokenizer")
    one = add(verbs.convert, "models/smollm2 --to looped --prelude 4 --coda 4 --loops 2 --output runs/looped")
    one.add_argument("source", help="a folder with a pretrained model of transformers, or a GGUF file")
    one.add_argument("--to", help="looped, sdt, stt or mod")
    one.add_argument("--output", help="folder for the converted model and its tokenizer")
    one.add_argument("--gguf", help="the name of the GGUF file in the folder")
    one.add_argument("--prelude", type=int, help="first layers, run once (looped; 1)")
    one.add_argument("--coda", type=int, help="last layers, run once (looped; 1)")
    one.add_argument("--loops", type=int, help="of the layers between (looped; 1)")
    one.add_argument("--injection", help="what a loop reads of the prelude: none, add, ... (looped; none)")
    one.add_argument(
        "--routed", help="layers with a router, separated by commas (sdt, stt, mod; every odd one)"
    )
    one.add_argument("--seed", type=int, default=0, help="of the parameters that the source lacks")
    example = "runs/first --sets 7,8 --threshold 0.9"
    one = add(verbs.evaluate, example, "checkpoint", "sets", "knobs", "result")
    one.add_argument("--errors", action="store_true", help="by relation, operators, depth and negation too")
    one.add_argument(
        "--both_ways", action="store_true", help="read each pair in both orders as well, at twice the cost"
    )
    one.add_argument("--policy", help="read a language model with another rule: fixed, latent, margin, ...")
    one.add_argument("--tasks", help="of the evaluation harness, for language models: blimp, mmlu")
    one.add_argument("--thresholds", help="of the tasks: the knob, separated by commas")
    one.add_argument("--capacities", help="of the tasks or files, for routed models, separated by commas")
    one.add_argument("--subjects", help="of mmlu, separated by commas; all when left out")
    one.add_argument("--files", help="text or code to measure the perplexity of, separated by commas")
    one.add_argument("--limit", type=int, help="items of each task or set")
    _search(one)
    one.add_argument("--outputs", help="folder to write the answers or translations to, a file for each set")
    one = add(verbs.translate, "runs/translation --beams 4 < english.txt", "checkpoint", "knobs")
    _search(one)
    one.add_argument(
        "--max_length", type=int, help="tokens written at most; a little over twice the source's"
    )
    one = add(verbs.sweep, "runs/first --thresholds 0.99,0.9,0.5", "checkpoint", "result")
    one.add_argument(
        "--sets",
        help="all test sets when left out; of a text-to-text model's the validation part, and a+b is two together",
    )
    one.add_argument("--thresholds", default="0.999,0.99,0.9,0.7,0.5,0.3,0.1", help="separated by commas")
    one.add_argument("--capacities", help="of a routed model (mod, sdt, stt), instead: separated by commas")
    one.add_argument("--generated", type=int, default=0, help="add so many pairs of the exact generator")
    one.add_argument("--repeats", type=int, default=3, help="times each setting is timed; the fastest counts")
    one.add_argument("--policy", help="read a language model with another rule: latent, margin, ...")
    one.add_argument(
        "--limit", type=int, help="rows of held-out text, or examples of each set that is written to"
    )
    _search(one)
    one = add(verbs.depths, "runs/first --sets 12", "checkpoint", "sets", "knobs", "result")
    one.add_argument("--policy", help="read a language model with another rule: latent, margin, ...")
    one.add_argument("--rules", action="store_true", help="compare every exit rule with the oracle as well")
    one.add_argument("--limit", type=int, help="rows of a language model's held-out text")
    one.add_argument("--picture", help="write a picture (.svg, .png) of a language model's depths here")
    one = add(verbs.calibrate, "runs/lm --max_loss 0.5 --save", "checkpoint", "result")
    one.add_argument(
        "--max_loss", type=float, help="percent above the loss of full depth, or of the dense model"
    )
    one.add_argument("--max_steps", type=float, help="percent of full depth's token-steps")
    one.add_argument("--limit", type=int, help="rows of held-out text")
    one.add_argument(
        "--save", action="store_true", help="write the threshold, or capacity, into the checkpoint's config"
    )
    one.add_argument("--files", help="of a routed model: text to set its levels from, separated by commas")
    one = add(verbs.generate, 'runs/lm --prompt "It was" --threshold 0.5', "checkpoint", "routing")
    one.add_argument("--prompt", default="", help="the beginning of the text")
    one.add_argument("--tokens", type=int, default=80, help="how many to write")
    one.add_argument(
        "--threshold", type=float, help="the depth knob of this call, 0..1; of a routed model a score"
    )
    one.add_argument("--seed", type=int, default=0, help="of the sampling")
    one.add_argument("--greedy", action="store_true", help="take the likeliest token always")
    one.add_argument("--policy", help="read the model with another rule: latent, margin, ...")
    one = add(verbs.average, "runs/first --best 5 --output runs/first-mean")
    one.add_argument("checkpoints", nargs="+", help="folders of one config; with --best, one run's folder")
    one.add_argument(
        "--best", type=int, help="take so many checkpoints of the run, by exact match or validation loss"
    )
    one.add_argument("--output", help="folder for the averaged model")
    one = add(verbs.experts, "runs/first --sets validation", "checkpoint", "result")
    one.add_argument(
        "--sets", help="all test sets when left out; of a text-to-text model's the validation part"
    )
    one.add_argument("--limit", type=int, default=2000, help="pairs looked at")
    one.add_argument("--picture", help="write a picture (.svg, .png) of the experts' tokens here")
    one = add(verbs.matrix, "recipes/lm/matrix.yaml --output runs/matrix", "result")
    one.add_argument("matrix", help="a YAML file that names bodies, policies and seeds")
    one.add_argument("--output", default="runs/matrix", help="folder of the cells, the table and the picture")
    one.add_argument("--only", help="run the cells of this name now (* and ? allowed)")
    one = add(verbs.compare, "recipes/routed/stories.yaml --output runs/stories", "result")
    one.add_argument(
        "plan",
        help="a YAML file: base recipe, rows, seeds; `--KEY.SUB=VALUE` changes keys of every row's recipe",
    )
    one.add_argument("--output", default="runs/compare", help="folder of the models and the table")
    one.add_argument("--only", help="run the models of this name now (* and ? allowed)")
    one = add(verbs.isoflops, "recipes/lm/isoflops.yaml --output runs/isoflops", "result")
    one.add_argument("plan", help="a YAML file that names the looped model's recipe, widths and loops")
    one.add_argument("--output", default="runs/isoflops", help="folder of the models and the table")
    one.add_argument("--only", help="run the models of this name now (* and ? allowed)")
    one = add(verbs.presets, "--json")
    one.add_argument("--memory", action="store_true", help="training memory of the language models instead")
    one = add(verbs.report, "runs/first -o first.html", "checkpoint")
    one.add_argument("-o", "--output", help="the file; report.html in the checkpoint when left out")
    one.add_argument(
        "--limit", type=int, default=500, help="pairs of each test set, or rows of text, looked at"
    )
    one = add(verbs.demo, "--output demo")
    one.add_argument("--checkpoint", default="checkpoints/logic-sut", help="the longer-trained model")
    one.add_argument("--language", default="checkpoints/lm-demo", help="the language model of the second act")
    one.add_argument("--output", default="demo", help="folder of the demo, made anew by each run")
    one.add_argument("--recipe", default="recipes/demo.yaml", help="what is trained live")
    return parser


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Takes the recipe's keys, `--KEY[.SUB]=VALUE` or with a blank, out of the words of `tenuto train` and `compare`.

    --print_config goes with them: jsonargparse would take it for its own.
    """
    own = {"--output", "--result", "--json", "--debug", "--help"}
    own |= {"--resume"} if words[0] == "train" else {"--only"}
    kept, overrides, waiting = [], [], False
    for word in words:
        if waiting and not word.startswith("--"):
            overrides[-1] += f"={word}"
            waiting = False
        elif word.startswith("--") and word.split("=", 1)[0] not in own:
            overrides.append(word)
            waiting = "=" not in word and word != PRINT_CONFIG
        else:
            kept.append(word)
            waiting = False
    return kept, overrides


def _sentence(error: Exception) -> str:
    """The last sentence of an error's text; with the kind of error when tenuto did not word it."""
    text = str(error).strip()
    if "alidation" in type(error).__name__ and "\n" in text:
        text = text.splitlines()[-1].strip()
        for name in ("ValueError: ", "TypeError: "):
            text = text.removeprefix(name)
    text = " ".join(text.split())
    known = isinstance(error, ValueError | FileNotFoundError | FileExistsError)
    known |= type(error).__module__.startswith("tenuto") or "alidation" in type(error).__name__
    return text if known else f"{type(error).__name__}: {text} (--debug shows where)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0, 1 (failed, one sentence on stderr), 2 (usage)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # set before torch and transformers are imported: nothing is fetched, and idle threads do not spin
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    command = shlex.join(["tenuto", *words])
    words, overrides = _split(words) if words[:1] in (["train"], ["compare"]) else (words, [])
    try:
        parsed = _parser().parse_args(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    options = parsed[parsed.verb]
    options.command, options.overrides = command, overrides
    try:
        # libraries print: only the answer belongs on stdout
        with redirect_stdout(sys.stderr):
            figures, show = getattr(verbs, parsed.verb)(options)
        if options.json:
            print(json.dumps(figures, indent=1))
        else:
            show()
    except UsageError as error:
        print(f"tenuto: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tenuto: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if options.debug:
            raise
        print(f"tenuto: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
