"""`arcuate lm`: language models read, estimated, scored, mixed, looked at and written out."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from arcuate.cli.console import emit_json, out, percent, progress, say
from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.language.ngram.build import build_model, read_sentences
from arcuate.language.ngram.file import is_model_file, refuse_existing
from arcuate.language.ngram.io import EMBEDDED, open_model, read_foreign
from arcuate.language.ngram.mix import mix, normalised, tune_weights
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.perplexity import seen_sentences, summary
from arcuate.language.ngram.pocketsphinx import embedded_path
from arcuate.language.ngram.trie import check_file, to_model, write_arpa, write_model
from arcuate.progress import Progress


def import_command(source: str, target: Path, recount: bool, force: bool, as_json: bool) -> None:
    path = embedded_path() if source in EMBEDDED else Path(source)
    refuse_existing(target, force, path)
    with progress("importing") as tell:
        model = read_foreign(path, recount=recount, report=tell)
        write_model(model, target, force=force, report=tell)
    for word in model.about["added"]:
        say(f"note: {path.name} has no {word}; added with probability nought")
    if n := model.about["n_repeated"]:
        say(f"note: {n:,} n-grams come again with the same values; each counts once")
    if n := model.about["n_implied"]:
        say(f"note: {n:,} contexts of longer n-grams are missing; they follow from backing off")
    show({"source": str(source), **describe(model, target)}, as_json)


@dataclass(frozen=True)
class Asked:
    """What `lm build` was asked for."""

    texts: Sequence[Path]
    target: Path
    order: int
    prune: Sequence[int]
    normalise: bool
    leave_out: Path | None
    against: Path | None
    keep_hashes: bool
    force: bool


def build_command(asked: Asked, as_json: bool) -> None:
    others = [path for path in (asked.leave_out, asked.against) if path is not None]
    refuse_existing(asked.target, asked.force, *asked.texts, *others)
    evaluation = read_sentences(asked.against) if asked.against else None
    if evaluation and not asked.keep_hashes:
        raise UserError("--against needs the sentence hashes; leave out --no-hashes")
    unwanted = read_sentences(asked.leave_out) if asked.leave_out else ()
    with progress("building") as tell:
        built = build_model(
            asked.texts,
            asked.order,
            prune=asked.prune,
            normalise=asked.normalise,
            leave_out=unwanted,
            keep_hashes=asked.keep_hashes,
            report=tell,
        )
        write_model(built.model, asked.target, force=asked.force, report=tell)
    for k, discounts in enumerate(built.discounts, start=1):
        if discounts.fallback:
            say(
                f"note: too little or too regular text to estimate the discounts of {k}-grams; took 0.5, 1, 1.5"
            )
    if built.corpus.n_empty:
        say(f"note: {built.corpus.n_empty} empty lines count as sentences without words")
    result = describe(built.model, asked.target) | {"n_left_out": built.n_left_out}
    if evaluation:
        result["leakage"] = tell_leakage(built.model, evaluation)
    show(result, as_json)


def score_command(name: str, text: str, normalise: bool, against: Path | None, as_json: bool) -> None:
    model = opened(name)
    with progress("reading") as tell:
        sentences = read_input(text, tell)
        if normalise:
            sentences = [normalise_text(sentence) for sentence in sentences]
        result: dict[str, Any] = {"model": name, **summary(model, sentences, tell)}
    if against is not None:
        result["leakage"] = tell_leakage(model, read_sentences(against))
    if as_json:
        emit_json(result)
        return
    out.print(
        f"perplexity {shown(result['perplexity'])}, with unknown words {shown(result['perplexity_with_oov'])}"
    )
    words = f"{result['n_words']:,} words in {result['n_sentences']:,} sentences"
    out.print(f"{words}, {result['n_oov']:,} unknown ({percent(result['oov_rate'])})")
    if result["oov_words"]:
        out.print("unknown: " + " ".join(result["oov_words"]), markup=False, soft_wrap=True)
    if seen := result["n_in_training_text"]:
        out.print(
            f"{seen:,} of the sentences stand in the model's training text; perplexity of the others "
            f"{shown(result['perplexity_unseen'])}"
        )


def mix_command(
    names: Sequence[str],
    target: Path,
    tune: Path | None,
    weights: Sequence[float],
    force: bool,
    as_json: bool,
) -> None:
    if (tune is None) == (not weights):
        raise UserError("give either held-out text with --tune or one --weight per model")
    refuse_existing(target, force, *names, *([tune] if tune else []))
    models = [opened(name) for name in names]
    held_out = read_sentences(tune) if tune else None
    with progress("finding weights") as tell:
        found = tune_weights(models, held_out, report=tell) if held_out else None
    share = normalised(found.weights if found else weights, len(models))
    with progress("mixing") as tell:
        tables = mix(models, share, tell)
        about, hashes = shared_memory(models)
        about |= {"made_by": "linear interpolation", "models": list(names), "weights": share}
        mixed = to_model(tables, about, hashes, tell)
        write_model(mixed, target, force=force, report=tell)
    result = describe(mixed, target) | {"weights": share}
    if found and held_out:
        result["tuned_on"] = {
            "text": str(tune),
            "n_tokens": found.n_tokens,
            "perplexity_word_by_word": found.perplexity,
            "perplexity": summary(mixed, held_out)["perplexity"],
            "perplexity_single": list(found.single),
        }
    show(result, as_json)


def shared_memory(models: Sequence[LanguageModel]) -> tuple[dict[str, Any], np.ndarray | None]:
    """The sentences that any of the models has seen, and whether all of them know theirs."""
    known = [model.sentences for model in models if model.sentences is not None]
    in_part = len(known) < len(models) or any(model.about.get("sentences_in_part") for model in models)
    return {"sentences_in_part": in_part}, np.unique(np.concatenate(known)) if known else None


def info_command(name: str, check: bool, as_json: bool) -> None:
    if check and name not in EMBEDDED:
        if Path(name).is_file() and not is_model_file(Path(name)):
            raise UserError(
                f"--check looks at model files, and {name} is none; import it first: arcuate lm import"
            )
        check_file(Path(name))
    model = opened(name)
    path = None if name in EMBEDDED else Path(name)
    show({"model": name, **describe(model, path), "checked": check}, as_json)


def export_command(name: str, target: Path, force: bool, as_json: bool) -> None:
    refuse_existing(target, force, name)
    model = opened(name)
    with progress("exporting") as tell:
        write_arpa(model, target, force=force, report=tell)
    show({"model": name, "arpa": str(target), "n_ngrams": list(model.counts)}, as_json)


def opened(name: str) -> LanguageModel:
    """A model by name or path; a bar appears only where it has to be converted first."""
    with ExitStack() as stack:
        bars: list[Progress] = []

        def tell(done: int, total: int, what: str) -> None:
            if not bars:
                bars.append(stack.enter_context(progress("opening")))
            bars[0](done, total, what)

        return open_model(name, tell)


def read_input(text: str, report: Progress) -> list[str]:
    """Sentences of a file, or of standard input for `-`."""
    if text != "-":
        return read_sentences(Path(text), report)
    sentences = [line.strip() for line in sys.stdin if line.strip()]
    if not sentences:
        raise UserError("standard input has no sentences; pipe in a text with one per line")
    return sentences


def describe(model: LanguageModel, path: Path | None) -> dict[str, Any]:
    """A model in numbers."""
    n_bytes = path.stat().st_size if path else None
    about = {k: v for k, v in model.about.items() if k not in ("crc32", "order")}
    return {
        "path": str(path) if path else None,
        "order": model.order,
        "n_ngrams": list(model.counts),
        "n_words": len(model.words),
        "n_bytes": n_bytes,
        "bytes_per_ngram": n_bytes / sum(model.counts) if n_bytes else None,
        "n_sentence_hashes": None if model.sentences is None else len(model.sentences),
        "about": about,
    }


def tell_leakage(model: LanguageModel, sentences: Sequence[str]) -> dict[str, Any] | None:
    """How many evaluation sentences the model was trained on; a warning if any."""
    seen = seen_sentences(model, sentences)
    if seen is None:
        say("note: the model does not know its training sentences, so leakage cannot be told")
        return None
    n = sum(seen)
    if n:
        say(
            f"warning: {n} of {len(seen)} evaluation sentences stand in the training text; error rates on them "
            "flatter the model; build it with --leave-out"
        )
    return {"n_sentences": len(seen), "n_in_training_text": n, "share": n / len(seen)}


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(result)
        return
    table = Table(box=None, show_header=False)
    for key, value in result.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                table.add_row(Text(f"{key}.{inner}"), Text(shown(item)))
        elif value is not None:
            table.add_row(Text(key), Text(shown(value)))
    out.print(table)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
