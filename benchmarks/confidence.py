"""Confidence of decoded words on sessions not used for calibration: ECE, AUROC, and the accuracy of accepted words.

arcuate lm import ../shared/real/words/t15/lm4.arpa.gz lm4.alm
python benchmarks/confidence.py real --words ../shared/real/words --lm lm4.alm
python benchmarks/confidence.py simulated --scores runs/simulated-days
python benchmarks/confidence.py default --scores runs/simulated-days    # the constants of decoding/config.py

`real`: frame scores of a real decoder; the sessions are halved at random (`--halvings` times, and in four fixed ways),
the confidences calibrated on one half and judged on the other. `simulated`: the files of simulated_days.py, one cohort
per seed; the four known sessions are halved, each half is judged with the calibration of the other, and both count as
one judgement; on later days, all known sessions calibrate. "Session" follows the words of a session without labels
(`SessionWords`), "fixed" has one threshold for all sessions, "score margin" is the naive confidence, the logistic
function of the difference between the two best totals of a sentence, as it is and calibrated (Platt 1999), and "as
shipped" is the default calibration of arcuate. The noise floor is the share of judgements within two points of 95 % of
a method whose accepted words are correct with a probability of exactly 95 %: only the sampling of the judged sentences
remains (normal approximation, sentences as clusters). `default` fits a calibration on the known sessions of all
cohorts, and the weight of the session on their known and later days; `word` and `accept_above` of it are shipped.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

from arcuate.data.alphabet import CLASSES, SILENCE
from arcuate.decoding.confidence import SESSION_WEIGHT, SessionWords, n_hypotheses, probability
from arcuate.decoding.config import ConfidenceConfig, DecodingConfig
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.evaluation.confidence import (
    Evidence,
    collect_evidence,
    fit_confidence,
    fit_logistic,
    measure_reliability,
)
from arcuate.evaluation.transcribe import read_references
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.open import open_model
from arcuate.models.layout import Frames

HALVES: dict[str, Callable[[int, int], bool]] = {  # session number, number of sessions -> in the first half
    "first / last sessions": lambda k, n: k < n // 2,
    "every second session": lambda k, n: k % 2 == 0,
    "every second pair": lambda k, n: (k // 2) % 2 == 0,
    "a mixed half": lambda k, n: (7 * k % 11) % 2 == 0,
}
SETTINGS = DecodingConfig()
TARGET, TOLERANCE = 0.95, 0.02
WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8)  # of the session, tried by `default`


@dataclass(frozen=True, eq=False)
class Judged:
    """Confidences and outcomes of the words of judged sentences."""

    confidences: np.ndarray
    accepted: np.ndarray | None  # bool; None: the method does not accept words
    correct: np.ndarray
    sentence: np.ndarray  # number of each word's sentence


@dataclass(frozen=True)
class Row:
    """One judgement of a method."""

    name: str
    method: str
    n: int
    accuracy: float
    ece: float
    auroc: float | None
    accepted: float | None
    kept: float | None  # accuracy of the accepted words
    noise: float | None  # its standard error by the sampling of sentences


def decode(search: WordSearch, scores: Path, references: Path, every: int = 1) -> list[Evidence]:
    frames = read_frames(scores)
    texts = read_references(references, len(frames.trials), frames.ids)
    n = n_hypotheses(search, 2)
    found = (
        collect_evidence(search.search(Frames(trial), n), trial, r.text, r.session, SETTINGS.lm_weight)
        for trial, r in list(zip(frames.trials, texts, strict=True))[::every]
    )
    return [e for e in found if e is not None]


def judge(trials: Sequence[Evidence], judged: Sequence[Evidence], name: str) -> dict[str, Judged]:
    """Calibrate on `trials`; all methods on `judged`."""
    model = fit_confidence(trials, SETTINGS.confidence, calibrated_on=name)
    (margins, right), (other_margins, _) = margin_of(trials), margin_of(judged)
    platt = fit_logistic(margins[:, None], right)
    correct, sentence = _outcomes(judged)
    calibrated = probability(platt.log_odds(other_margins[:, None]))
    return {
        "calibrated, session": apply(judged, model),
        "calibrated, fixed": apply(judged, model.model_copy(update={"log_odds": ()})),
        "score margin": Judged(probability(other_margins), None, correct, sentence),
        "score margin, calibrated": Judged(calibrated, None, correct, sentence),
        "as shipped": apply(judged, SETTINGS.confidence),
    }


def apply(trials: Sequence[Evidence], model: ConfidenceConfig, weight: float = SESSION_WEIGHT) -> Judged:
    """Confidences of trials in their order, session by session."""
    sessions: dict[str | None, SessionWords] = {}
    confidences, accepted = [], []
    for d in trials:
        log_odds = model.word.log_odds(d.features)
        shift, threshold = sessions.setdefault(d.session, SessionWords(model, weight)).add(log_odds)
        confidences.append(probability(log_odds + shift))
        accepted.append(confidences[-1] >= threshold)
    return Judged(np.concatenate(confidences), np.concatenate(accepted), *_outcomes(trials))


def _outcomes(trials: Sequence[Evidence]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each word is correct, and the number of its sentence."""
    n_words = [len(d.correct) for d in trials]
    return np.concatenate([d.correct for d in trials]), np.repeat(np.arange(len(trials)), n_words)


def merge(parts: Sequence[Judged]) -> Judged:
    """Several judged sets as one."""
    first = parts[0]
    sentences = [part.sentence + 1_000_000 * k for k, part in enumerate(parts)]
    return Judged(
        np.concatenate([p.confidences for p in parts]),
        None if first.accepted is None else np.concatenate([p.accepted for p in parts if p.accepted is not None]),
        np.concatenate([p.correct for p in parts]),
        np.concatenate(sentences),
    )


def to_row(name: str, method: str, found: Judged) -> Row:
    measured = measure_reliability(found.confidences, found.correct)
    row = Row(name, method, measured.n, measured.accuracy, measured.ece, measured.auroc, None, None, None)
    if found.accepted is None or not found.accepted.any():
        return row
    kept = found.correct[found.accepted]
    noise = standard_error(kept, found.sentence[found.accepted])
    return replace(row, accepted=float(found.accepted.mean()), kept=float(kept.mean()), noise=noise)


def standard_error(correct: np.ndarray, sentence: np.ndarray) -> float:
    """Standard error of the share of correct words, with sentences as clusters; at the target if all are correct."""
    if correct.all():
        return float(np.sqrt(TARGET * (1 - TARGET) / len(correct)))
    residuals = np.bincount(np.unique(sentence, return_inverse=True)[1], correct - correct.mean())
    return float(np.sqrt((residuals**2).sum()) / len(correct))


def margin_of(trials: Sequence[Evidence]) -> tuple[np.ndarray, np.ndarray]:
    """Score margin and outcome of every word."""
    margins: list[float] = []
    for d in trials:
        totals = d.totals.tolist()
        margins += [min(30.0, totals[0] - totals[1]) if len(totals) > 1 else 30.0] * len(d.correct)
    return np.array(margins), np.concatenate([d.correct for d in trials])


def real(words: Path, lm: str, halvings: int) -> list[Row]:
    model, rows = open_model(lm), []
    for name in ("dev", "dev_nbest"):
        lexicon = open_lexicon(str(words / "t15" / "lexicon.txt"), CLASSES)
        search = build_word_search(lexicon, model, SETTINGS, boundary=SILENCE)
        trials = decode(search, words / "t15" / f"{name}.npz", words / "t15" / f"{name}.jsonl")
        sessions = sorted({str(d.session) for d in trials})
        rng = np.random.default_rng(0)
        splits = [
            (f"{name}, four fixed ways", {s for k, s in enumerate(sessions) if is_first(k, len(sessions))})
            for is_first in HALVES.values()
        ]
        splits += [
            (f"{name}, random halves", set(rng.permutation(sessions)[: len(sessions) // 2].tolist()))
            for _ in range(halvings)
        ]
        for label, chosen in splits:
            first = [d for d in trials if d.session in chosen]
            second = [d for d in trials if d.session not in chosen]
            for a, b in ((first, second), (second, first)):
                rows += [to_row(label, method, found) for method, found in judge(a, b, label).items()]
    return rows


def read_cohorts(folder: Path, every: int) -> dict[str, tuple[list[Evidence], list[Evidence]]]:
    """Known sessions and later days by seed."""
    search = build_word_search(open_lexicon("default", CLASSES), open_model("default"), SETTINGS, boundary=SILENCE)
    cohorts = {}
    for path in sorted(folder.glob("known-*.npz"), key=lambda p: int(p.stem.split("-")[1])):
        later = path.with_name(path.name.replace("known", "later"))
        cohorts[path.stem.split("-")[1]] = (
            decode(search, path, path.with_suffix(".jsonl")),
            decode(search, later, later.with_suffix(".jsonl"), every),
        )
    return cohorts


def simulated(folder: Path, every: int) -> list[Row]:
    rows: list[Row] = []
    for seed, (known, later) in read_cohorts(folder, every).items():
        sessions = sorted({str(d.session) for d in known})
        halves = [[d for d in known if d.session in sessions[k::2]] for k in (0, 1)]
        parts = [judge(halves[k], halves[1 - k], f"seed {seed}") for k in (0, 1)]
        rows += [to_row("known sessions", method, merge([part[method] for part in parts])) for method in parts[0]]
        found = judge(known, later, f"seed {seed}")
        rows += [to_row("later days", method, judged) for method, judged in found.items()]
        print(f"seed {seed}: {rows[-len(found) * 2]}\n  {rows[-len(found)]}", flush=True)
    return rows


def default(folder: Path, every: int) -> ConfidenceConfig:
    """Calibration on the known sessions of all cohorts; the weight of the session from known and later days.

    The weight minimises the mean absolute distance from the target over known sessions and later days of all cohorts,
    each judged with the calibration of all others.
    """
    cohorts = read_cohorts(folder, every)
    distances = np.zeros((len(cohorts), 2, len(WEIGHTS)))
    for i, seed in enumerate(cohorts):
        model = _fit_cohorts({s: pair for s, pair in cohorts.items() if s != seed})
        for k, weight in enumerate(WEIGHTS):
            for part, trials in enumerate(cohorts[seed]):
                found = apply(trials, model, weight)
                kept = found.correct[found.accepted] if found.accepted is not None else np.empty(0)
                distances[i, part, k] = abs(kept.mean() - TARGET) if len(kept) else 1 - TARGET
    mean = distances.mean(axis=(0, 1))
    for k, weight in enumerate(WEIGHTS):
        known, later = 100 * distances[:, :, k].mean(axis=0)
        print(
            f"session_weight {weight}: {known:.2f} points from the target on known sessions, {later:.2f} on later days"
        )
    print(f"best: {WEIGHTS[int(mean.argmin())]}")
    return _fit_cohorts(cohorts)


def _fit_cohorts(cohorts: dict[str, tuple[list[Evidence], list[Evidence]]]) -> ConfidenceConfig:
    """Cohorts as the folds of the threshold."""
    trials = [replace(d, session=seed) for seed, (known, _) in cohorts.items() for d in known]
    return fit_confidence(trials, SETTINGS.confidence, calibrated_on=f"{len(cohorts)} simulated cohorts")


def summary(rows: Sequence[Row]) -> str:
    """Means by judged set and method, and how often the target was met within two points."""
    head = "judged on|method|judgements|ECE, mean (worst)|AUROC, mean (worst)|accepted|of them correct (range)"
    columns = [*head.split("|"), "within 2 points", "noise floor"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name in dict.fromkeys(r.name for r in rows):
        for method in dict.fromkeys(r.method for r in rows):
            chosen = [r for r in rows if r.method == method and r.name == name]
            ece, auroc = np.array([r.ece for r in chosen]), np.array([r.auroc for r in chosen if r.auroc is not None])
            cells = [name, method, str(len(chosen)), f"{ece.mean():.3f} ({ece.max():.3f})"]
            cells += [f"{auroc.mean():.3f} ({auroc.min():.3f})", "", "", "", ""]
            kept = np.array([r.kept for r in chosen if r.kept is not None])
            if len(kept):
                noise = np.array([r.noise for r in chosen if r.noise is not None])
                held = np.abs(kept - TARGET) <= TOLERANCE
                floor = (2 * stats.norm.cdf(TOLERANCE / noise) - 1).mean()
                cells[5] = f"{100 * np.mean([r.accepted or 0.0 for r in chosen]):.1f} %"
                cells[6] = f"{100 * kept.mean():.1f} % ({100 * kept.min():.1f} to {100 * kept.max():.1f})"
                cells[7] = f"{held.sum()} of {len(chosen)}"
                cells[8] = f"{100 * floor:.0f} %"
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("real")
    command.add_argument("--words", type=Path, required=True)
    command.add_argument("--lm", required=True)
    command.add_argument("--halvings", type=int, default=50)
    for name in ("simulated", "default"):
        command = commands.add_parser(name)
        command.add_argument("--scores", type=Path, required=True)
        command.add_argument("--every", type=int, default=4, help="use every n-th trial of the later days")
    args = parser.parse_args()
    if args.command == "default":
        print(default(args.scores, args.every).model_dump_json(indent=1))
    elif args.command == "real":
        print(summary(real(args.words, args.lm, args.halvings)))
    else:
        print(summary(simulated(args.scores, args.every)))


if __name__ == "__main__":
    main()
