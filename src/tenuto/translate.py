"""Text-to-text checkpoints: answers of compositional tasks and translations, their quality, depth, MACs and seconds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from .answers import inputs_of, written
from .clock import now
from .data import parallel, sequences
from .data.sequences_batches import UNK, Ragged, padded
from .evaluate import Loaded, full_depth, load

BATCH = 64


@dataclass
class Said:
    """What the model wrote for N sources, in their order, and what it cost.

    texts: decoded, without <eos>. ids: of each, with it. finished: [N] bool, whether <eos> came within the limit.
    encoder_depths: one int array per source, the steps of each token; decoder_depths: the same of what was written,
    <eos> included. macs: of one pass over source and output, attention as the pairs that the mask lets through,
    which is what a cached decoder computes for one beam (and the keys of padding beside longer sources).
    tokens: of both. seconds: of the search.
    """

    texts: list[str]
    ids: list[list[int]]
    finished: np.ndarray
    encoder_depths: list[np.ndarray]
    decoder_depths: list[np.ndarray]
    macs: int
    tokens: int
    seconds: float

    def costs(self) -> dict[str, float]:
        """Mean steps of a token on each side, MACs per token, seconds, and tokens read and written in one of them."""
        return {
            "encoder_depth": round(float(np.concatenate(self.encoder_depths).mean()), 3),
            "decoder_depth": round(float(np.concatenate(self.decoder_depths).mean()), 3),
            "macs_per_token": self.macs // self.tokens,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.tokens / self.seconds),
        }


@torch.inference_mode()
def write(
    loaded: Loaded,
    lines: Sequence[str],
    beams: int = 1,
    length_penalty: float = 1.0,
    max_length: int | Sequence[int] | None = None,
    progress: str | None = None,
    batch: int = BATCH,
    **knobs,
) -> Said:
    """The model's answer to each line, lines of like length together; `knobs` are the depth knobs of a forward.

    beams: 1 takes the likeliest token always. length_penalty: a beam's log-probability is divided by its length to this
    power. max_length: tokens written at most, of all lines or of each; 10 more than twice the source's when left out.
    ValueError if a line is empty or beams is below 1.
    """
    if beams < 1:
        raise ValueError(f"beams={beams} must be at least 1.")
    model, words = loaded.model, loaded.tokenizer
    sources = parallel.encode_lines(lines, words)
    if len(sources) and sources.lengths.min() < 2:
        raise ValueError(f"Line {int(sources.lengths.argmin()) + 1} is empty: there is nothing to read.")
    texts, finished = [""] * len(lines), np.zeros(len(lines), bool)
    answers, *depths = ([None] * len(lines) for _ in range(3))
    macs, tokens, seconds = 0, 0, 0.0
    order = np.argsort(sources.lengths, kind="stable")
    limits = None if max_length is None else np.broadcast_to(max_length, len(lines))
    bar = Console(stderr=True)
    hidden = progress is None or not bar.is_terminal
    starts = range(0, len(lines), batch)
    for start in track(starts, progress or "", console=bar, transient=True, disable=hidden):
        places = order[start : start + batch]
        inputs = inputs_of(_rows(sources.take(places)), model.device)
        limit = 2 * inputs["input_ids"].shape[1] + 10 if limits is None else int(limits[places].max())
        before = now(model.device)
        said = written(model, inputs, limit, num_beams=beams, length_penalty=length_penalty, **knobs)
        seconds += now(model.device) - before
        if limits is not None:
            said = [ids[:most] for ids, most in zip(said, limits[places].tolist(), strict=True)]
        labels, count = padded(said, -100).to(model.device), sum(map(len, said))
        # with a cache, whose keys of every depth a decoder must write, though no later token may read them
        pass_over = model(**inputs, labels=labels, use_cache=model.decoder.cached, **knobs)
        # the pass reads words out where a line of the batch has ended, too; a decoder of this line alone does not
        macs += pass_over.compute.total_causal - (labels.numel() - count) * model.lm_head.weight.numel()
        tokens += int(inputs["attention_mask"].sum()) + count
        for row, place in enumerate(places):
            ids = answers[place] = said[row]
            finished[place] = ids[-1] == model.config.eos_token_id
            # a model of bytes may write an end of line; an answer is one line
            texts[place] = words.decode(ids[: len(ids) - finished[place]]).replace("\n", " ")
            depths[0][place] = pass_over.depths[row, : sources.lengths[place]].cpu().numpy()
            depths[1][place] = pass_over.decoder_depths[row, : len(ids)].cpu().numpy()
    return Said(texts, answers, finished, *depths, macs, tokens, seconds)


def _rows(sequences: Ragged) -> list[np.ndarray]:
    return [sequences[place] for place in range(len(sequences))]


def split_compounds(line: str) -> str:
    """A line tokenised as 13a, hyphens between letters apart: `rich-text` becomes `rich ##AT##-##AT## text`."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", Tokenizer13a()(line))


def bleu(said: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """SacreBLEU of detokenised text, and tokenised BLEU after splitting compounds; each with its signature.

    The latter is what older papers report; they tokenise with Moses' script where this does as 13a.
    """
    metric, split = _metric(), _metric(tokenize="none", force=True)
    whole = metric.corpus_score(list(said), [list(references)])
    apart = split.corpus_score(*_apart(said, references))
    return {
        "bleu": round(whole.score, 2),
        "signature": str(metric.get_signature()),
        "split_bleu": round(apart.score, 2),
        "split_signature": f"{split.get_signature()} after 13a and ##AT##-##AT##",
    }


def _metric(**options):
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ImportError("BLEU needs the package sacrebleu: install tenuto[eval].") from None
    return BLEU(**options)


def _apart(said: Sequence[str], references: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    return list(map(split_compounds, said)), [list(map(split_compounds, references))]


def paired_bootstrap(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[str],
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """BLEU of two outputs on the same references, and the difference (second - first) with its 95% interval.

    Sentences are drawn with replacement, the same ones for both (Koehn 2004). p: the share of the samples, two-sided,
    on the other side of zero. ValueError if the numbers of sentences differ.
    """
    return paired_bootstrap_of_runs([first], [second], references, samples, seed)


def paired_bootstrap_of_runs(
    firsts: Sequence[Sequence[str]],
    seconds: Sequence[Sequence[str]],
    references: Sequence[str],
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """`paired_bootstrap` of two systems with several outputs each, as of several trainings: a sentence is drawn with
    all its outputs, and BLEU is that of a system's outputs one after another.
    """
    for said in (*firsts, *seconds):
        if not len(said) == len(references) > 0:
            raise ValueError(
                f"An output has {len(said)} sentences, the references {len(references)}: they must be alike, and one"
                " at least."
            )
    metric = _metric(effective_order=False)
    counts = [sum(_counts(metric, said, references) for said in outputs) for outputs in (firsts, seconds)]
    draws = np.random.default_rng(seed)
    whole = [_score(metric, one.sum(0)) for one in counts]
    differences = []
    for _ in range(samples):
        chosen = draws.integers(len(references), size=len(references))
        differences.append(
            _score(metric, counts[1][chosen].sum(0)) - _score(metric, counts[0][chosen].sum(0))
        )
    return {**_resampled(*whole, np.array(differences)), "signature": str(metric.get_signature())}


def paired_exact(first: np.ndarray, second: np.ndarray, samples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """`paired_bootstrap` for two outcomes [N] bool, right or wrong, of the same examples: percent and points.

    [R, N] of R trainings: an example is drawn with all its outcomes. ValueError if the shapes differ.
    """
    first, second = np.atleast_2d(first), np.atleast_2d(second)
    if first.shape != second.shape or not first.size:
        raise ValueError(
            f"The outcomes are of {first.shape[1]} and {second.shape[1]} examples, from {len(first)} and"
            f" {len(second)} trainings: as many, and one at least."
        )
    runs, change = len(first), second.astype(int).sum(0) - first.astype(int).sum(0)
    # to draw examples with replacement is to draw how many of them gain, or lose, so many right answers
    counts = np.bincount(change + runs, minlength=2 * runs + 1)
    drawn = np.random.default_rng(seed).multinomial(len(change), counts / len(change), size=samples)
    differences = 100 * (drawn @ np.arange(-runs, runs + 1)) / (runs * len(change))
    return _resampled(100 * float(first.mean()), 100 * float(second.mean()), differences)


def _resampled(first: float, second: float, differences: np.ndarray) -> dict[str, Any]:
    beyond = min(np.mean(differences <= 0), np.mean(differences >= 0))
    return {
        "first": round(first, 2),
        "second": round(second, 2),
        "difference": round(second - first, 2),
        "interval": np.percentile(differences, [2.5, 97.5]).round(2).tolist(),
        "p": round(min(1.0, 2 * float(beyond)), 4),
        "samples": len(differences),
    }


def _counts(metric, said: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """[N, 2 x 4 + 2]: n-grams right, n-grams, and the lengths of output and reference, of each sentence."""
    rows = []
    for one, reference in zip(said, references, strict=True):
        score = metric.corpus_score([one], [[reference]])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return np.array(rows)


def _score(metric, row: np.ndarray) -> float:
    order = metric.max_ngram_order
    right, all_of, (ours, theirs) = row[:order], row[order : 2 * order], row[2 * order :]
    return metric.compute_bleu(right.tolist(), all_of.tolist(), int(ours), int(theirs), "exp").score


def evaluate_pairs(
    checkpoint: str | Path,
    names: Sequence[str] = (),
    beams: int = 1,
    length_penalty: float = 1.0,
    limit: int | None = None,
    outputs: str | Path | None = None,
    **knobs,
) -> dict[str, Any]:
    """Figures of a text-to-text checkpoint by test set: `names`, or all of its task's but "validation".

    Compositional tasks: exact match (percent) beside the commonest training target (majority) and the source (copy) as
    answers, and by kind (`sequences.Example`); unanswerable: percent of targets with a word that training never showed
    (the positions of COGS' deepest sentences), which no answer of the model can equal. Translation: BLEU
    (see `bleu`) beside that of the source copied. Both: see `Said.costs`. limit: the first so many of a set. outputs:
    a folder to write what was said to, as NAME.txt.
    """
    loaded = load(checkpoint)
    sets = test_pairs(loaded, names)
    figures: dict[str, Any] = {
        "full_depth": full_depth(loaded.model),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "beams": beams,
        "length_penalty": length_penalty,
        "knobs": knobs,
        "sets": {},
    }
    constant = commonest_target(loaded)
    for name, found in sets.items():
        chosen = found[:limit]
        said = answer(loaded, chosen, beams, length_penalty, f"set {name}", **knobs)
        figures["sets"][name] = quality(loaded, chosen, said, constant)
        if outputs is not None:
            file = Path(outputs) / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{text}\n" for text in said.texts), encoding="utf-8")
    return figures


def quality(loaded: Loaded, pairs: Sequence[tuple], said: Said, constant: str | None) -> dict[str, Any]:
    """What `evaluate_pairs` says of one set; constant: from `commonest_target`."""
    sources, targets = [one[0] for one in pairs], [one[1] for one in pairs]
    if constant is None:
        row = {**bleu(said.texts, targets), "copy_bleu": bleu(sources, targets)["bleu"]}
    else:
        row = exact_match(right_answers(said, targets), [one[2] for one in pairs])
        unknown = [UNK in ids for ids in _rows(parallel.encode_lines(targets, loaded.tokenizer))]
        row["unanswerable"] = round(100 * float(np.mean(unknown)), 2)
        row["majority"] = round(100 * float(np.mean([target == constant for target in targets])), 2)
        row["copy"] = round(100 * float(np.mean(np.array(sources) == np.array(targets))), 2)
    return {"examples": len(pairs), **row, **said.costs()}


def answer(
    loaded: Loaded,
    pairs: Sequence[tuple],
    beams: int = 1,
    length_penalty: float = 1.0,
    progress: str | None = None,
    **knobs,
) -> Said:
    """What the model writes for the sources of a set (`write`).

    Of a compositional task one word more than the target at most: a longer answer is wrong, whatever follows. A search
    of several beams would learn the target's length by that, and has the set's longest for all.
    """
    most = None
    if loaded.recipe.data.parallel is None:
        most = [len(one[1].split()) + 1 for one in pairs]
        most = most if beams == 1 else [max(most)] * len(most)
    return write(loaded, [one[0] for one in pairs], beams, length_penalty, most, progress, **knobs)


def right_answers(said: Said, targets: Sequence[str]) -> np.ndarray:
    """[N] bool: which answers are finished and equal the target."""
    return said.finished & np.array(
        [text == target for text, target in zip(said.texts, targets, strict=True)]
    )


@torch.inference_mode()
def loss_of(loaded: Loaded, pairs: Sequence[tuple], batch: int = BATCH, **knobs) -> float:
    """Negative log-likelihood of the targets given their sources, in nats per token, <eos> counted, not smoothed.

    Words that the vocabulary lacks are left out of it.
    """
    words, device = loaded.tokenizer, loaded.model.device
    sides = [parallel.encode_lines([one[side] for one in pairs], words) for side in (0, 1)]
    order = np.argsort(np.maximum(*(side.lengths for side in sides)), kind="stable")
    total = count = 0.0
    for start in range(0, len(pairs), batch):
        sources, targets = (_rows(side.take(order[start : start + batch])) for side in sides)
        labels = padded(targets, -100).to(device)
        logits = loaded.model(**inputs_of(sources, device), labels=labels, **knobs).logits
        if words.unk_token_id is not None:
            labels = labels.masked_fill(labels == words.unk_token_id, -100)
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


def test_pairs(loaded: Loaded, names: Sequence[str] = ()) -> dict[str, list[tuple]]:
    """The test sets by name, pairs of texts; of compositional tasks (source, target, kind)."""
    data = loaded.recipe.data
    if data.sequences is not None:
        wanted = data.sequences
        known = [one for one in sequences.parts(wanted.task, wanted.split) if one != "train"]
    elif data.parallel is not None:
        known = ["validation", *data.parallel.test]
    else:
        raise ValueError(f"{loaded.folder} was trained on neither data.sequences nor data.parallel.")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{loaded.folder} has no set {unknown[0]!r}; it has {', '.join(known)}.")
    chosen = names or [name for name in known if name != "validation"]
    if not chosen:
        raise ValueError(f"{loaded.folder}: the recipe names no test set; --sets validation is one.")
    if data.sequences is not None:
        return {
            name: [
                (" ".join(one.source), " ".join(one.target), one.kind)
                for one in sequences.read(wanted.task, name, wanted.split, wanted.path)
            ]
            for name in chosen
        }
    corpora = {"validation": data.parallel.validation}
    corpora |= {name: [corpus] for name, corpus in data.parallel.test.items()}
    return {
        name: [pair for corpus in corpora[name] for pair in parallel.read_pairs(corpus, data.parallel.folder)]
        for name in chosen
    }


def commonest_target(loaded: Loaded) -> str | None:
    """The target that occurs most often in a compositional task's training part; None for translation."""
    wanted = loaded.recipe.data.sequences
    if wanted is None:
        return None
    train = sequences.read(wanted.task, "train", wanted.split, wanted.path)[: wanted.train]
    return Counter(" ".join(one.target) for one in train).most_common(1)[0][0]


def exact_match(right: np.ndarray, kinds: Sequence[str | int]) -> dict[str, Any]:
    """Percent right, of all and of each kind."""
    by_kind = {}
    for kind in sorted(set(kinds)):
        chosen = right[[one == kind for one in kinds]]
        by_kind[str(kind)] = {"examples": len(chosen), "exact": round(100 * float(chosen.mean()), 2)}
    return {"exact": round(100 * float(right.mean()), 2), "by_kind": by_kind}
