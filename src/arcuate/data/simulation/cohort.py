"""A whole simulated cohort: days, blocks, trials, and the truth that the file layouts cannot hold."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Literal

import numpy as np

from arcuate.data.pronunciation import pronounce
from arcuate.data.sessions import days_between, session_date
from arcuate.data.simulation.articulation import Pace, move, time_phonemes
from arcuate.data.simulation.cortex import MODES, Array, Electrodes, Signal, implant, next_session, record
from arcuate.data.simulation.layouts import Hdf5Session, MatSession, Recording, Writer, write_description
from arcuate.data.simulation.sentences import CORPORA, make_sentence
from arcuate.data.trial import BIN_SECONDS, SPLITS, Split
from arcuate.errors import UserError

Layout = Literal["b2t25", "b2t24"]
LAYOUTS: tuple[Layout, ...] = ("b2t25", "b2t24")
MIN_NOISE, MAX_NOISE = 0.01, 100.0
DIFFICULTIES: dict[str, float] = {"easy": 0.6, "real": 1.0, "hard": 1.4}
TRUTH = "simulation_truth.jsonl"
DESCRIPTION = "t15_copyTaskData_description.csv"

ASIDE = ".simulating"
_FOLDERS = (Hdf5Session.folder, MatSession.folder)  # in the order of LAYOUTS

_FIRST_DAY = {"b2t25": date(2023, 8, 11), "b2t24": date(2022, 4, 28)}
_PARTICIPANT = {"b2t25": "t15", "b2t24": "t12"}
_IMPLANTED_DAYS_BEFORE = 25
_BLOCK_TRIALS = 50
_CORPUS_SHARES = (0.7, 0.24, 0.06)
_SILENT_SHARE = 0.35
# Independent streams of random numbers; a session's data depend on (seed, session) and nothing else.
_ELECTRODES, _CALENDAR, _SESSION, _TRIAL, _THRESHOLDS = range(5)


@dataclass(frozen=True)
class Planned:
    """One trial before it is spoken."""

    split: Split
    number: int
    block: int
    order: int
    corpus: str
    mode: str


def simulate(
    out: Path,
    *,
    layout: Layout,
    n_sessions: int,
    n_trials: int,
    n_electrodes: int,
    difficulty: str | float = "real",
    seed: int = 0,
    ms_per_phoneme: float = 254.0,
    later: Sequence[int] = (),
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, object]:
    """Write a cohort below `out` in one of the official layouts and return what was written.

    `n_trials` counts one session's trials over all splits; `difficulty` is a name or the noise itself, 1
    being like the real recordings; `later` are days after the last of `n_sessions` on which there is one session
    more, for decoders to meet unprepared; `progress` hears (trials done, trials in all).
    """
    noise = _noise(difficulty)
    check_request(
        out, layout, n_sessions, n_trials, n_electrodes, difficulty, seed, replace, ms_per_phoneme, later
    )
    names = session_names(layout, n_sessions, seed, later)
    with _aside(out, layout) as aside:
        totals = _write(
            aside,
            layout,
            names,
            n_trials,
            n_electrodes,
            difficulty,
            noise,
            seed,
            ms_per_phoneme,
            progress,
        )
    return {
        "path": str(out),
        "layout": layout,
        "sessions": names,
        "trials": totals.counts,
        "electrodes": n_electrodes,
        "difficulty": difficulty,
        "noise": noise,
        "seed": seed,
        "hours": round(totals.n_bins * BIN_SECONDS / 3600, 3),
        "ms_per_phoneme": round(1000 * totals.n_bins * BIN_SECONDS / totals.n_phonemes, 1),
    }


@dataclass(frozen=True)
class _Totals:
    """What a cohort came to."""

    counts: dict[str, int]  # trials by split
    n_bins: int
    n_phonemes: int


def _write(
    out: Path,
    layout: Layout,
    names: list[str],
    n_trials: int,
    n_electrodes: int,
    difficulty: str | float,
    noise: float,
    seed: int,
    ms_per_phoneme: float,
    progress: Callable[[int, int], None] | None,
) -> _Totals:
    """The whole cohort, session by session."""
    arrays = _arrays(layout, n_electrodes)
    signal = Signal.at(noise)
    description: list[tuple[object, ...]] = []
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    n_bins = n_phonemes = done = 0
    with (out / TRUTH).open("w", encoding="utf-8") as truth:
        for index, electrodes in enumerate(_days(arrays, names, seed)):
            plan = plan_session(layout, n_trials, seed, index)
            dead = np.flatnonzero(electrodes.dead).tolist()
            with _writer(out, layout, names[index], seed, index) as writer:
                said = _speak(plan, electrodes, signal, names[index], seed, index, ms_per_phoneme)
                for planned, (trial, onsets) in zip(plan, said, strict=True):
                    writer.write(trial)
                    common = {"dead": dead, "seed": seed, "difficulty": difficulty}
                    line = _truth(trial, planned, onsets) | common
                    truth.write(json.dumps(line) + "\n")
                    counts[trial.split] += 1
                    n_bins += len(trial.counts)
                    n_phonemes += len(trial.names)
                    done += 1
                    if progress is not None:
                        progress(done, len(names) * n_trials)
            description.extend(_block_rows(names[index], _FIRST_DAY[layout], plan))
    if layout == "b2t25":
        write_description(out / DESCRIPTION, description)
    return _Totals(counts, n_bins, n_phonemes)


def _noise(difficulty: str | float) -> float:
    if isinstance(difficulty, str) and difficulty in DIFFICULTIES:
        return DIFFICULTIES[difficulty]
    try:
        noise = float(difficulty)
    except ValueError:
        noise = math.nan
    if not MIN_NOISE <= noise <= MAX_NOISE:
        known = ", ".join(DIFFICULTIES)
        raise UserError(
            f"Difficulty {difficulty!r} is not known: use one of {known}, or a noise level"
            f" from {MIN_NOISE} to {MAX_NOISE}."
        )
    return noise


def check_request(
    out: Path,
    layout: str,
    n_sessions: int,
    n_trials: int,
    n_electrodes: int,
    difficulty: str | float = "real",
    seed: int = 0,
    replace: bool = False,
    ms_per_phoneme: float = 254.0,
    later: Sequence[int] = (),
) -> None:
    """Refuse what cannot be simulated, or not here, before anything is written."""
    _noise(difficulty)
    if layout not in LAYOUTS:
        raise UserError(f"Layout {layout!r} is not known: use one of {', '.join(LAYOUTS)}.")
    if n_sessions < 1 or n_trials < 3:
        raise UserError("A cohort needs at least 1 session and 3 trials per session (train, val, test).")
    if n_electrodes < 4:
        raise UserError("A cohort needs at least 4 electrodes: give --electrodes 4 or more.")
    if not 0 <= seed < 2**63:
        raise UserError(f"The seed must be a whole number from 0 to {2**63 - 1}.")
    if not 120 <= ms_per_phoneme <= 1000:
        raise UserError("Time per phoneme must lie between 120 and 1000 ms.")
    if list(later) != sorted(set(later)) or any(not 1 <= days <= 1000 for days in later):
        raise UserError("Later days must rise, each from 1 to 1000 days after the last session, as in 5,8.")
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"{out} is not a folder; choose another one.")
    if any(os.path.lexists(out / name) for name in (*_FOLDERS, TRUTH)) and not (
        replace and (out / TRUTH).is_file()  # only what this module wrote is ever replaced
    ):
        raise UserError(
            f"{out} already holds recordings: choose another folder, or pass --force to replace a simulated one."
        )


@contextmanager
def _aside(out: Path, layout: Layout) -> Iterator[Path]:
    """A hidden folder to write in, which no reader looks into; what is whole moves out of it at the end.

    The recordings move last and in one step, so a cohort that can be found is a whole one.
    """
    aside = out / ASIDE
    is_new = not out.exists()
    try:
        shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
        aside.mkdir(parents=True)
        yield aside
        for old in _FOLDERS:
            shutil.rmtree(out / old, ignore_errors=True)
        (out / DESCRIPTION).unlink(missing_ok=True)
        folder = _FOLDERS[LAYOUTS.index(layout)]
        for part in sorted(aside.iterdir(), key=lambda path: path.name == folder):
            part.replace(out / part.name)
    except OSError as error:
        raise UserError(_explain(error, out)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _explain(error: OSError, out: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in str(error):
        return (
            f"The disk is full: free some space, or simulate less, and write {out} again (nothing was left)."
        )
    reason = error.strerror or " ".join(str(error).split())
    return f"Cannot write {out} ({reason}): check the folder and your rights to it."


def session_names(layout: Layout, n_sessions: int, seed: int, later: Sequence[int] = ()) -> list[str]:
    """Recording days, two to nine days apart; then those so many days later than the last of them."""
    days = [_FIRST_DAY[layout]]
    for index in range(n_sessions - 1):
        gap = np.random.default_rng((seed, _CALENDAR, index)).integers(2, 10)
        days.append(days[-1] + timedelta(days=int(gap)))
    days += [days[-1] + timedelta(days=gap) for gap in later]
    return [f"{_PARTICIPANT[layout]}.{day:%Y.%m.%d}" for day in days]


def _arrays(layout: Layout, n_electrodes: int) -> tuple[Array, ...]:
    """Four arrays; in the '24 layout the second half of the columns is area 44, nearly untuned."""
    if layout == "b2t24":
        lower = n_electrodes // 2
        return (
            Array(lower, 1.0, 5),
            Array(n_electrodes - lower, 0.8, 4),
            Array(lower, 0.12, 6),
            Array(n_electrodes - lower, 0.08, 6),
        )
    sizes = [len(part) for part in np.array_split(np.arange(n_electrodes), 4)]
    return tuple(
        Array(n, depth, lead)
        for n, depth, lead in zip(sizes, (1.0, 0.9, 0.55, 0.3), (5, 3, 6, 4), strict=True)
    )


def _days(arrays: tuple[Array, ...], names: list[str], seed: int) -> Iterator[Electrodes]:
    electrodes = implant(arrays, np.random.default_rng((seed, _ELECTRODES, 0)))
    yield electrodes
    for index in range(1, len(names)):
        gap = days_between(names[index], names[index - 1]) or 0
        electrodes = next_session(electrodes, gap, np.random.default_rng((seed, _ELECTRODES, index)))
        yield electrodes


def _writer(out: Path, layout: Layout, session: str, seed: int, index: int) -> Writer:
    if layout == "b2t25":
        return Hdf5Session(out, session)
    return MatSession(out, session, (seed, _THRESHOLDS, index))


def plan_session(layout: Layout, n_trials: int, seed: int, index: int) -> list[Planned]:
    """Who says what when: blocks of one corpus and one speaking strategy, in the order of the day."""
    rng = np.random.default_rng((seed, _SESSION, index))
    n_val = max(1, round(0.1 * n_trials))
    n_test = max(1, round(0.1 * n_trials))
    n_train = n_trials - n_val - n_test
    if layout == "b2t24":  # the day begins with the holdout and ends with the test block
        runs: list[list[Split]] = [["test"] * n_test, ["train"] * n_train, ["val"] * n_val]
    else:  # validation and test sentences share their blocks
        shared = rng.permutation(np.array(["val"] * n_val + ["test"] * n_test)).tolist()
        runs = [["train"] * n_train, shared]
    planned: list[Planned] = []
    numbers = dict.fromkeys(SPLITS, 0)
    block = int(rng.integers(1, 4))
    for run in runs:
        n_blocks = max(math.ceil(len(run) / _BLOCK_TRIALS), min(2, len(run) // 10), 1)
        modes = _modes(n_blocks, rng)
        for part, members in enumerate(np.array_split(np.array(run), n_blocks)):
            corpus = str(rng.choice(CORPORA, p=_CORPUS_SHARES))
            for order, split in enumerate(members.tolist()):
                planned.append(Planned(split, numbers[split], block, order, corpus, modes[part]))
                numbers[split] += 1
            block += 1
    return planned


def _modes(n_blocks: int, rng: np.random.Generator) -> list[str]:
    """A mix of strategies with the wanted share of silent blocks, in random order."""
    n_silent = int(n_blocks * _SILENT_SHARE + rng.random())
    modes = ["silent"] * n_silent + ["vocalised"] * (n_blocks - n_silent)
    return rng.permutation(np.array(modes)).tolist()


def _speak(
    plan: list[Planned],
    electrodes: Electrodes,
    signal: Signal,
    session: str,
    seed: int,
    index: int,
    ms_per_phoneme: float,
) -> Iterator[tuple[Recording, np.ndarray]]:
    """Record a session's trials one by one, with the onset of every phoneme in seconds."""
    day = np.random.default_rng((seed, _SESSION, index, 1))
    day_tempo = day.lognormal(0.0, 0.06)
    n = len(electrodes.log_rate)
    offset = np.zeros(n)
    for position, trial in enumerate(plan):
        rng = np.random.default_rng((seed, _TRIAL, index, position))
        if trial.order == 0:  # a pause, the baseline has moved
            offset = 0.12 * day.standard_normal(n)
        offset = 0.99 * offset + 0.015 * day.standard_normal(n)
        mode = MODES[trial.mode]
        text = make_sentence(trial.corpus, rng)
        names = pronounce(text).names
        tempo = mode.tempo * day_tempo * rng.lognormal(0.0, 0.07) * ms_per_phoneme / 254.0
        pace = Pace(0.205 * tempo, rng.uniform(0.2, 0.7), rng.uniform(0.15, 0.5))
        onsets, n_bins = time_phonemes(names, pace, rng)
        counts, power = record(electrodes, move(names, onsets, n_bins), mode, signal, offset, rng)
        yield (
            Recording(
                session, trial.split, trial.number, trial.block, trial.order, text, names, counts, power
            ),
            onsets * BIN_SECONDS,
        )


def _truth(trial: Recording, planned: Planned, onsets_s: np.ndarray) -> dict[str, object]:
    return {
        "session": trial.session,
        "split": trial.split,
        "number": trial.number,
        "block": trial.block,
        "mode": planned.mode,
        "corpus": planned.corpus,
        "text": trial.text,
        "phonemes": trial.names,
        "onsets_s": [round(float(onset), 3) for onset in onsets_s],
    }


def _block_rows(session: str, first: date, plan: list[Planned]) -> Iterator[tuple[object, ...]]:
    day = session_date(session) or first
    for block in sorted({trial.block for trial in plan}):
        members = [trial for trial in plan if trial.block == block]
        split = "Train" if members[0].split == "train" else "Val/Test"
        implanted = (day - first).days + _IMPLANTED_DAYS_BEFORE
        yield (day.isoformat(), implanted, block, len(members), members[0].corpus.capitalize(), split)
