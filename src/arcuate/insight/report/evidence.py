"""What a run folder holds, read once and made safe to draw: what is missing is None or empty."""

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.files import read_json, read_jsonl
from arcuate.insight.report.markup import number, whole
from arcuate.run import Run

ORDER = ("val", "test", "dev", "train")  # which results to show where none are asked for


@dataclass(frozen=True)
class Decoding:
    """One line of the results: a trial, what it says and what was read."""

    trial: str
    session: str
    block: str
    text: str | None
    reference: tuple[str, ...] | None
    hypothesis: tuple[str, ...]
    score: Score | None
    flags: tuple[str, ...] = ()

    @property
    def rate(self) -> float | None:
        return self.score.rate if self.score else None


@dataclass(frozen=True)
class Example:
    """A whole trial for a picture."""

    trial: str
    bins: np.ndarray  # (T, C)
    log_probs: np.ndarray  # (F, V)


@dataclass(frozen=True)
class Results:
    split: str
    summary: Mapping[str, Any]
    decodings: tuple[Decoding, ...]
    examples: tuple[Example, ...]
    examples_problem: str | None = None

    @property
    def total(self) -> Score:
        return total(d.score for d in self.decodings if d.score)

    @property
    def rate(self) -> float | None:
        return number(self.summary.get("per"))

    @property
    def interval(self) -> tuple[float, float] | None:
        low, high = number(self.summary.get("per_low")), number(self.summary.get("per_high"))
        return (low, high) if low is not None and high is not None else None

    @property
    def n_trials(self) -> int:
        return whole(self.summary.get("n_trials")) or len(self.decodings)


@dataclass(frozen=True)
class Evidence:
    run: Run
    recipe_text: str
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    training: tuple[Mapping[str, Any], ...]  # logged steps in order, each step once
    validation: Mapping[str, tuple[Mapping[str, Any], ...]]  # the same by split
    results: Results | None
    others: tuple[tuple[str, Mapping[str, Any]], ...]  # further results of the folder: name, summary

    def setting(self, path: str) -> Any:
        """A setting of the recipe by its dotted path; None where it has none."""
        return lookup(self.recipe, path)

    @property
    def selected_on(self) -> str | None:
        """The split whose error rate chose the checkpoint."""
        chosen = self.results.summary.get("selected_on") if self.results else None
        chosen = chosen or self.environment.get("selected_on")
        return str(chosen) if chosen else None

    @property
    def sessions(self) -> tuple[str, ...]:
        """The sessions of the data in the order they were recorded."""
        listed = lookup(self.environment, "data.sessions")
        return tuple(str(s) for s in listed) if isinstance(listed, list) else ()

    @property
    def last_step(self) -> int | None:
        steps = [
            row["step"] for row in (*self.training, *(r for rows in self.validation.values() for r in rows))
        ]
        return max(steps, default=None)

    @property
    def best(self) -> tuple[str, int, float] | None:
        """Split, step and error rate of the best validation in the log; the split that selects goes first."""
        splits = [self.selected_on] if self.selected_on in self.validation else list(self.validation)
        rates = [
            (rate, number(row.get("loss")) or 0.0, row["step"], split)  # ties go to the lower loss
            for split in splits
            if split is not None
            for row in self.validation[split]
            if (rate := number(row.get("per"))) is not None
        ]
        if not rates:
            return None
        rate, _, step, split = min(rates)
        return split, step, rate

    @property
    def seconds(self) -> float | None:
        """Time of training, added up from the logged time per step."""
        spent, before = 0.0, 0
        for row in self.training:
            each = number(lookup(row, "cost.seconds_per_step"))
            if each is not None:
                spent += each * (row["step"] - before)
            before = row["step"]
        return spent or None


def lookup(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def gather(run: Run, split: str | None = None) -> Evidence:
    """Everything the report needs; `split` None takes the most telling results of the folder."""
    text = run.recipe_file.read_text("utf-8", errors="replace") if run.recipe_file.exists() else ""
    rows = run.metrics()
    chosen = choose(run, split)
    splits = sorted(
        {str(row.get("split")) for row in rows if row.get("split") and row.get("split") != "train"}
    )
    return Evidence(
        run=run,
        recipe_text=text,
        recipe=parse(text),
        environment=run.environment() if run.environment_file.exists() else {},
        training=by_step(row for row in rows if row.get("split") == "train"),
        validation={name: by_step(r for r in rows if str(r.get("split")) == name) for name in splits},
        results=read_results(run, chosen) if chosen else None,
        others=tuple(
            (name, read_json(summary))
            for name, summary in found(run).items()
            if name != chosen and summary.exists()
        ),
    )


def parse(text: str) -> Mapping[str, Any]:
    """The recipe as a tree; one of another version or an unreadable one is still shown as text."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def by_step(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Rows in order of their step; of a step that was run twice the later row counts."""
    kept = {step: {**row, "step": step} for row in rows if (step := whole(row.get("step"))) is not None}
    return tuple(kept[step] for step in sorted(kept))


def found(run: Run) -> dict[str, Path]:
    """The results of the folder: name (split, or split.label) and its summary."""
    names = sorted(p.name.removesuffix(".jsonl") for p in (run.path / "results").glob("*.jsonl"))
    return {name: run.path / "results" / f"{name}.json" for name in names if not name.startswith(".")}


def choose(run: Run, split: str | None) -> str | None:
    names = found(run)
    if split is not None:
        if split not in names:
            raise UserError(
                f"{run.path} has no results on {split!r};"
                f" make them with: arcuate evaluate {run.path} --split {split}"
            )
        return split

    def rank(name: str) -> tuple[bool, int, str]:
        path = names[name]
        unscored = path.exists() and number(read_json(path).get("per")) is None
        return unscored, ORDER.index(name) if name in ORDER else len(ORDER), name

    return min(names, key=rank, default=None)


def read_results(run: Run, split: str) -> Results:
    path = run.results_file(split)
    decodings = tuple(to_decoding(row) for row in read_jsonl(path))
    summary_file = run.results_file(split, ending="json")
    summary = read_json(summary_file) if summary_file.exists() else summarise(decodings)
    examples, problem = read_examples(run.results_file(split, ending="npz"))
    return Results(split, summary, decodings, examples, problem)


def to_decoding(row: Mapping[str, Any]) -> Decoding:
    reference, hypothesis = row.get("reference"), row.get("hypothesis")
    read = words(hypothesis)
    wanted = words(reference) if isinstance(reference, list) else None
    return Decoding(
        trial=str(row.get("trial", "")),
        session=str(row.get("session", "")),
        block=str(row.get("block", "")),
        text=str(row["text"]) if row.get("text") else None,
        reference=wanted,
        hypothesis=read,
        score=score(wanted, read) if wanted is not None else None,
        flags=words(row.get("flags")),
    )


def words(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list) else ()


def summarise(decodings: tuple[Decoding, ...]) -> dict[str, Any]:
    """The part of a summary that the decodings alone can give."""
    scores = [d.score for d in decodings if d.score]
    low, high = bootstrap_interval(scores)
    return {"per": total(scores).rate, "per_low": low, "per_high": high, "n_trials": len(decodings)}


def read_examples(path: Path) -> tuple[tuple[Example, ...], str | None]:
    """Example trials, or why there are none."""
    if not path.exists():
        return (), None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return tuple(
                Example(str(trial), two_axes(arrays[f"bins_{i}"]), two_axes(arrays[f"log_probs_{i}"]))
                for i, trial in enumerate(arrays["trials"].reshape(-1)[:3])
            ), None
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        return (), f"{path.name} cannot be read: {error}"


def two_axes(array: np.ndarray) -> np.ndarray:
    if array.ndim != 2 or not array.size:
        raise ValueError(f"an example of shape {array.shape} where two axes are needed")
    return np.asarray(array, dtype=np.float64)
