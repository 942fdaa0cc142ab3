"""Decoded sentences: the lines that `decode`, `rescore` and `combine` write, their references and their scores."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from arcuate.data.text import normalise_text
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score, ScoredTrial, score, score_text, total
from arcuate.files import finite_number, read_jsonl
from arcuate.language.ngram.model import LanguageModel
from arcuate.run import WORDS_LABEL, Run

_Value = TypeVar("_Value")
_MAX_CANDIDATES = 10_000  # per trial; computing expected errors takes the square of it in time and memory
_SOURCES = ("acoustic", "lm", "bonus")  # scores of an entry that are read back


@dataclass(frozen=True)
class Sentence:
    """One trial in words: its hypotheses, best first, and its reference, if it is known."""

    id: str
    n_best: tuple[Hypothesis, ...] = ()  # or the texts of several systems; empty if no word sequence is possible
    reference: str | None = None
    session: str | None = None
    corpus: str | None = None
    lm: str | None = None  # language model that it was decoded with
    in_lm_text: bool | None = None  # the reference occurs in the language model's training text; None: unknown
    seconds: float | None = None  # length of the recording; None: unknown
    search_seconds: float | None = None  # CPU time of the search, if it was decoded here

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of every hypothesis."""
        return tuple(hypothesis.text or "" for hypothesis in self.n_best)

    @property
    def text(self) -> str:
        """The best text; empty without hypotheses."""
        return self.texts[0] if self.n_best else ""

    @property
    def totals(self) -> tuple[float, ...] | None:
        """The score of every hypothesis; None without scores."""
        totals = tuple(h.total for h in self.n_best if h.total is not None)
        return totals if totals and len(totals) == len(self.n_best) else None

    @property
    def word_errors(self) -> Score | None:
        """Word edit counts of the best text; None without a reference."""
        return None if self.reference is None else score_text(self.reference, self.text).words

    def is_rejected(self, below: float | None) -> bool:
        """Whether the probability that the sentence is correct is below a limit; true for a sentence without words."""
        probability = self.n_best[0].probability if self.n_best else None
        return below is not None and (probability is None or probability < below)

    def to_row(self, text: str | None = None) -> dict[str, Any]:
        """Its line: `text`, by default the best hypothesis, what is known of the trial, and the n-best list."""
        known = {name: getattr(self, name) for name in ("session", "corpus", "reference", "lm", "in_lm_text")}
        return {
            "id": self.id,
            "text": self.text if text is None else text,
            **{name: value for name, value in known.items() if value is not None},
            "nbest": [{"text": h.text or "", "score": h.total, **h.scores} for h in self.n_best],
        }


def score_sentences(sentences: Sequence[Sentence], texts: Sequence[str] | None = None) -> list[ScoredTrial]:
    """Scores of one text per trial, by default the best one, for the trials with a reference."""
    chosen = [s.text for s in sentences] if texts is None else texts
    return [
        ScoredTrial(s.id, score_text(s.reference, text), s.session, s.corpus, s.in_lm_text)
        for s, text in zip(sentences, chosen, strict=True)
        if s.reference is not None
    ]


def oracle_score(sentences: Sequence[Sentence]) -> Score:
    """Score of the best hypotheses, chosen with the reference: a lower bound for any choice."""
    best = []
    for sentence in sentences:
        if sentence.reference is not None:
            reference = normalise_text(sentence.reference).split()
            options = [score(reference, text.split()) for text in dict.fromkeys(sentence.texts)]
            best.append(min(options or [score(reference, [])], key=lambda s: s.errors))
    return total(best)


def mark_leakage(sentences: Sequence[Sentence], lm: LanguageModel) -> list[Sentence]:
    """Set `in_lm_text` by the model's own record of its training text, which may be absent, and by what is known."""
    marked = []
    for sentence in sentences:
        recorded = None if sentence.reference is None else lm.contains(sentence.reference)
        known = sentence.in_lm_text if recorded is None else recorded or bool(sentence.in_lm_text)
        marked.append(replace(sentence, in_lm_text=known))
    return marked


def digest_references(sentences: Sequence[Sentence]) -> str:
    """Hash of the references in any order; identifies the trials that weights were tuned on."""
    texts = json.dumps(sorted(normalise_text(s.reference) for s in sentences if s.reference is not None))
    return hashlib.blake2b(texts.encode("utf-8"), digest_size=12).hexdigest()


# --- files ----------------------------------------------------------------------------------------------------


def find_decodings(run: Run, split: str, label: str | None = None) -> Path:
    """The word decodings of a run: results/<split>.<label>.jsonl; `evaluate` writes phonemes only."""
    file = run.results_file(split, label or WORDS_LABEL)
    if not file.is_file():
        raise UserError(
            f"{file} does not exist; decode to words first: arcuate decode {run.path} --split {split} --out {file}"
        )
    return file


def read_decodings(path: Path, limit: int | None = None) -> list[Sentence]:
    """Read lines with `candidates` (and `scores`, `text`), or decoding lines with `nbest` (and `reference`).

    `limit`: keep only the first entries of every n-best list. Every trial may occur once.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a .jsonl file with candidates, or several run folders")
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} has no lines; write it with: arcuate decode … --out {path}")
    first_line: dict[str, int] = {}
    sentences = []
    for number, row in enumerate(rows, start=1):
        sentence = _parse_row(row, f"{path} line {number}", f"line {number}")
        if (first := first_line.setdefault(sentence.id, number)) != number:
            raise UserError(
                f"{path} line {number}: trial {sentence.id!r} is already on line {first}; keep one of the two"
            )
        sentences.append(replace(sentence, n_best=sentence.n_best[:limit]))
    return sentences


def attach_references(
    sentences: Sequence[Sentence], path: Path, *, complete: bool = False, by_position: bool = False
) -> list[Sentence]:
    """Add the references of lines with `text`: by `id`, or line by line if some have none or the trials are unnamed.

    Trials without a line keep what they have, unless the references have to be `complete`. Trials that are identified
    `by_position` get the ids of their lines.
    """
    named, rows = _read_references(path)
    if by_position or len(named) < len(rows):
        if len(rows) != len(sentences):
            raise UserError(f"{path} has {len(rows)} lines, but there are {len(sentences)} trials; give one line each")
        named = dict(zip([s.id for s in sentences], rows, strict=True))
    missing = [s.id for s in sentences if s.id not in named]
    if missing and (complete or len(missing) == len(sentences)):
        raise UserError(
            f"{path} has no line with id {missing[0]!r}; its first is {next(iter(named), None)!r}; give one line per"
            " trial"
        )
    attached = [_with_reference(s, named[s.id], path) if s.id in named else s for s in sentences]
    if by_position:
        return [replace(s, id=str(named[s.id].get("id", s.id))) for s in attached]
    return attached


def _read_references(path: Path) -> tuple[dict[str, Mapping[str, Any]], list[dict[str, Any]]]:
    """The lines of a file of references: those with an id by it, and all of them."""
    rows = read_jsonl(path)
    named: dict[str, Mapping[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("text"), str):
            raise UserError(f"{path} line {number} has no text; every line needs the reference text of a trial")
        identity = row.get("id", row.get("trial"))
        if identity is not None and str(identity) in named:
            raise UserError(f"{path} line {number}: trial {identity!r} occurs twice; keep one of the two")
        if identity is not None:
            named[str(identity)] = row
    return named, rows


def _with_reference(sentence: Sentence, row: Mapping[str, Any], path: Path) -> Sentence:
    where, known = f"{path}: trial {sentence.id}", sentence.in_lm_text
    return replace(
        sentence,
        reference=row["text"],
        session=sentence.session or _optional(row, "session", str, where),
        corpus=sentence.corpus or _optional(row, "corpus", str, where),
        in_lm_text=_optional(row, "in_lm_text", bool, where) if known is None else known,
    )


def _parse_row(row: Mapping[str, Any], where: str, fallback_id: str) -> Sentence:
    if "candidates" in row:
        n_best, reference = _parse_candidates(row, where), _optional(row, "text", str, where)
    elif "nbest" in row:  # `text` of such a line is the decoded text, never the reference
        n_best, reference = _parse_n_best(row["nbest"], where), _optional(row, "reference", str, where)
    else:
        raise UserError(f"{where} has neither candidates nor nbest; each line needs a list of texts")
    if len(n_best) > _MAX_CANDIDATES:
        raise UserError(f"{where} has {len(n_best)} candidates; expected at most {_MAX_CANDIDATES}")
    identity = row.get("id", row.get("trial", fallback_id))
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise UserError(f"{where}: id should be a text, not {identity!r:.60}")
    session, corpus, lm = (_optional(row, name, str, where) for name in ("session", "corpus", "lm"))
    known = _optional(row, "in_lm_text", bool, where)
    return Sentence(str(identity), n_best, reference, session, corpus, lm, known)


def _parse_candidates(row: Mapping[str, Any], where: str) -> tuple[Hypothesis, ...]:
    texts, scores = row["candidates"], row.get("scores")
    if not isinstance(texts, list):
        raise UserError(f"{where}: candidates should be a list of texts")
    if scores is not None and (not isinstance(scores, list) or len(scores) != len(texts)):
        size = len(scores) if isinstance(scores, list) else "no list of"
        raise UserError(f"{where} has {len(texts)} candidates but {size} scores; give one score for each")
    entries = zip(texts, scores or [None] * len(texts), strict=True)
    return tuple(
        _hypothesis({"text": t, "score": s}, scores is not None, f"{where}: entry {i}")
        for i, (t, s) in enumerate(entries, start=1)
    )


def _parse_n_best(entries: Any, where: str) -> tuple[Hypothesis, ...]:
    """Texts, or objects with `text`, `score` and its parts; scores are given for all entries or for none."""
    if not isinstance(entries, list):
        raise UserError(f"{where}: nbest should be a list")
    rows = [entry if isinstance(entry, dict) else {"text": entry} for entry in entries]
    scored = any(row.get("score") is not None for row in rows)
    return tuple(_hypothesis(row, scored, f"{where}: entry {i}") for i, row in enumerate(rows, start=1))


def _hypothesis(entry: Mapping[str, Any], scored: bool, where: str) -> Hypothesis:
    if not isinstance(text := entry.get("text"), str):
        raise UserError(f"{where} is {text!r:.60}, expected a text")
    scores = {name: _finite(entry[name], f"{name} of {where}") for name in _SOURCES if name in entry}
    own = _finite(entry.get("score"), f"score of {where}") if scored else None
    return Hypothesis((), scores, tuple(normalise_text(text).split()), total=own)


def _finite(value: Any, what: str) -> float:
    if (found := finite_number(value)) is None:
        raise UserError(f"{what} is {value!r:.60}; expected a finite number")
    return found


def _optional(row: Mapping[str, Any], key: str, kind: type[_Value], where: str) -> _Value | None:
    """A value of the row that may be absent; its type is checked."""
    value = row.get(key)
    if value is not None and not isinstance(value, kind):
        expected = "true or false" if kind is bool else "a text"
        name = "the reference" if key == "text" else key
        raise UserError(f"{where}: {name} should be {expected}, not {value!r:.60}")
    return value
