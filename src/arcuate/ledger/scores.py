"""The results of several runs on the same trials, side by side; what cannot be compared is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.paired import Arm
from arcuate.run import Run, read_json, read_jsonl


@dataclass(frozen=True)
class Scores:
    """Edits and reference lengths of one run, by trial."""

    run: Run
    split: str
    summary: Mapping[str, Any]
    errors: Mapping[str, int]  # by trial id
    lengths: Mapping[str, int]
    sessions: Mapping[str, str]

    @property
    def step(self) -> int | None:
        step = self.summary.get("step")
        return step if isinstance(step, int) else None


def selected_there(run: Run, summary: Mapping[str, Any]) -> bool:
    """Whether the checkpoint was chosen for its score on the very trials it is scored on; the last is not chosen."""
    if summary.get("selected_on") is None or summary.get("selected_on") != summary.get("split"):
        return False
    best, step = best_step(run), summary.get("step")
    return summary.get("label") != "last" and (best is None or step is None or step == best)


def best_step(run: Run) -> int | None:
    """The step of the checkpoint that `best` points to, if there is one."""
    link = run.checkpoints / "best"
    name = link.resolve().name if link.exists() else ""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdigit() and len(digits) < 16 else None


def read_scores(run: Run, split: str, label: str | None = None) -> Scores:
    """results/<split>[.<label>].jsonl, the trials that have a reference."""
    file = run.results_file(split, label)
    if not file.is_file():
        raise UserError(
            f"{run.path} has no results on {split}; make them with: arcuate evaluate {run.path} --split {split}"
        )
    summary_file = run.results_file(split, label, "json")
    summary = read_json(summary_file) if summary_file.is_file() else {}
    errors: dict[str, int] = {}
    lengths: dict[str, int] = {}
    sessions: dict[str, str] = {}
    for number, row in enumerate(read_jsonl(file), start=1):
        if row.get("n_tokens") in (None, 0):
            continue
        counts: list[Any] = [row.get(k) for k in ("substitutions", "insertions", "deletions", "n_tokens")]
        if not isinstance(row.get("trial"), str) or not all(isinstance(c, int) and c >= 0 for c in counts):
            raise UserError(f"{file} line {number} has no trial or no edit counts; evaluate {run.path} again")
        if row["trial"] in errors:
            raise UserError(f"{file} names the trial {row['trial']} twice; evaluate {run.path} again")
        errors[row["trial"]], lengths[row["trial"]] = sum(counts[:3]), counts[3]
        sessions[row["trial"]] = str(row.get("session", ""))
    if len(errors) < 2:
        raise UserError(f"{file} has {len(errors)} trials with a reference; a comparison needs two at least")
    return Scores(run, split, summary, errors, lengths, sessions)


def refuse_unlike(scores: Sequence[Scores]) -> None:
    """One sentence where two runs were not scored on the same trials."""
    first = scores[0]
    for other in scores[1:]:
        names = f"{first.run.path} and {other.run.path}"
        hashes = first.summary.get("data_hash"), other.summary.get("data_hash")
        same_trials = first.lengths.keys() == other.lengths.keys()
        if None not in hashes and hashes[0] != hashes[1]:
            raise UserError(
                f"{names} were scored on different data (the content hashes of {first.split} differ), so they cannot be"
                " compared; evaluate one of them on the store of the other with --data"
            )
        if not same_trials:
            n_shared = len(first.lengths.keys() & other.lengths.keys())
            raise UserError(
                f"{names} were scored on different trials ({len(first.lengths)} and {len(other.lengths)}, {n_shared} of"
                f" them shared), so they cannot be compared; evaluate both on the same {first.split} trials"
            )
        wrong = next((t for t, n in first.lengths.items() if other.lengths[t] != n), None)
        if wrong is not None:
            raise UserError(
                f"{names} have different references for the trial {wrong}, so they cannot be compared; evaluate both"
                " on the same store"
            )


def side_by_side(scores: Sequence[Scores]) -> Arm:
    """Runs that differ only in their seed as one arm, trials in the order of their ids."""
    trials = sorted(scores[0].lengths)
    lengths = np.array([scores[0].lengths[t] for t in trials], dtype=np.float64)  # (N,)
    errors = np.array([[s.errors[t] for t in trials] for s in scores], dtype=np.float64)  # (S, N)
    return Arm(errors, lengths)


def session_codes(scores: Scores) -> tuple[np.ndarray, list[str]]:
    """The session of each trial as a number, in the order of `side_by_side`, and their names."""
    names = sorted(set(scores.sessions.values()))
    codes = np.array([names.index(scores.sessions[t]) for t in sorted(scores.lengths)])  # (N,)
    return codes, names
