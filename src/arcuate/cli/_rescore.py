"""`arcuate rescore`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.cli.console import emit_json, out, percent, progress, say
from arcuate.errors import UserError
from arcuate.evaluation.combine.choose import oracle, scored_trials
from arcuate.evaluation.combine.lists import attach_references
from arcuate.evaluation.metrics import total
from arcuate.evaluation.rescoring.nbest import Blend, NBest, best_text, fit_blends, read_nbest, search_balance
from arcuate.evaluation.significance import score_difference
from arcuate.evaluation.word_errors import leakage_warning, summarise_words
from arcuate.files import check_writable, write_jsonl

ALPHA = 0.5  # where nothing is given and nothing can be fitted


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    hyps: Path
    llm: Path
    references: Path | None
    alpha: float | None
    acoustic: float | None
    length: float | None
    limit: int | None
    context: Path | None
    folds: int
    out: Path | None


def rescore_command(asked: Asked, as_json: bool) -> None:
    check_writable(asked.out, asked.hyps, asked.references, asked.context)
    lists = read_nbest(asked.hyps, asked.limit)
    if asked.references:
        attached = attach_references([nbest.found for nbest in lists], asked.references)
        lists = [replace(nbest, found=found) for nbest, found in zip(lists, attached, strict=True)]
    if empty := sum(not nbest.found.texts for nbest in lists):
        say(f"{empty} trials have an empty n-best list; their text stays empty")
    causal, cost = causal_scores(asked, lists)
    blends, fitted = choose_blends(asked, lists, causal)
    scores = [blend(nbest, llm) for blend, nbest, llm in zip(blends, lists, causal, strict=True)]
    texts = [best_text(nbest, s) for nbest, s in zip(lists, scores, strict=True)]
    summary = {**summarise(asked, lists, texts), **fitted, **cost}
    if fitted["cross_fitted"]:
        whole = Blend(fitted["acoustic"], fitted["alpha"], fitted["length"])
        same = [best_text(n, whole(n, llm)) for n, llm in zip(lists, causal, strict=True)]
        summary["wer_fitted_on_same_trials"] = summarise(asked, lists, same)["wer"]
    if warning := leakage_warning(summary):
        say(warning)
    if asked.out:
        write_jsonl(asked.out, (row(*parts) for parts in zip(lists, texts, scores, causal, strict=True)))
        summary["out"] = str(asked.out)
    emit_json(summary) if as_json else show(summary)


def causal_scores(asked: Asked, lists: Sequence[NBest]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The causal model's score of every entry, and what that cost."""
    if not asked.llm.exists():
        raise UserError(f"there is no language model at {asked.llm}; give a model folder or a .gguf file")
    from arcuate.evaluation.rescoring.causal import load_causal, score_sentences

    texts = [text for nbest in lists for text in nbest.found.texts]
    with progress("loading the language model") as report:
        begun = time.process_time()
        options = {"context": read_context_file(asked.context)} if asked.context else {}
        lm = load_causal(asked.llm, **options)
        loaded = time.process_time()
        flat = score_sentences(lm, texts, progress=report)
        spent = time.process_time() - loaded
    bounds = np.cumsum([len(nbest.found.texts) for nbest in lists])[:-1]
    distinct = len(set(texts))
    return list(np.split(flat, bounds)), {
        "llm": lm.name,
        "n_texts_scored": distinct,
        "load_seconds": loaded - begun,
        "seconds_per_sentence": spent / len(lists),
        "seconds_per_text": spent / distinct if distinct else None,
    }


def read_context_file(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}") from None


def choose_blends(
    asked: Asked, lists: Sequence[NBest], causal: Sequence[np.ndarray]
) -> tuple[list[Blend], dict[str, Any]]:
    """The blend for each trial: as given, or fitted on other sessions where there are references."""
    balance = search_balance(lists) if asked.acoustic is None else asked.acoustic
    alpha = ALPHA if asked.alpha is None else asked.alpha
    given = Blend(balance, alpha, asked.length or 0.0)
    labelled = sum(nbest.found.reference is not None for nbest in lists)
    fixed = any(value is not None for value in (asked.alpha, asked.acoustic, asked.length))
    if fixed or labelled < 2 * asked.folds:
        return [given] * len(lists), weights_of(given, "given" if fixed else "default", None)
    apart, whole = fit_blends(lists, causal, asked.folds, given)
    return apart, weights_of(whole, "fitted", True) | {"folds": asked.folds}


def weights_of(blend: Blend, source: str, cross_fitted: bool | None) -> dict[str, Any]:
    return {
        "acoustic": blend.acoustic,
        "alpha": blend.alpha,
        "length": blend.length,
        "weights_from": source,
        "cross_fitted": cross_fitted,
    }


def summarise(asked: Asked, lists: Sequence[NBest], texts: Sequence[str]) -> dict[str, Any]:
    found = [nbest.found for nbest in lists]
    before = scored_trials(found, [f.texts[0] if f.texts else "" for f in found])
    after = scored_trials(found, texts)
    named = {str(nbest.row.get("lm")) for nbest in lists}
    ngram = f"n-gram of {asked.hyps.name}" if named == {"None"} else " / ".join(sorted(named))
    name = f"{ngram} + {asked.llm.stem}"
    gap = score_difference([t.score.words for t in after], [t.score.words for t in before])
    return summarise_words(after, lm=name, n_trials=len(lists)).to_dict() | {
        "wer_before": total(t.score.words for t in before).rate,
        "oracle_wer": oracle([f for f in found if f.reference is not None]).rate,
        "against_before": vars(gap) if gap else None,
    }


def row(nbest: NBest, text: str, scores: np.ndarray, causal: np.ndarray) -> dict[str, Any]:
    """The line as it was read, its entries ordered by the new score."""
    order = sorted(range(len(scores)), key=lambda i: (-round(float(scores[i]), 9), i))
    entries = [
        {**nbest.row["nbest"][i], "text": nbest.found.texts[i], "llm": causal[i], "score": scores[i]}
        for i in order
    ]
    best = {"score": entries[0]["score"] if entries else None}
    known = {"reference": nbest.found.reference} if nbest.found.reference is not None else {}
    stale = ("words", "errors", "n_words", "nbest")  # of the text the search had put first
    return {k: v for k, v in nbest.row.items() if k not in stale} | {
        "text": text,
        **best,
        **known,
        "nbest": entries,
    }


def show(summary: dict[str, Any]) -> None:
    """The result for a person."""
    if summary["wer"] is not None:
        how = "fitted on other sessions" if summary["cross_fitted"] else summary["weights_from"]
        out.print(
            f"WER {percent(summary['wer_before'])} before, {100 * summary['wer']:.2f} % after"
            f" ({percent(summary['wer_low'])} to {percent(summary['wer_high'])}); weights {how};"
            f" language models: {summary['lm']}",
            soft_wrap=True,
        )
    out.print(
        f"{summary['n_trials']} trials, {summary['n_texts_scored']} texts,"
        f" {summary['seconds_per_sentence']:.2f} s of CPU per sentence; alpha {summary['alpha']:.2f},"
        f" acoustic {summary['acoustic']:.2f}, length {summary['length']:.2f}",
        soft_wrap=True,
    )
