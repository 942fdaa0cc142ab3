"""Faults in the training data of a run: dead sessions, non-finite bins, wrong or padded labels, duplicated trials.

The store is searched without torch. Results of the training split (results/train.jsonl), or decoding it with the best
checkpoint, show labels that contradict what the model decodes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.alphabet import BLANK, boundary_index, encode, min_frames, token_unit
from arcuate.data.quality import contradicts_text
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.files import read_jsonl
from arcuate.progress import Progress, counted, percent
from arcuate.run import Run, RunLike, open_run

_SEVERE = 0.05  # fraction of the training trials above which a fault can explain a failed run
_MAX_BYTES = 2 << 30  # bins to read; larger stores are sampled, every n-th trial
_DEAD_CHANNELS = 0.5  # fraction of constant channels that makes a trial dead
_DEAD_TRIALS = 0.5  # fraction of dead trials that makes a session dead
_DECODES_WELL = 0.5  # median error rate of the training trials below which an outlier is suspicious
_OUTLIER, _MIN_OUTLIER = 6.0, 0.6  # robust SDs above the median, and the error rate of a mislabelled trial
_BETTER = 0.6  # ratio of error rates: the output of a trial fits the label of another one better
_MAX_LISTED = 20  # trials whose ids are named
_PREPARE_AGAIN = "prepare the source again, which excludes these trials"
_MAX_MATCHED = 200  # suspected trials whose output is compared with all other labels


@dataclass(frozen=True)
class DataFault:
    """One fault, the trials it affects, and what to do."""

    kind: str
    sentence: str
    remedy: str
    n_trials: int
    share: float  # fraction of the training trials
    trials: tuple[str, ...] = ()  # ids of the first affected trials
    severe: bool = False  # affects enough trials to explain a failed run


@dataclass(frozen=True)
class DataCheck:
    """Faults in the training data, the most severe first."""

    faults: tuple[DataFault, ...] = ()
    notes: tuple[str, ...] = ()
    n_train: int | None = None  # training trials; None if the store is not available


def check_data(
    run: RunLike, *, data: str | Path | None = None, decode_training: bool = False, progress: Progress | None = None
) -> DataCheck:
    """Search the store of a run for faults; `data` names the store if it was moved."""
    run = open_run(run)
    try:
        store = Store.open(Path(data) if data is not None else run.store_path())
    except UserError as error:
        if data is not None or decode_training:
            raise
        return DataCheck(notes=(f"the data were not checked: {error}",))
    sessions = set(run.data().get("sessions") or store.sessions)
    train = [t for t in store.trials if t.split == "train" and t.session in sessions and t.tokens is not None]
    used = [t for t in train if t.usable]
    notes = list(_note_excluded(train))
    faults = [*_check_bins(store, used, notes, progress), *_check_labels(run, store, used)]
    faults += _check_results(run, store, used, decode_training, notes, progress)
    ordered = sorted(faults, key=lambda fault: (not fault.severe, -fault.share))
    return DataCheck(tuple(ordered), tuple(notes), len(used))


def _fault(
    kind: str, text: str, remedy: str, trials: Sequence[TrialInfo], n_all: int, severe: float = _SEVERE
) -> Iterator[DataFault]:
    """A fault of these trials, if there are any; `text` follows "N of M training trials"."""
    if not trials:
        return
    share = len(trials) / max(1, n_all)
    ids = tuple(t.id for t in trials[:_MAX_LISTED])
    sentence = f"{len(trials):,} of {n_all:,} training trials {text} ({', '.join(ids[:3])}{', …' * (len(trials) > 3)})"
    yield DataFault(kind, sentence, remedy, len(trials), share, ids, share >= severe)


def _note_excluded(train: Sequence[TrialInfo]) -> Iterator[str]:
    """Trials that `arcuate prepare` excluded from training."""
    reasons = Counter(flag for t in train if not t.usable for flag in t.flags)
    if reasons:
        listed = ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common())
        yield f"{sum(not t.usable for t in train):,} of {len(train):,} training trials were excluded: {listed}"


def _check_bins(
    store: Store, used: Sequence[TrialInfo], notes: list[str], progress: Progress | None
) -> Iterator[DataFault]:
    """Non-finite values and constant channels."""
    n_bytes = 4 * store.n_channels * sum(t.n_bins for t in used)
    every = max(1, -(-n_bytes // _MAX_BYTES))
    scanned = used[::every]
    n = len(scanned)
    if every > 1:
        notes.append(f"bins were checked in one of every {every} training trials")
    non_finite, dead = [], []
    for i, trial in enumerate(scanned, start=1):
        bins = store.read_bins(trial)
        if not np.isfinite(bins).all():
            non_finite.append(trial)
        elif len(bins) and float((bins == bins[0]).all(axis=0).mean()) > _DEAD_CHANNELS:
            dead.append(trial)
        if progress:
            progress(i, n, "checking trials")
    text, remedy = "contain NaN or infinite bins, which the model reads as 0", "or repair them"
    yield from _fault("non-finite bins", text, f"{_PREPARE_AGAIN}, {remedy}", non_finite, n, 0.0)
    per_session = Counter(t.session for t in scanned)
    dead_sessions = [s for s, k in Counter(t.session for t in dead).items() if k > _DEAD_TRIALS * per_session[s]]
    text = "are constant in most channels"
    for session in dead_sessions:
        remedy = f"remove session {session} (data.sessions), or prepare its source again"
        affected = [t for t in dead if t.session == session]
        yield from _fault("dead session", f"{text}: session {session} has no signal", remedy, affected, n, 0.0)
    others = [t for t in dead if t.session not in dead_sessions]
    yield from _fault("dead trials", text, _PREPARE_AGAIN, others, n)


def _check_labels(run: Run, store: Store, used: Sequence[TrialInfo]) -> Iterator[DataFault]:
    """Padded labels, labels that contradict their sentence or are too long for the frames, and copies of trials."""
    edge, seen = boundary_index(store.classes), set[str]()
    patch = run.recipe_tree().get("front_end", {}).get("patch", {})
    bins, stride = (patch.get("bins"), patch.get("stride") or 1) if isinstance(patch, Mapping) else (None, 1)

    def is_long(trial: TrialInfo) -> bool:
        n_frames = max(0, trial.n_bins - bins) // stride + 1 if isinstance(bins, int) else np.inf
        return min_frames(trial.tokens or ()) > n_frames

    def is_copy(trial: TrialInfo) -> bool:
        known = trial.sha256 in seen
        seen.update(filter(None, [trial.sha256]))
        return known

    unit = token_unit(store.classes)
    checks: tuple[tuple[str, str, str, Callable[[TrialInfo], bool]], ...] = (
        ("padded labels", "have a padded label, ending in repeated silence or blanks",
         "write the true length of each label, and prepare the source again",
         lambda t: BLANK in (t.tokens or ()) or (t.tokens or ())[-2:] == (edge, edge)),
        ("labels", "have a label that contradicts their sentence",  # apart from its padding
         "correct the labels of these trials, or exclude them, and prepare the source again",
         lambda t: contradicts_text(t.tokens or (), t.text, store.classes)),
        ("labels longer than the frames", f"have more {unit}s than frames and are left out of training",
         f"lower front_end.patch.stride, now {stride}", is_long),
        ("duplicated trials", "are copies of another trial", "remove the copies from the source, and prepare it again",
         is_copy),
    )  # fmt: skip
    for kind, text, remedy, is_faulty in checks:
        yield from _fault(kind, text, remedy, [t for t in used if is_faulty(t)], len(used))


# Comparison of labels with the output of the model.


@dataclass(frozen=True)
class _Decoded:
    trial: TrialInfo
    label: tuple[int, ...]
    output: tuple[int, ...]
    per: float


def _check_results(
    run: Run, store: Store, used: Sequence[TrialInfo], decode: bool, notes: list[str], progress: Progress | None
) -> Iterator[DataFault]:
    """Trials whose output contradicts their label, although the model decodes the others well."""
    file = run.results_file("train")
    if decode and not file.is_file():
        from arcuate.evaluation.evaluate import evaluate  # imports torch

        evaluate(run, split="train", data=store.path, progress=progress)
    known = {t.id: t for t in used}
    rows = read_jsonl(file) if file.is_file() else []
    decoded = [d for row in rows if (d := _parse_row(row, known, store.classes)) is not None]
    if len(decoded) < 10:
        return
    rates = np.array([d.per for d in decoded])
    middle = float(np.median(rates))
    shown = f"median error rate {percent(middle)}"
    if middle > _DECODES_WELL:
        notes.append(f"labels cannot be checked against the output of the training trials: {shown}")
        return
    yield from _bad_sessions(decoded)
    limit = max(_MIN_OUTLIER, middle + _OUTLIER * 1.4826 * float(np.median(np.abs(rates - middle))))
    suspects = [d for d in decoded if d.per > limit]
    suspects = [d for d in suspects if not contradicts_text(d.label, d.trial.text, store.classes)]
    if not suspects:
        checked = counted(len(decoded), "training trial")
        notes.append(f"no label contradicts the output of the model: {checked} decoded, {shown}")
    text, swapped = f"are decoded as something other than their label ({shown})", _find_swaps(suspects, decoded)
    if swapped:
        own, other = swapped[0]
        n = counted(len(swapped), "trial")
        text += f"; the output of {n} fits the label of another, such as {own} that of {other}"
    remedy = "check the labels of these trials against the recordings"
    yield from _fault("suspected labels", text, remedy, [d.trial for d in suspects], len(decoded))


def _parse_row(row: Mapping[str, Any], known: Mapping[str, TrialInfo], classes: Sequence[str]) -> _Decoded | None:
    trial = known.get(str(row.get("trial")))
    reference, output = row.get("reference"), row.get("hypothesis")
    if trial is None or not isinstance(reference, list) or not isinstance(output, list) or not reference:
        return None
    try:
        label, hypothesis = (tuple(encode(map(str, names), classes)) for names in (reference, output))
    except (KeyError, ValueError, UserError):
        return None  # tokens of another alphabet
    return _Decoded(trial, label, hypothesis, Levenshtein.distance(label, hypothesis) / len(label))


def _bad_sessions(decoded: Sequence[_Decoded]) -> Iterator[DataFault]:
    """Sessions that are decoded much worse than the others."""
    sessions = defaultdict(list)
    for d in decoded:
        sessions[d.trial.session].append(d)
    rates = {name: float(np.median([d.per for d in found])) for name, found in sessions.items() if len(found) >= 10}
    middle = float(np.median(list(rates.values()))) if len(rates) >= 3 else np.inf
    for name, rate in rates.items():
        if rate > max(_MIN_OUTLIER, 2 * middle):
            text = f"belong to session {name} with {percent(rate)} errors; the median session has {percent(middle)}"
            remedy = f"inspect session {name}, or leave it out (data.sessions)"
            affected = [d.trial for d in sessions[name]]
            yield from _fault("session without information", text, remedy, affected, len(decoded))


def _find_swaps(suspects: Sequence[_Decoded], decoded: Sequence[_Decoded]) -> list[tuple[str, str]]:
    """Pairs of trials: the output of the first fits the label of the second much better than its own."""
    found = []
    for d in (d for d in suspects[:_MAX_MATCHED] if d.output):
        rates = [(Levenshtein.distance(d.output, o.label) / len(o.label), o) for o in decoded if o is not d]
        rate, other = min(rates, key=lambda pair: pair[0])
        if rate < _BETTER * d.per:
            found.append((d.trial.id, other.trial.id))
    return found
