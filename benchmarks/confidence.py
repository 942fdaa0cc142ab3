"""Confidence of decoded words on trials not used for calibration: ECE, AUROC, and the accuracy of accepted words.

python benchmarks/confidence.py real --words ../shared/real/words --lm lm4.alm
python benchmarks/confidence.py simulated --scores runs/simulated-days
python benchmarks/confidence.py default --scores runs/simulated-days    # the constants of decoding/config.py

`real`: frame scores of a real decoder; the sessions are halved in four ways, the confidences calibrated on one half and
judged on the other. `simulated`: the files of simulated_days.py, one cohort per seed; calibrated on two of the four
known sessions and judged on the two others, and calibrated on all of them and judged on the later days. "Score margin"
is the naive confidence, the logistic function of the difference between the two best totals of a sentence, as it is and
calibrated (Platt 1999). "As shipped" is the default calibration of arcuate, without refitting; `default` fits it on the
known sessions of all cohorts, with cohorts as the folds of the threshold.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import CLASSES, SILENCE
from arcuate.decoding.confidence import probability, with_confidence
from arcuate.decoding.config import ConfidenceConfig, DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.log_probs import read_log_probs
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.evaluation.confidence import (
    are_correct,
    fit_confidence,
    fit_logistic,
    measure_confidence,
    measure_reliability,
)
from arcuate.evaluation.transcribe import read_references
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.io import open_model

HALVES: dict[str, Callable[[int, int], bool]] = {  # session number, number of sessions -> in the first half
    "first / last sessions": lambda k, n: k < n // 2,
    "every second session": lambda k, n: k % 2 == 0,
    "every second pair": lambda k, n: (k // 2) % 2 == 0,
    "a mixed half": lambda k, n: (7 * k % 11) % 2 == 0,
}
SETTINGS = DecodingConfig()


@dataclass(frozen=True)
class Decoded:
    """N-best list of one trial with its frames and reference."""

    n_best: Sequence[Hypothesis]
    frames: np.ndarray
    text: str
    session: str


@dataclass(frozen=True)
class Row:
    """One calibration, judged on other trials."""

    name: str
    method: str
    n: int
    accuracy: float
    ece: float
    auroc: float | None
    accepted: float | None
    kept: float | None  # accuracy of the accepted words


def decode(search: WordSearch, scores: Path, references: Path, every: int = 1) -> list[Decoded]:
    frames = read_log_probs(scores, None, ())
    texts = read_references(references, len(frames.trials), frames.ids)
    n = SETTINGS.confidence.hypotheses
    found = [
        Decoded(search.search(trial, n), trial, r.text or "", r.session or "")
        for trial, r in list(zip(frames.trials, texts, strict=True))[::every]
    ]
    return [d for d in found if d.n_best and d.n_best[0].words]


def judge(name: str, trials: Sequence[Decoded], judged: Sequence[Decoded]) -> list[Row]:
    """Calibrate on `trials`; measure all methods on `judged`."""
    lists = [(d.n_best, d.frames, d.text) for d in trials]
    fitted = fit_confidence(lists, [d.session for d in trials], SETTINGS, calibrated_on=name)
    (margins, right), (other_margins, other_right) = margin_of(trials), margin_of(judged)
    platt = fit_logistic(margins[:, None], right)
    rows = [
        measured(name, "calibrated", judged, fitted),
        reliability(name, "score margin", probability(other_margins), other_right),
        reliability(name, "score margin, calibrated", probability(platt.log_odds(other_margins[:, None])), other_right),
        measured(name, "as shipped", judged, SETTINGS.confidence),
    ]
    return rows


def measured(name: str, method: str, trials: Sequence[Decoded], model: ConfidenceConfig) -> Row:
    settings = SETTINGS.model_copy(update={"confidence": model})
    found = measure_confidence(((with_confidence(d.n_best, d.frames, settings), d.text) for d in trials), model)
    assert found is not None
    words = found.words
    return Row(
        name, method, words.n, words.accuracy, words.ece, words.auroc, found.accepted_share, found.accepted_accuracy
    )


def reliability(name: str, method: str, values: np.ndarray, right: np.ndarray) -> Row:
    found = measure_reliability(values, right)
    return Row(name, method, found.n, found.accuracy, found.ece, found.auroc, None, None)


def margin_of(trials: Sequence[Decoded]) -> tuple[np.ndarray, np.ndarray]:
    """Score margin and outcome of every word."""
    margins, right = [], []
    for d in trials:
        totals = [h.total or 0.0 for h in d.n_best[:2]]
        outcomes = are_correct(d.text, d.n_best[0].words)
        margins += [min(30.0, totals[0] - totals[1]) if len(totals) > 1 else 30.0] * len(outcomes)
        right += outcomes
    return np.array(margins), np.array(right)


def real(words: Path, lm: str) -> list[Row]:
    model, rows = open_model(lm), []
    for name in ("dev", "dev_nbest"):
        lexicon = open_lexicon(str(words / "t15" / "lexicon.txt"), CLASSES)
        search = build_word_search(lexicon, model, SETTINGS, boundary=SILENCE)
        trials = decode(search, words / "t15" / f"{name}.npz", words / "t15" / f"{name}.jsonl")
        sessions = sorted({d.session for d in trials})
        for half, is_first in HALVES.items():
            first = [d for d in trials if is_first(sessions.index(d.session), len(sessions))]
            second = [d for d in trials if not is_first(sessions.index(d.session), len(sessions))]
            rows += judge(f"{name}, {half}", first, second) + judge(f"{name}, {half}, swapped", second, first)
    return rows


def simulated(folder: Path, every: int) -> list[Row]:
    search = build_word_search(open_lexicon("default", CLASSES), open_model("default"), SETTINGS, boundary=SILENCE)
    rows: list[Row] = []
    for path in sorted(folder.glob("known-*.npz")):
        seed = path.stem.split("-")[1]
        known = decode(search, path, path.with_suffix(".jsonl"))
        sessions = sorted({d.session for d in known})
        first = [d for d in known if d.session in sessions[::2]]
        rows += judge(f"seed {seed}", first, [d for d in known if d.session in sessions[1::2]])
        later = path.with_name(f"later-{seed}.npz")
        rows += judge(f"seed {seed}, later days", known, decode(search, later, later.with_suffix(".jsonl"), every))
    return rows


def default(folder: Path) -> ConfidenceConfig:
    """The calibration on the known sessions of all cohorts."""
    search = build_word_search(open_lexicon("default", CLASSES), open_model("default"), SETTINGS, boundary=SILENCE)
    lists, cohorts = [], []
    for path in sorted(folder.glob("known-*.npz")):
        found = decode(search, path, path.with_suffix(".jsonl"))
        lists += [(d.n_best, d.frames, d.text) for d in found]
        cohorts += [path.stem] * len(found)
    return fit_confidence(lists, cohorts, SETTINGS, calibrated_on=f"{len(set(cohorts))} simulated cohorts")


def table(rows: Sequence[Row]) -> str:
    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    lines = [
        "| evaluated on | method | words | correct | ECE | AUROC | accepted | of them correct |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        auroc = "–" if r.auroc is None else f"{r.auroc:.3f}"
        cells = (r.name, r.method, r.n, share(r.accuracy), f"{r.ece:.3f}", auroc, share(r.accepted), share(r.kept))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Means over the evaluated halves by method, and how often the target was met within two points."""
    columns = (
        "method",
        "ECE, mean (worst)",
        "AUROC, mean (worst)",
        "accepted",
        "of them correct (range)",
        "within 2 points",
    )
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for method in dict.fromkeys(r.method for r in rows):
        chosen = [r for r in rows if r.method == method]
        ece, auroc = np.array([r.ece for r in chosen]), np.array([r.auroc for r in chosen if r.auroc is not None])
        cells = [method, f"{ece.mean():.3f} ({ece.max():.3f})", f"{auroc.mean():.3f} ({auroc.min():.3f})", "", "", ""]
        kept = 100 * np.array([r.kept for r in chosen if r.kept is not None])
        if len(kept):
            held = [r.kept is not None and (abs(r.kept - 0.95) <= 0.02 or _all_accepted(r)) for r in chosen]
            cells[3] = f"{100 * np.mean([r.accepted or 0.0 for r in chosen]):.1f} %"
            cells[4] = f"{kept.mean():.1f} % ({kept.min():.1f} to {kept.max():.1f})"
            cells[5] = f"{sum(held)} of {len(chosen)}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _all_accepted(row: Row) -> bool:
    return row.accepted == 1.0 and (row.kept or 0.0) > 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("real")
    command.add_argument("--words", type=Path, required=True)
    command.add_argument("--lm", required=True)
    command = commands.add_parser("simulated")
    command.add_argument("--scores", type=Path, required=True)
    command.add_argument("--every", type=int, default=8, help="judge every n-th trial of the later days")
    command = commands.add_parser("default")
    command.add_argument("--scores", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "default":
        print(default(args.scores).model_dump_json(indent=1))
        return
    rows = real(args.words, args.lm) if args.command == "real" else simulated(args.scores, args.every)
    print(table(rows))
    for name in ("dev", "dev_nbest") if args.command == "real" else ("known sessions", "later days"):
        if args.command == "real":
            chosen = [r for r in rows if r.name.startswith(f"{name},")]
        else:
            chosen = [r for r in rows if ("later" in r.name) == (name == "later days")]
        print(f"\n{name}\n\n{summary(chosen)}")


if __name__ == "__main__":
    main()
