"""Recipes: one commented YAML file says what is trained on what, and how. Flags override single keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .data.parallel import Corpus
from .data.text_documents import Source


@dataclass
class Text:
    """Text for a causal language model.

    sources: where it comes from, see `Source`. tokenizer: "byte", "bpe" (trained on the training part, `vocab_size`
    tokens) or a folder of any Hugging Face tokenizer; the model's vocab_size is the tokenizer's. length: tokens of a
    row, filled with documents; attention does not cross from one to the next. mix: shares of the topics by name, all
    alike when left out. validation_rows: how many rows of the held-out part are evaluated, topics in turn.
    cache: a folder that keeps the tokenised text.
    """

    sources: list[Source]
    tokenizer: str = "byte"
    vocab_size: int = 4096
    length: int = 256
    mix: dict[str, float] | None = None
    validation_rows: int = 256
    cache: str | None = None


@dataclass
class Algorithmic:
    """Problems with a known need of depth: "arithmetic", "listops", "lookup" or "lookup-backward".

    train: how many are made; train_depths, test_depths: their depths, the published ones when left out.
    """

    task: str
    train: int = 50_000
    train_depths: list[int] | None = None
    test_depths: list[int] | None = None


@dataclass
class Sequences:
    """Compositional tasks, words to words: "scan", "cogs", "pcfg", "listops" or "cfq".

    split: the task's first when left out, see `sequences.SPLITS`. path: the folder of a copy; SCAN and COGS are
    shipped, ListOps is generated. train: at most so many training examples. max_length: training and validation
    examples with more words on a side are left out. batch_tokens: see `Parallel`; without it a batch is
    training.per_device_train_batch_size examples.
    """

    task: Literal["scan", "cogs", "pcfg", "listops", "cfq"]
    split: str | None = None
    path: str | None = None
    train: int | None = None
    max_length: int | None = None
    batch_tokens: int | None = None


@dataclass
class Parallel:
    """Sentence pairs for translation.

    train, validation: corpora, see `Corpus`; test: corpora by name. folder: where their files are looked for.
    tokenizer: "bpe" (byte-level, both languages together, trained on the training part, `vocab_size` tokens) or a
    folder with one. max_length, max_ratio: training and validation pairs with more tokens on a side, or with so many
    times as many on one side as on the other, are left out. batch_tokens: tokens of a batch (pairs x the longest of
    their sequences, on one side), and then training.per_device_train_batch_size is 1. cache: a folder that keeps the
    tokenizer and the tokenised text.
    """

    train: list[Corpus]
    validation: list[Corpus]
    test: dict[str, Corpus] = field(default_factory=dict)
    folder: str = "."
    tokenizer: str = "bpe"
    vocab_size: int = 8000
    max_length: int | None = None
    max_ratio: float | None = None
    batch_tokens: int | None = 4096
    cache: str | None = None


@dataclass
class Data:
    """What is trained on: the logical inference task, or the one of `text`, `algorithmic`, `sequences` and `parallel`
    that is given.

    protocol: "length" (train on <= 6 operators, test 7..12) or the systematic splits "A", "B", "C".
    max_operators: leave out training pairs with more. swap, rename: augmentations of every training pair drawn,
    exchanging the sentences (and `<` with `>`) with probability 1/2, and permuting the six variable names.
    """

    protocol: Literal["length", "A", "B", "C"] = "length"
    max_operators: int = 6
    swap: bool = False
    rename: bool = False
    text: Text | None = None
    algorithmic: Algorithmic | None = None
    sequences: Sequences | None = None
    parallel: Parallel | None = None


@dataclass
class Schedule:
    """What changes during training, as shares of it (0..1).

    operators_from, operators_until: the curriculum admits pairs of `operators_from` operators (problems of that
    depth) at first and all of them from the share `operators_until` on, rising evenly. halting_from: until then every
    token runs every step; an exit head learns from then on, at a rate that falls evenly from the whole one to 0 over
    that phase, whatever the schedule of the others. act_warmup: the share over which the weight of L_ACT rises from 0,
    counted from halting_from.
    """

    operators_from: int = 2
    operators_until: float = 0.0
    halting_from: float = 0.0
    act_warmup: float = 0.0


@dataclass
class Recipe:
    """A training run.

    preset: name of the starting configuration; config: fields of it to change. Without a preset the configuration is
    that of the checkpoint `start`. head: "classification" or "text-to-text" (one answer token) of logical inference,
    "text-to-text" of sequences and parallel text, "causal" of text and algorithmic data. start: a checkpoint whose
    weights to begin with (parameters that it lacks must be of halting nets or routers). convert: takes `start` for a
    pretrained model of transformers and says what to make of it, {to: sdt}, as `tenuto convert` does. training: any
    argument of transformers' TrainingArguments; max_steps is required. learning_rates: AdamW's rate for parameters
    whose name holds a pattern, as {".surprise.": 1e-2, ".routers.": 1e-3}; the first that fits counts. lora: PEFT's
    settings, {r: 16, lora_alpha: 32}: the blocks get adapters, merged at the end, all else but routers and halting
    nets stays.
    """

    preset: str | None = None
    head: Literal["classification", "text-to-text", "causal"] = "classification"
    config: dict[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    schedule: Schedule = field(default_factory=Schedule)
    start: str | None = None
    convert: dict[str, Any] = field(default_factory=dict)
    muon_learning_rate: float = 0.0
    learning_rates: dict[str, float] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the recipe as `recipe.yaml` beside a checkpoint."""
        import yaml

        (folder / "recipe.yaml").write_text(yaml.safe_dump(asdict(self), sort_keys=False))


def keys_of(path: Path) -> set[str]:
    """The names at the top of a YAML file; none of a file that holds something else."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        return set()
    return set(map(str, values)) if isinstance(values, dict) else set()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe; `overrides` are flags such as `--training.seed=1` or `--config.hidden_size=96`.

    FileNotFoundError or ValueError with one sentence when the file or a key is wrong.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no recipe {path}.")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--recipe", action="config")
    parser.add_class_arguments(Recipe)
    try:
        values = parser.instantiate(parser.parse_args([f"--recipe={path}", *overrides])).as_dict()
    except ArgumentError as error:
        if "base" in keys_of(path):
            raise ValueError(
                f"{path} is a plan of several models, not a recipe; its comment says how to run it."
            ) from error
        raise ValueError(f"{path}: {error}") from error
    values.pop("recipe")
    recipe = Recipe(**values)
    # YAML reads `no` as false, and it is what transformers calls "never" here
    recipe.training = {
        name: "no" if value is False and name.endswith("_strategy") else value
        for name, value in recipe.training.items()
    }
    data = recipe.data
    kinds = ("text", "algorithmic", "sequences", "parallel")
    given = [name for name in kinds if getattr(data, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{path}: data.{given[0]} and data.{given[1]} are two tasks; give one of them.")
    if (recipe.head == "causal") != (given in (["text"], ["algorithmic"])):
        raise ValueError(
            f'{path}: head "causal" goes with data.text or data.algorithmic, the others with neither.'
        )
    if given in (["sequences"], ["parallel"]):
        if recipe.head != "text-to-text":
            raise ValueError(f'{path}: data.{given[0]} goes with head "text-to-text".')
        tokens = getattr(data, given[0]).batch_tokens
        if tokens is not None and recipe.training.get("per_device_train_batch_size") != 1:
            raise ValueError(
                f"{path}: data.{given[0]}.batch_tokens makes the batches: set"
                " training.per_device_train_batch_size: 1, or batch_tokens: null."
            )
    if recipe.preset is None and recipe.start is None:
        raise ValueError(f"{path}: give preset, or start, a checkpoint whose configuration it is.")
    if recipe.convert and (recipe.preset is not None or recipe.start is None or "to" not in recipe.convert):
        raise ValueError(
            f"{path}: convert goes with start and without preset, and says `to` what, as {{to: sdt}}."
        )
    if "max_steps" not in recipe.training:
        raise ValueError(f"{path}: training.max_steps is missing; it says how long to train.")
    return recipe
