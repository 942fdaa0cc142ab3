"""The results of several runs on the same trials, side by side; what cannot be compared is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.evaluation.significance import Arm, Contrast
from arcuate.files import read_json, read_jsonl
from arcuate.run import Run


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


# Differences in words: what was found, how large, how sure, and what was not asked.

ALPHA = 0.05


def points(rate: float, digits: int = 1) -> str:
    """A difference of error rates in points of per cent, without its sign."""
    return f"{abs(100 * rate):.{digits}f}"


def interval(c: Contrast) -> str:
    """The interval of the size of the difference, in points: how much better, or how much worse."""
    low, high = (c.low, c.high) if c.estimate >= 0 else (-c.high, -c.low)
    return f"{100 * low:.1f} to {100 * high:.1f}".replace("-", "−")


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def compared_sentence(b: str, a: str, c: Contrast, p_adjusted: float, n_asked: int) -> str:
    """Whether B is better than A, in one or two plain sentences."""
    level = f"{100 * c.level:.0f} % interval"
    counted = (
        f", {p_text(p_adjusted)} adjusted for {n_asked} comparisons" if n_asked > 1 else f", {p_text(c.p)}"
    )
    if c.estimate == 0 and c.low == c.high == 0:
        return f"{b} and {a} make the same number of errors in every trial."
    size = f"({level} {interval(c)} points{counted})"
    found = f"PER is {'lower' if c.estimate < 0 else 'higher'} by {points(c.estimate)} points"
    if p_adjusted < ALPHA:
        side = "better" if c.estimate < 0 else "worse"
        sentence = f"{b} is {side} than {a} by {points(c.estimate)} points of PER {size}."
    elif c.p < ALPHA:
        sentence = (
            f"No evidence of a difference between {b} and {a} once {n_asked} comparisons are accounted for:"
            f" {found} {size}."
        )
    else:
        sentence = f"No evidence of a difference between {b} and {a}: {found} {size}."
    return sentence + caveat(c)


def caveat(c: Contrast) -> str:
    """What the interval does not cover."""
    if not c.seeds_counted:
        return " One run a side: whether another seed would say the same was not asked."
    if min(c.n_runs) == 1:
        return " One side has a single run; its spread over seeds is taken from the other."
    return ""


def method(c: Contrast) -> str:
    """How the interval came about, for the small print."""
    drawn = f"{c.n_trials} trials" if c.over == "trials" else f"the sessions of {c.n_trials} trials"
    if c.method == "bootstrap":
        return f"Paired bootstrap over {drawn}; PER is summed edits over summed lengths."
    runs = " and ".join(str(n) for n in c.n_runs)
    seeds = f", and over seeds ({runs} runs)" if c.seeds_counted else ""
    spread = f"Variance over {drawn}{seeds}, t with {c.df:.1f} degrees of freedom"
    return f"{spread}; PER is summed edits over summed lengths."
