"""Evaluation on the logical inference task: accuracy, depth, MACs and seconds of a checkpoint at any threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from . import models  # noqa: F401 - registers the architectures
from .clock import now
from .data.logical_inference import RELATIONS, Pair, generate, label_id, protocol, swap
from .data.pairs import FIRST_RELATION, PairDataset
from .models.halting import RULES
from .recipe import Recipe, load_recipe

BATCH = 256
_MIRROR = [RELATIONS.index({"<": ">", ">": "<"}.get(one, one)) for one in RELATIONS]


@dataclass
class Loaded:
    """A checkpoint: model in evaluation mode, the recipe that trained it, where it lies, its tokenizer."""

    model: Any
    recipe: Recipe | None
    folder: Path
    tokenizer: Any = None


AUTO = {
    "classification": AutoModelForSequenceClassification,
    "text-to-text": AutoModelForSeq2SeqLM,
    "causal": AutoModelForCausalLM,
}


def load(checkpoint: str | Path, policy: str | None = None, trained: bool = True) -> Loaded:
    """Opens a folder made by `tenuto train`; one sentence when it is not one, or is of another config.

    policy: a depth policy without weights (`halting.RULES`, "fixed") to read the same model with. With `trained`
    false a language model that no recipe made (`tenuto convert`) will do as well.
    """
    folder = Path(checkpoint)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is not a checkpoint of `tenuto train`: it has no {name}.")
    file = folder / "recipe.yaml"
    if trained and not file.is_file():
        raise FileNotFoundError(
            f"{folder} is not a checkpoint of `tenuto train`: it has no recipe.yaml; of a converted model"
            " `tenuto evaluate` measures --tasks and --files."
        )
    recipe = load_recipe(file) if file.is_file() else None
    other = {}
    if policy is not None:
        if policy not in (*RULES, "fixed"):
            raise ValueError(
                f"policy {policy!r} has weights of its own; choose from fixed, {', '.join(RULES)}."
            )
        other = {"policy": policy, "act_weight": 0.0}
    head = "causal" if recipe is None else recipe.head
    # mismatched sizes are refused below, in one sentence
    model, notes = AUTO[head].from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **other
    )
    left = [name for name in notes["unexpected_keys"] if policy is None or ".policy." not in name]
    unfit = sorted(notes["missing_keys"]) + sorted(left)
    unfit += sorted(name for name, *_ in notes["mismatched_keys"])
    if unfit:
        raise ValueError(
            f"The weights in {folder} are of another config than its config.json: {len(unfit)} do not fit"
            f" ({', '.join(unfit[:3])})."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Loaded(model.eval().to(device), recipe, folder, AutoTokenizer.from_pretrained(folder))


def test_sets(recipe: Recipe, names: Sequence[str] = ()) -> dict[str, Sequence[Pair]]:
    """The protocol's test sets by name, "validation" among them; all tests when no names are given."""
    if recipe.data.sequences is not None or recipe.data.parallel is not None:
        raise ValueError(
            "This checkpoint was trained on data.sequences or data.parallel: `tenuto depths` has no groups for it;"
            " `tenuto report` shows its depths."
        )
    chosen = protocol(recipe.data.protocol)
    sets = {**chosen.test, "validation": chosen.validation}
    unknown = [name for name in names if name not in sets]
    if unknown:
        raise ValueError(
            f"The {recipe.data.protocol} protocol has no set {unknown[0]!r}; it has {', '.join(sets)}."
        )
    return {name: sets[name] for name in (names or chosen.test)}


@dataclass
class Prediction:
    """What the model said of N pairs, in their order, and what it cost.

    relations: [N] label indices, -1 where a text-to-text model answered with no relation. depths: one int array per
    pair, the steps of each source token. macs: all multiply-accumulates. seconds: of the forward passes.
    """

    relations: np.ndarray
    depths: list[np.ndarray]
    macs: int
    seconds: float

    def accuracy(self, pairs: Sequence[Pair]) -> float:
        """Percent right."""
        return 100 * float(np.mean(self.relations == np.array([label_id(one.relation) for one in pairs])))

    @property
    def mean_steps(self) -> float:
        """Steps per source token."""
        return float(np.concatenate(self.depths).mean())


def full_depth(model) -> int:
    """Steps of the (encoder's) stack when nobody stops."""
    config = model.config
    return getattr(config, "num_loops", config.num_hidden_layers)


@torch.inference_mode()
def predict(
    loaded: Loaded,
    pairs: Sequence[Pair],
    progress: str | None = None,
    both_ways: bool = False,
    **knobs,
) -> Prediction:
    """Runs the model over pairs, those of like length together; `knobs` are threshold, min_steps, max_steps.

    both_ways (classifiers only): each pair is read a second time with its sentences exchanged, and the two
    log-probabilities of each relation (`<` of one is `>` of the other) are added. It costs twice as much.
    """
    data = PairDataset(pairs, loaded.recipe.head)
    if both_ways and data.text:
        raise ValueError("both_ways needs a classifier; this checkpoint answers in text.")
    exchanged = PairDataset([swap(one) for one in pairs], loaded.recipe.head) if both_ways else None
    order = np.argsort(data.lengths, kind="stable")
    relations, depths = np.zeros(len(pairs), int), [None] * len(pairs)
    macs, seconds = 0, 0.0
    starts = range(0, len(pairs), BATCH)
    bar = Console(stderr=True)
    hidden = progress is None or not bar.is_terminal
    for start in track(starts, progress or "", console=bar, transient=True, disable=hidden):
        places = order[start : start + BATCH]
        batch = question(loaded, data, places)
        before = now(loaded.model.device)
        out = loaded.model(**batch, **knobs)
        seconds += now(loaded.model.device) - before
        macs += out.compute.total
        scores = out.logits
        if exchanged is not None:
            batch = question(loaded, exchanged, places)
            before = now(loaded.model.device)
            mirrored = loaded.model(**batch, **knobs)
            seconds += now(loaded.model.device) - before
            macs += mirrored.compute.total
            scores = scores.log_softmax(-1) + mirrored.logits.log_softmax(-1)[:, _MIRROR]
        answer = scores.argmax(-1)
        if data.text:
            answer = answer[:, 0] - FIRST_RELATION
            answer = torch.where((answer >= 0) & (answer < len(RELATIONS)), answer, -1)
        relations[places] = answer.cpu().numpy()
        for place, row, mask in zip(places, out.depths.cpu(), batch["attention_mask"].cpu(), strict=True):
            depths[place] = row[mask.bool()].numpy()
    return Prediction(relations, depths, macs, seconds)


def question(loaded: Loaded, data: PairDataset, places: Sequence[int]) -> dict[str, torch.Tensor]:
    """The pairs at `places` as inputs of the model, without their answers."""
    batch = data.collate([data[int(place)] for place in places])
    labels = batch.pop("labels")
    if data.text:
        batch["decoder_input_ids"] = torch.full_like(labels, loaded.model.config.bos_token_id)
    return {name: value.to(loaded.model.device) for name, value in batch.items()}


def evaluate(
    checkpoint: str | Path,
    names: Sequence[str] = (),
    errors: bool = False,
    both_ways: bool = False,
    **knobs,
) -> dict[str, Any]:
    """Accuracy (percent) by set beside the always-`#` rate, mean steps, MACs per pair, seconds.

    With `errors`, `errors_of` each set as well.
    """
    from .data.logical_inference import majority_rate

    loaded = load(checkpoint)
    figures: dict[str, Any] = {
        name: {} for name in ("accuracy", "majority", "pairs", "mean_steps", "macs_per_pair", "seconds")
    }
    figures["both_ways"] = both_ways
    figures["full_depth"] = full_depth(loaded.model)
    figures["parameters"] = sum(p.numel() for p in loaded.model.parameters())
    for name, pairs in test_sets(loaded.recipe, names).items():
        said = predict(loaded, pairs, f"set {name}", both_ways, **knobs)
        figures["accuracy"][name] = round(said.accuracy(pairs), 2)
        figures["majority"][name] = round(100 * majority_rate(pairs), 2)
        figures["pairs"][name] = len(pairs)
        figures["mean_steps"][name] = round(said.mean_steps, 3)
        figures["macs_per_pair"][name] = said.macs // len(pairs)
        figures["seconds"][name] = round(said.seconds, 2)
        if errors:
            figures.setdefault("errors", {})[name] = errors_of(pairs, said)
    return figures


def errors_of(pairs: Sequence[Pair], said: Prediction) -> dict[str, Any]:
    """The breakdown by true relation, operators, formula depth, negation and negated operands; a text-to-text model
    may answer with no relation at all ("unanswered").
    """
    from .data.logical_inference import breakdown

    answered = np.flatnonzero(said.relations >= 0)
    return {
        **breakdown([pairs[place] for place in answered], said.relations[answered].tolist()),
        "unanswered": len(pairs) - len(answered),
    }


def sweep(
    checkpoint: str | Path,
    thresholds: Sequence[float],
    names: Sequence[str] = (),
    generated: int = 0,
    repeats: int = 3,
) -> dict[str, Any]:
    """The knob on test sets, and on `generated` pairs of the exact generator (7 to 19 operators) as well."""
    loaded = load(checkpoint)
    if getattr(loaded.model.config, "policy", "fixed") == "fixed":
        raise ValueError(f"{loaded.folder} has a fixed depth; the knob needs policy stick_breaking.")
    sets = test_sets(loaded.recipe, names)
    if generated:
        sets["generated"] = generate(generated, seed=1, min_operators=7)
    figures = knob(loaded, sets, thresholds, repeats)
    return {"accuracy": figures["rows"][0]["accuracy_by_set"], **figures}


def knob(
    loaded: Loaded, sets: dict[str, Sequence[Pair]], thresholds: Sequence[float], repeats: int
) -> dict[str, Any]:
    """For each threshold the share of token-steps skipped, MACs per pair, seconds and accuracy.

    The first row is threshold 1: nobody stops, the states mix as in training. Every setting is timed `repeats`
    times, turn by turn, and the fastest counts. Differences of accuracy are paired: right or wrong on the same
    pairs as at full depth, in points, with a 95% bootstrap interval.
    """
    full, settings = full_depth(loaded.model), [1.0, *thresholds]
    pairs = [one for group in sets.values() for one in group]
    owner = np.repeat(list(sets), [len(group) for group in sets.values()])
    said: list[list[Prediction]] = [[] for _ in settings]
    for turn in range(repeats):
        for runs, threshold in zip(said, settings, strict=True):
            title = f"knob, turn {turn + 1} of {repeats}, threshold {threshold:g}"
            runs.append(predict(loaded, pairs, progress=title, threshold=threshold))
    base, rows = said[0][0], []
    fastest = [min(run.seconds for run in runs) for runs in said]
    labels = np.array([label_id(pair.relation) for pair in pairs])
    random = np.random.default_rng(0)
    for (one, *_), threshold, seconds in zip(said, settings, fastest, strict=True):
        right = one.relations == labels
        change = 100 * (right.astype(float) - (base.relations == labels))
        drawn = random.integers(len(pairs), size=(500, len(pairs)))
        interval = np.percentile(change[drawn].mean(1), [2.5, 97.5])
        rows.append(
            {
                "threshold": threshold,
                "steps": round(one.mean_steps, 3),
                "steps_skipped": round(100 * (1 - one.mean_steps / full), 2),
                "macs_per_pair": one.macs // len(pairs),
                "macs_share": round(one.macs / base.macs, 4),
                "seconds": round(seconds, 3),
                "seconds_share": round(seconds / fastest[0], 4),
                "accuracy": round(100 * right.mean(), 2),
                "accuracy_by_set": {name: round(100 * right[owner == name].mean(), 2) for name in sets},
                "difference": round(change.mean(), 2),
                "difference_interval": interval.round(2).tolist(),
            }
        )
    return {"pairs": len(pairs), "full_depth": full, "rows": rows}
