"""Confidence of decoded words on sessions not used for calibration: ECE, AUROC, and the accuracy of accepted words.

arcuate lm import ../shared/real/words/t15/lm4.arpa.gz lm4.alm
python benchmarks/confidence.py real --words ../shared/real/words --lm lm4.alm
python benchmarks/confidence.py simulated --scores runs/simulated-days
python benchmarks/confidence.py default --scores runs/simulated-days    # the constants of decoding/config.py

`real`: frame scores of a real decoder; the sessions are halved at random (`--halvings` times), the confidences
calibrated on one half and judged on the other. `simulated`: the files of simulated_days.py, one cohort per seed; the
four known sessions are halved, each half is judged with the calibration of the other, and both count as one judgement;
on later days, all known sessions calibrate. "Session" follows the words of a session without labels (`SessionWords`),
"fixed" has one threshold for all sessions, "as shipped" is the default calibration of arcuate.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import percent, table

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.confidence import SESSION_WEIGHT, SessionWords, n_hypotheses, probability
from arcuate.decoding.config import ConfidenceConfig, DecodingConfig
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.evaluation.confidence import Evidence, collect_evidence, fit_confidence, measure_reliability
from arcuate.evaluation.sentences import Sentence, attach_references
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.open import open_model
from arcuate.models.layout import Frames

SETTINGS = DecodingConfig()
TARGET, TOLERANCE = 0.95, 0.02
WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8)  # of the session, tried by `default`


@dataclass(frozen=True, eq=False)
class Judged:
    """Confidences and outcomes of the words of judged sentences."""

    confidences: np.ndarray
    accepted: np.ndarray  # bool
    correct: np.ndarray

    def __add__(self, other: "Judged") -> "Judged":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Judged(*(np.concatenate(pair) for pair in pairs))

    @property
    def kept(self) -> float | None:
        """Accuracy of the accepted words."""
        return float(self.correct[self.accepted].mean()) if self.accepted.any() else None


Row = tuple[str, str, Judged]  # what was judged, and by which method


def decode(search: WordSearch, scores: Path, references: Path, every: int = 1) -> list[Evidence]:
    frames = read_frames(scores)
    texts = attach_references([Sentence(name) for name in frames.ids or ()], references, complete=True)
    n = n_hypotheses(search, 2)
    found = (
        collect_evidence(search.search(Frames(trial), n), trial, r.reference, r.session, SETTINGS.lm_weight)
        for trial, r in list(zip(frames.trials, texts, strict=True))[::every]
    )
    return [e for e in found if e is not None]


def judge(trials: Sequence[Evidence], judged: Sequence[Evidence], name: str) -> dict[str, Judged]:
    """Calibrate on `trials`; all methods on `judged`."""
    model = fit_confidence(trials, SETTINGS.confidence, calibrated_on=name)
    return {
        "calibrated, session": apply(judged, model),
        "calibrated, fixed": apply(judged, model.model_copy(update={"log_odds": ()})),
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
    outcomes = np.concatenate([d.correct for d in trials])
    return Judged(np.concatenate(confidences), np.concatenate(accepted), outcomes)


def real(words: Path, lm: str, halvings: int) -> list[Row]:
    model, rows = open_model(lm), []
    for name in ("dev", "dev_nbest"):
        lexicon = open_lexicon(str(words / "t15" / "lexicon.txt"), CLASSES)
        search = build_word_search(lexicon, model, SETTINGS)
        trials = decode(search, words / "t15" / f"{name}.npz", words / "t15" / f"{name}.jsonl")
        sessions, rng = sorted({str(d.session) for d in trials}), np.random.default_rng(0)
        for _ in range(halvings):
            chosen = set(rng.permutation(sessions)[: len(sessions) // 2].tolist())
            halves = [[d for d in trials if (d.session in chosen) is first] for first in (True, False)]
            for a, b in (halves, halves[::-1]):
                rows += [(name, method, found) for method, found in judge(a, b, name).items()]
    return rows


def read_cohorts(folder: Path, every: int) -> dict[str, tuple[list[Evidence], list[Evidence]]]:
    """Known sessions and later days by seed."""
    search = build_word_search(open_lexicon("default", CLASSES), open_model("default"), SETTINGS)
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
        rows += [("known sessions", method, parts[0][method] + parts[1][method]) for method in parts[0]]
        rows += [("later days", method, found) for method, found in judge(known, later, f"seed {seed}").items()]
        print(f"seed {seed} done", flush=True)
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
                distances[i, part, k] = 1 - TARGET if found.kept is None else abs(found.kept - TARGET)
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
    lines = []
    for name, method in dict.fromkeys((name, method) for name, method, _ in rows):
        chosen = [found for *key, found in rows if key == [name, method]]
        measured = [measure_reliability(found.confidences, found.correct) for found in chosen]
        ece, auroc = np.array([m.ece for m in measured]), np.array([m.auroc for m in measured if m.auroc is not None])
        kept = np.array([found.kept for found in chosen if found.kept is not None])
        cells = [name, method, str(len(chosen)), f"{ece.mean():.3f} ({ece.max():.3f})"]
        cells += [
            f"{auroc.mean():.3f} ({auroc.min():.3f})",
            percent(float(np.mean([f.accepted.mean() for f in chosen]))),
        ]
        cells += [f"{percent(kept.mean())} ({percent(kept.min())} to {percent(kept.max())})"] if len(kept) else ["–"]
        lines.append([*cells, f"{(np.abs(kept - TARGET) <= TOLERANCE).sum()} of {len(chosen)}"])
    head = "judged on|method|judgements|ECE, mean (worst)|AUROC, mean (worst)|accepted|of them correct (range)"
    return table([*head.split("|"), "within 2 points"], lines)


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
