"""`arcuate combine`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from arcuate.cli._submit import WORDS, find_decodings, missing_words
from arcuate.cli.console import emit_json, out, progress, say
from arcuate.data.alphabet import token_names
from arcuate.decoding.greedy import greedy
from arcuate.decoding.log_probs import FrameLogProbs
from arcuate.errors import UserError
from arcuate.evaluation.combine.choose import (
    choose_by_features,
    choose_by_risk,
    choose_by_vote,
    n_seats,
    summarise_choice,
    vote_weights,
)
from arcuate.evaluation.combine.fit import (
    CAUSAL_WEIGHT,
    NGRAM_BESIDE_CAUSAL,
    NGRAM_WEIGHT,
    Feature,
    known_feature,
    ngram_feature,
    prior_of,
    read_weights,
    write_weights,
)
from arcuate.evaluation.combine.frames import average, read_named, write_frames
from arcuate.evaluation.combine.lists import (
    CandidateList,
    attach_references,
    mark_leakage,
    merge_lists,
    read_lists,
)
from arcuate.evaluation.metrics import (
    Score,
    score,
    total,
    word_error_rate,
)
from arcuate.evaluation.significance import bootstrap_interval, score_difference
from arcuate.evaluation.word_errors import leakage_warning
from arcuate.files import check_writable, read_jsonl, write_jsonl
from arcuate.language.ngram.io import open_model
from arcuate.language.ngram.model import LanguageModel
from arcuate.run import open_run

METHODS = ("auto", "linear", "mbr", "rover", "arithmetic", "geometric")


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    sources: list[Path]
    method: str
    split: str
    label: str | None
    voters: str
    scale: float
    lm: str | None
    llm: Path | None
    fit: bool
    folds: int
    weights: Path | None
    save_weights: Path | None
    references: Path | None
    out: Path | None


def combine_command(asked: Asked, as_json: bool) -> None:
    check(asked)
    for target in (asked.out, asked.save_weights):
        check_writable(target, *asked.sources, asked.references, asked.weights, asked.lm, asked.llm)
    if asked.method == "auto" and only_frames(asked):
        say("no words were decoded yet: the mean of the frame scores (--method geometric)")
        asked = replace(asked, method="geometric")
    if asked.method in ("arithmetic", "geometric"):
        summary = combine_frames(asked)
    else:
        summary = combine_words(asked)
    if as_json:
        emit_json(summary)
    else:
        show(summary)


def check(asked: Asked) -> None:
    if asked.method not in METHODS:
        raise UserError(f"there is no method {asked.method!r}; choose one of {', '.join(METHODS)}")
    if asked.voters not in ("equal", "agreement"):
        raise UserError(f"--voters is equal or agreement, not {asked.voters!r}")
    if (asked.lm or asked.llm or asked.fit or asked.weights or asked.save_weights) and asked.method not in (
        "auto",
        "linear",
    ):
        raise UserError(f"a language model and weights belong to --method linear, not to {asked.method}")
    if asked.fit and asked.weights:
        raise UserError("--fit finds weights and --weights gives them; use one of the two")
    if asked.save_weights and not asked.fit:
        raise UserError("--save-weights writes fitted weights; add --fit")


def only_frames(asked: Asked) -> bool:
    """Whether the sources are runs with frame scores and without words, as `train --seeds` leaves them."""
    if asked.lm or asked.llm or asked.fit or asked.weights or not all(p.is_dir() for p in asked.sources):
        return False
    runs = [open_run(path) for path in asked.sources]
    words = any(run.results_file(asked.split, asked.label or WORDS).is_file() for run in runs)
    scores = (run.results_file(asked.split, asked.label, "scores.npz") for run in runs)
    return not words and all(file.is_file() for file in scores)


def combine_words(asked: Asked) -> dict[str, Any]:
    lists = read_sources(asked)
    if asked.references:
        lists = attach_references(lists, asked.references)
        if (known := sum(found.reference is not None for found in lists)) < len(lists):
            say(f"{known} of {len(lists)} trials have a reference; the others are combined, but not scored")
    lm = open_model(asked.lm) if asked.lm else None
    lists = mark_leakage(lists, lm) if lm else lists
    if empty := sum(not found.texts for found in lists):
        say(f"{empty} trials have no candidates; their text is empty")
    method = choose_method(asked, lists)
    votes = vote_weights(lists, "agreement" if asked.voters == "agreement" else "equal", asked.scale)
    about: dict[str, Any] = {"method": method, "voters": asked.voters, "cross_fitted": None}
    if method == "linear":
        texts, fitted = choose_linear(asked, lists, votes, lm)
        about |= fitted
    else:
        texts = (choose_by_risk if method == "mbr" else choose_by_vote)(lists, votes)
    summary = {**summarise_choice(lists, texts, lm_name(asked, lists)), **about}
    if warning := leakage_warning(summary):
        say(warning)
    if asked.out:
        check_writable(asked.out, *files_of(asked))
        write_jsonl(asked.out, (row(found, text) for found, text in zip(lists, texts, strict=True)))
        summary["out"] = str(asked.out)
    return summary


def choose_method(asked: Asked, lists: list[CandidateList]) -> str:
    """The packaged weights are for one reading per voter; lists of one decoder's scored readings get plain risk."""
    if asked.method != "auto":
        return asked.method
    wants_weights = asked.lm or asked.llm or asked.fit or asked.weights
    return "linear" if wants_weights or n_seats(lists) is not None else "mbr"


def choose_linear(
    asked: Asked, lists: list[CandidateList], votes: list[np.ndarray], lm: LanguageModel | None
) -> tuple[list[str], dict[str, Any]]:
    """Texts by weighted criteria, and where the weights come from."""
    extra = [ngram_feature(lm, NGRAM_BESIDE_CAUSAL if asked.llm else NGRAM_WEIGHT)] if lm else []
    if asked.llm:
        extra.append(causal_feature(asked.llm, lists))
    criteria, prior = prior_of(extra)
    weights = read_weights(asked.weights, criteria) if asked.weights else np.array(prior)
    if not asked.fit:
        chosen = choose_by_features(lists, votes, extra, weights=weights)
        source = str(asked.weights) if asked.weights else "packaged"
        return chosen.texts, {"weights": dict(zip(criteria, weights, strict=True)), "weights_from": source}
    labelled = sum(found.reference is not None for found in lists)
    if labelled < 2 * asked.folds:
        raise UserError(
            f"--fit needs references of at least {2 * asked.folds} trials, there are {labelled};"
            " add --references, or leave out --fit"
        )
    chosen = choose_by_features(lists, votes, extra, n_folds=asked.folds)
    assert chosen.same_set is not None
    if asked.save_weights:
        facts = {
            "n_trials": labelled,
            "lm": lm_name(asked, lists),
            "fitted_on": [str(p) for p in asked.sources],
        }
        write_weights(asked.save_weights, criteria, chosen.weights, facts)
    known = [(c.reference, t) for c, t in zip(lists, chosen.same_set, strict=True) if c.reference is not None]
    return chosen.texts, {
        "weights": dict(zip(criteria, chosen.weights, strict=True)),
        "weights_from": "fitted",
        "cross_fitted": True,
        "folds": asked.folds,
        "wer_fitted_on_same_trials": word_error_rate([r for r, _ in known], [t for _, t in known]),
    }


def causal_feature(path: Path, lists: list[CandidateList]) -> Feature:
    from arcuate.evaluation.rescoring.causal import load_causal, score_sentences

    texts = sorted({text for found in lists for text in found.texts})
    with progress("loading the language model") as report:
        scores = score_sentences(load_causal(path), texts, progress=report)
    return known_feature("causal", CAUSAL_WEIGHT, dict(zip(texts, scores.tolist(), strict=True)))


def lm_name(asked: Asked, lists: list[CandidateList]) -> str | None:
    """All models behind a text: those that the readings came by, and those that choose among them."""
    before = " / ".join(dict.fromkeys(found.lm for found in lists if found.lm))
    parts = [before, Path(asked.lm).name if asked.lm else None, asked.llm.stem if asked.llm else None]
    return " + ".join(part for part in parts if part) or None


def row(found: CandidateList, text: str) -> dict[str, Any]:
    """One line of a hypothesis file."""
    scores = found.scores or (None,) * len(found.texts)
    nbest = [{"text": t, "score": s} for t, s in zip(found.texts, scores, strict=True)]
    known = {
        "session": found.session,
        "corpus": found.corpus,
        "reference": found.reference,
        "lm": found.lm,
        "in_lm_text": found.in_lm_text,
    }
    return {"id": found.id, "text": text, **{k: v for k, v in known.items() if v is not None}, "nbest": nbest}


def read_sources(asked: Asked) -> list[CandidateList]:
    """Candidates from one list, or from the decodings of several runs or files."""
    files = files_of(asked)
    if len(files) == 1:
        if asked.sources[0].is_dir():
            raise UserError(
                "one run alone cannot be combined; name several, or give a .jsonl with candidates"
            )
        return read_lists(files[0])
    return merge_lists(files, [read_lists(file) for file in files], asked.scale)


def files_of(asked: Asked) -> list[Path]:
    return [decodings_file(path, asked) if path.is_dir() else path for path in asked.sources]


def decodings_file(path: Path, asked: Asked) -> Path:
    """The decodings of a run; those of `evaluate` hold phonemes, and so nothing to choose words from."""
    run = open_run(path)
    file = find_decodings(run, asked.split, asked.label)
    if file == run.results_file(asked.split) and not any("nbest" in r for r in read_jsonl(file)[:1]):
        raise missing_words(run, asked.split, None)
    return file


def combine_frames(asked: Asked) -> dict[str, Any]:
    """Mean frame scores of several runs, with the PER of the greedy reading where labels are known."""
    if len(asked.sources) < 2:
        raise UserError("a mean needs at least two runs or .npz files of frame scores")
    paths = [frames_file(path, asked) for path in asked.sources]
    files = [replace(read_named(path), name=str(path)) for path in paths]
    pooled = average(files, "arithmetic" if asked.method == "arithmetic" else "geometric")
    summary: dict[str, Any] = {"method": asked.method, "n_models": len(files), "n_trials": len(pooled)}
    if labels := find_labels(asked):
        summary |= phoneme_errors(files, pooled, labels)
    if asked.out:
        write_frames(asked.out, replace(files[0], trials=tuple(pooled)))
        summary["out"] = str(asked.out)
    return summary


def frames_file(path: Path, asked: Asked) -> Path:
    if not path.is_dir():
        return path
    file = open_run(path).results_file(asked.split, asked.label, "scores.npz")
    if not file.is_file():
        raise UserError(
            f"{path} has no frame scores of {asked.split}; write them with:"
            f" arcuate evaluate {path} --split {asked.split} --scores {file}"
        )
    return file


def find_labels(asked: Asked) -> dict[str, list[str]]:
    """Phonemes that were to be said, from the first run's results."""
    if not asked.sources[0].is_dir():
        return {}
    file = open_run(asked.sources[0]).results_file(asked.split, asked.label)
    if not file.is_file():
        return {}
    rows = read_jsonl(file)
    return {
        str(r["trial"]): r["reference"] for r in rows if "trial" in r and isinstance(r.get("reference"), list)
    }


def phoneme_errors(
    files: list[FrameLogProbs], pooled: list[np.ndarray], labels: dict[str, list[str]]
) -> dict[str, Any]:
    trials = files[0].ids or ()

    def scores(frames: tuple[np.ndarray, ...] | list[np.ndarray]) -> list[Score]:
        return [
            score(labels[t], token_names(greedy(f)))
            for t, f in zip(trials, frames, strict=True)
            if t in labels
        ]

    single, mean = [scores(file.trials) for file in files], scores(pooled)
    rates = [total(s).rate for s in single]
    best = min(range(len(rates)), key=lambda i: total(single[i]).errors)
    low, high = bootstrap_interval(mean)
    gap = score_difference(mean, single[best])
    return {
        "per": total(mean).rate,
        "per_low": low,
        "per_high": high,
        "single_per": rates,
        "best_single": best + 1,
        "against_best_single": vars(gap) if gap else None,
    }


def show(summary: dict[str, Any]) -> None:
    """The result for a person."""
    if "wer" not in summary:
        rate = summary.get("per")
        said = f"greedy PER {100 * rate:.2f} %" if rate is not None else "no labels, so no PER"
        out.print(
            f"{summary['method']} mean of {summary['n_models']} models, {summary['n_trials']} trials: {said}"
        )
        return
    if summary["wer"] is None:
        out.print(f"{summary['n_trials']} trials combined ({summary['method']}); no references, so no WER")
        return
    table = Table(box=None, header_style="bold")
    table.add_column("")
    table.add_column("WER", justify="right")
    for title, key in (
        ("mean of single voters", "single_wer_mean"),
        ("best single voter, chosen on these trials", "best_single_wer"),
        ("best candidates (oracle)", "oracle_wer"),
    ):
        if summary.get(key) is not None:
            table.add_row(title, f"{100 * summary[key]:.2f} %")
    interval = f"{100 * summary['wer_low']:.2f} to {100 * summary['wer_high']:.2f} %"
    how = summary["method"] + (", cross-fitted" if summary["cross_fitted"] else "")
    table.add_row(f"combined ({how}; lm: {summary['lm'] or 'none'})", f"{100 * summary['wer']:.2f} %")
    out.print(table)
    out.print(f"95 % interval {interval} on {summary['n_scored']} trials, CER {100 * summary['cer']:.2f} %")
    if gap := summary.get("against_best_single"):
        out.print(
            f"against the best voter {100 * gap['rate']:+.2f} points"
            f" ({100 * gap['low']:+.2f} to {100 * gap['high']:+.2f}), p = {gap['p']:.4f}"
        )
