"""Faults in the training data of a run: dead sessions, non-finite bins, wrong or padded labels, duplicated trials.

The store is searched without torch. Results of the training split (results/train.jsonl), or decoding it with the best
checkpoint, show labels that contradict what the model decodes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.alphabet import BLANK, boundary_index, encode, min_frames, token_unit
from arcuate.data.quality import contradicts_text
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.files import fields_to_dict, read_jsonl
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

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


@dataclass(frozen=True)
class DataCheck:
    """Faults in the training data, the most severe first."""

    faults: tuple[DataFault, ...] = ()
    notes: tuple[str, ...] = ()
    n_train: int | None = None  # training trials; None if the store is not available

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_dict(self, "faults"), "faults": [fault.to_dict() for fault in self.faults]}


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
    faults = [*_check_bins(store, used, notes, progress), *_check_labels(run, store, used), *_check_copies(used)]
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
    if every > 1:
        notes.append(f"bins were checked in one of every {every} training trials")
    non_finite, dead = [], []
    for i, trial in enumerate(scanned, start=1):
        bins = store.read_bins(trial)
        finite = np.isfinite(bins)
        if not finite.all():
            non_finite.append(trial)
        elif len(bins) and float((bins == bins[0]).all(axis=0).mean()) > _DEAD_CHANNELS:
            dead.append(trial)
        if progress:
            progress(i, len(scanned), "checking trials")
    n = len(scanned)
    yield from _fault(
        "non-finite bins", "contain NaN or infinite bins, which the model reads as 0",
        "prepare the source again, which excludes these trials, or repair them", non_finite, n, 0.0,
    )  # fmt: skip
    per_session = Counter(t.session for t in scanned)
    dead_sessions = [s for s, k in Counter(t.session for t in dead).items() if k > _DEAD_TRIALS * per_session[s]]
    for session in dead_sessions:
        affected = [t for t in dead if t.session == session]
        yield from _fault(
            "dead session", f"are constant in most channels: session {session} has no signal",
            f"remove session {session} (data.sessions), or prepare its source again", affected, n, 0.0,
        )  # fmt: skip
    others = [t for t in dead if t.session not in dead_sessions]
    yield from _fault(
        "dead trials", "are constant in most channels", "prepare the source again, which excludes them", others, n
    )


def _check_labels(run: Run, store: Store, used: Sequence[TrialInfo]) -> Iterator[DataFault]:
    """Padded labels, labels that contradict their sentence, and labels too long for the frames of the model."""
    n = len(used)
    edge = boundary_index(store.classes)
    padded = [t for t in used if t.tokens and (BLANK in t.tokens or t.tokens[-2:] == (edge, edge))]
    remedy = "write the true length of each label, and prepare the source again"
    yield from _fault("padded labels", "have a padded label, ending in repeated silence or blanks", remedy, padded, n)
    # Padding is a fault of its own; the comparison with the sentence ignores it.
    wrong = [t for t in used if t.text and t.tokens and contradicts_text(t.tokens, t.text, store.classes)]
    yield from _fault(
        "labels", "have a label that contradicts their sentence",
        "correct the labels of these trials, or exclude them, and prepare the source again", wrong, n,
    )  # fmt: skip
    patch = run.recipe_tree().get("front_end", {}).get("patch", {})
    if isinstance(patch, Mapping) and isinstance(bins := patch.get("bins"), int):
        stride = patch.get("stride") or 1
        long = [t for t in used if min_frames(t.tokens or ()) > max(0, t.n_bins - bins) // stride + 1]
        yield from _fault(
            "labels longer than the frames",
            f"have more {token_unit(store.classes)}s than frames and are left out of training",
            f"lower front_end.patch.stride, now {stride}", long, n,
        )  # fmt: skip


def _check_copies(used: Sequence[TrialInfo]) -> Iterator[DataFault]:
    counts = Counter(t.sha256 for t in used if t.sha256)
    seen: set[str] = set()
    copies = []
    for trial in used:
        if counts[trial.sha256] > 1 and trial.sha256 in seen:
            copies.append(trial)
        seen.add(trial.sha256)
    remedy = "remove the copies from the source, and prepare it again"
    yield from _fault("duplicated trials", "are copies of another trial", remedy, copies, len(used))


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
    if not file.is_file():
        return
    known = {t.id: t for t in used}
    decoded = [d for row in read_jsonl(file) if (d := _parse_row(row, known, store.classes)) is not None]
    if len(decoded) < 10:
        return
    rates = np.array([d.per for d in decoded])
    middle = float(np.median(rates))
    if middle > _DECODES_WELL:
        notes.append(
            "labels cannot be checked against the output: the median error rate of the training trials is"
            f" {percent(middle)}"
        )
        return
    spread = 1.4826 * float(np.median(np.abs(rates - middle)))
    suspects = [d for d in decoded if d.per > max(_MIN_OUTLIER, middle + _OUTLIER * spread)]
    suspects = [
        d
        for d in suspects
        if not contradicts_text(d.trial.tokens or (), d.trial.text, store.classes) or not d.trial.text
    ]
    yield from _note_sessions(decoded, notes)
    swapped = _find_swaps(suspects[:_MAX_MATCHED], decoded)
    if not suspects:
        checked = counted(len(decoded), "training trial")
        notes.append(
            f"no label contradicts the output of the model: {checked} decoded, median error rate {percent(middle)},"
            f" highest {percent(float(rates.max()))}"
        )
    text = f"are decoded as something other than their label (median error rate {percent(middle)})"
    for fault in _fault(
        "suspected labels", text, "check the labels of these trials against the recordings",
        [d.trial for d in suspects], len(decoded),
    ):  # fmt: skip
        if swapped:
            own, other = swapped[0]
            n = counted(len(swapped), "trial")
            extra = f"; the output of {n} fits the label of another, such as {own} that of {other}"
            fault = replace(fault, sentence=fault.sentence + extra)
        yield fault


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


def _note_sessions(decoded: Sequence[_Decoded], notes: list[str]) -> Iterator[DataFault]:
    """A session that is decoded much worse than the others."""
    rates = defaultdict(list)
    for d in decoded:
        rates[d.trial.session].append(d.per)
    means = {session: float(np.median(values)) for session, values in rates.items() if len(values) >= 10}
    if len(means) < 3:
        return
    middle = float(np.median(list(means.values())))
    for session, rate in means.items():
        if rate > max(_MIN_OUTLIER, 2 * middle):
            affected = [d.trial for d in decoded if d.trial.session == session]
            yield from _fault(
                "session without information",
                f"belong to session {session}, whose error rate is {percent(rate)}; the median session has"
                f" {percent(middle)}",
                f"inspect session {session}, or leave it out (data.sessions)", affected, len(decoded),
            )  # fmt: skip


def _find_swaps(suspects: Sequence[_Decoded], decoded: Sequence[_Decoded]) -> list[tuple[str, str]]:
    """Pairs of trials: the output of the first fits the label of the second much better than its own."""
    found = []
    for d in suspects:
        if not d.output:
            continue
        rates = [(Levenshtein.distance(d.output, o.label) / len(o.label), o) for o in decoded if o is not d]
        rate, other = min(rates, key=lambda pair: pair[0])
        if rate < _BETTER * d.per:
            found.append((d.trial.id, other.trial.id))
    return found
