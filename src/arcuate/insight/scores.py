"""Per-trial scores of runs on the same trials, and the wording of their differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.evaluation.metrics import run_rate_name
from arcuate.evaluation.significance import Arm, Contrast
from arcuate.files import read_json, read_jsonl
from arcuate.run import WORDS_LABEL, Run

ALPHA = 0.05


@dataclass(frozen=True)
class RunScores:
    """Edits and reference lengths of one run by trial."""

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

    @property
    def rate_name(self) -> str:
        """PER, or CER for a run on characters."""
        return run_rate_name(self.run)


def read_scores(run: Run, split: str, label: str | None = None) -> RunScores:
    """Read results/<split>[.<label>].jsonl; trials without a reference are omitted."""
    file = run.results_file(split, label)
    if not file.is_file():
        raise UserError(
            f"{run.path} has no results on {split}; create them with: arcuate evaluate {run.path} --split {split}"
        )
    summary_file = run.results_file(split, label, "json")
    summary = read_json(summary_file) if summary_file.is_file() else {}
    _check_last(run, summary, label, summary_file)
    errors: dict[str, int] = {}
    lengths: dict[str, int] = {}
    sessions: dict[str, str] = {}
    for number, row in enumerate(read_jsonl(file), start=1):
        if row.get("n_tokens") in (None, 0):
            continue
        counts: list[Any] = [row.get(k) for k in ("substitutions", "insertions", "deletions", "n_tokens")]
        if not isinstance(row.get("trial"), str) or not all(isinstance(c, int) and c >= 0 for c in counts):
            raise UserError(f"{file} line {number} lacks the trial or edit counts; evaluate {run.path} again")
        if row["trial"] in errors:
            raise UserError(f"{file} contains trial {row['trial']} twice; evaluate {run.path} again")
        errors[row["trial"]], lengths[row["trial"]] = sum(counts[:3]), counts[3]
        sessions[row["trial"]] = str(row.get("session", ""))
    if len(errors) < 2:
        raise UserError(f"{file} has {len(errors)} trials with a reference; a comparison needs at least two")
    return RunScores(run, split, summary, errors, lengths, sessions)


def read_word_scores(run: Run, split: str) -> RunScores:
    """Read results/<split>.words.jsonl, the latest decoding to words; trials without a reference are omitted."""
    file = run.results_file(split, WORDS_LABEL)
    summary = read_json(run.results_file(split, WORDS_LABEL, "json"))
    counts: dict[str, tuple[int, int]] = {}
    sessions: dict[str, str] = {}
    for number, row in enumerate(read_jsonl(file), start=1):
        name, errors, n_words = row.get("id"), row.get("errors"), row.get("n_words")
        if n_words in (None, 0):
            continue
        if not isinstance(name, str) or type(errors) is not int or type(n_words) is not int or min(errors, n_words) < 0:
            raise UserError(f"{file} line {number} lacks the trial or word counts; decode {run.path} again")
        if name in counts:
            raise UserError(f"{file} contains trial {name} twice; decode {run.path} again")
        counts[name], sessions[name] = (errors, n_words), str(row.get("session") or "")
    if len(counts) < 2:
        raise UserError(f"{file} has {len(counts)} trials with a reference; a comparison needs at least two")
    errors_by_trial = {name: errors for name, (errors, _) in counts.items()}
    lengths = {name: n_words for name, (_, n_words) in counts.items()}
    return RunScores(run, split, summary, errors_by_trial, lengths, sessions)


def check_same_word_search(scores: Sequence[RunScores]) -> None:
    """Raise if runs were decoded to words with different language models or lexicons."""
    first = scores[0]
    for other in scores[1:]:
        for name in ("lm", "lexicon"):
            values = [s.summary.get(name) for s in (first, other)]
            if values[0] != values[1]:
                raise UserError(
                    f"{first.run.path} and {other.run.path} were decoded to words with different settings ({name}"
                    f" {values[0]} and {values[1]}) and cannot be compared; decode both with the same"
                )


def _check_last(run: Run, summary: Mapping[str, Any], label: str | None, file: Path) -> None:
    """Reject results of the last checkpoint that were written before the run was continued."""
    link, scored = run.checkpoints / "last", summary.get("checkpoint")
    if label == "last" and isinstance(scored, str) and link.is_symlink() and link.readlink().name != scored:
        raise UserError(
            f"{file} scores {scored}, but the last checkpoint is now {link.readlink().name}; evaluate it again with:"
            f" arcuate evaluate {run.path}@last --label last"
        )


def check_same_trials(scores: Sequence[RunScores]) -> None:
    """Raise if two runs were not scored on the same trials."""
    first = scores[0]
    for other in scores[1:]:
        names = f"{first.run.path} and {other.run.path}"
        hashes = first.summary.get("data_hash"), other.summary.get("data_hash")
        if None not in hashes and hashes[0] != hashes[1]:
            raise UserError(
                f"{names} were scored on different data (the content hashes of {first.split} differ) and cannot be"
                " compared; evaluate one of them on the store of the other with --data"
            )
        if first.lengths.keys() != other.lengths.keys():
            n_shared = len(first.lengths.keys() & other.lengths.keys())
            raise UserError(
                f"{names} were scored on different trials ({len(first.lengths)} and {len(other.lengths)}, {n_shared}"
                f" in common) and cannot be compared; evaluate both on the same {first.split} trials"
            )
        different = next((t for t, n in first.lengths.items() if other.lengths[t] != n), None)
        if different is not None:
            raise UserError(
                f"{names} have different references for trial {different} and cannot be compared; evaluate both on the"
                " same store"
            )


def selected_on_scored_trials(run: Run, summary: Mapping[str, Any]) -> bool:
    """Whether the checkpoint was selected on the trials it is scored on; the last checkpoint is not selected."""
    if summary.get("selected_on") is None or summary.get("selected_on") != summary.get("split"):
        return False
    best, step = best_checkpoint_step(run), summary.get("step")
    return summary.get("label") != "last" and (best is None or step is None or step == best)


def best_checkpoint_step(run: Run) -> int | None:
    """The step of the checkpoint that `best` points to, if there is one."""
    link = run.checkpoints / "best"
    name = link.resolve().name if link.exists() else ""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdigit() and len(digits) < 16 else None


def to_arm(scores: Sequence[RunScores]) -> Arm:
    """Runs that differ only in their seed as one arm, trials sorted by id."""
    trials = sorted(scores[0].lengths)
    lengths = np.array([scores[0].lengths[t] for t in trials], dtype=np.float64)  # (N,)
    errors = np.array([[s.errors[t] for t in trials] for s in scores], dtype=np.float64)  # (S, N)
    return Arm(errors, lengths)


def session_codes(scores: RunScores) -> tuple[np.ndarray, list[str]]:
    """The session of each trial as an integer, in the order of `to_arm`, and the names of the sessions."""
    names = sorted(set(scores.sessions.values()))
    codes = np.array([names.index(scores.sessions[t]) for t in sorted(scores.lengths)])  # (N,)
    return codes, names


# Wording.


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def describe_difference(b: str, a: str, c: Contrast, p_adjusted: float, n_comparisons: int, metric: str) -> str:
    """Whether B is better than A, in one or two sentences."""
    if c.estimate == 0 and c.low == c.high == 0:
        return f"{b} and {a} make the same number of errors in every trial."
    low, high = (c.low, c.high) if c.estimate >= 0 else (-c.high, -c.low)
    interval = f"{100 * c.level:.0f} % interval {100 * low:.1f} to {100 * high:.1f}".replace("-", "−")
    corrected = f"Holm-adjusted {p_text(p_adjusted)} for {n_comparisons} comparisons"
    detail = f"({interval} points, {corrected if n_comparisons > 1 else p_text(c.p)})"
    size = f"{abs(100 * c.estimate):.1f} percentage points"
    if p_adjusted < ALPHA:
        side = "better" if c.estimate < 0 else "worse"
        return f"{b} is {side} than {a} by {size} of {metric} {detail}.{_caveat(c)}"
    after = f" after correction for {n_comparisons} comparisons" if c.p < ALPHA else ""
    direction = "lower" if c.estimate < 0 else "higher"
    return (
        f"No significant difference between {b} and {a}{after}: {metric} is {direction} by {size} {detail}.{_caveat(c)}"
    )


def _caveat(c: Contrast) -> str:
    """What the interval does not cover."""
    if not c.seeds_counted:
        return " One run per side: variation between seeds is not included."
    if min(c.n_runs) == 1:
        return " One side has a single run; its variation between seeds is estimated from the other."
    return ""


def describe_method(c: Contrast, metric: str) -> str:
    """How the interval was computed."""
    sampled = f"{c.n_trials} trials" if c.over == "trials" else f"the sessions of {c.n_trials} trials"
    if c.method == "bootstrap":
        return f"Paired bootstrap over {sampled}; {metric} is the sum of edits over the sum of reference lengths."
    runs = " and ".join(str(n) for n in c.n_runs)
    seeds = f" and over seeds ({runs} runs)" if c.seeds_counted else ""
    return (
        f"Variance over {sampled}{seeds}, t distribution with {c.df:.1f} degrees of freedom; {metric} is the sum of"
        " edits over the sum of reference lengths."
    )
