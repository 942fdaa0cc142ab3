"""Simulation of a cohort: sessions, blocks and trials, and the ground truth that the file layouts cannot hold."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.alphabet import CHARACTERS, FULL_STOP, SPACE, token_names
from arcuate.data.readers.release import DESCRIPTION_FILE, TRUTH_FILE
from arcuate.data.simulation.articulation import Timing, articulate, draw_onsets
from arcuate.data.simulation.cortex import (
    MODES,
    Electrodes,
    SignalModel,
    SimulatedArray,
    drift_electrodes,
    implant_electrodes,
    record_trial,
)
from arcuate.data.simulation.layouts import (
    FOLDERS,
    PlannedTrial,
    SimulatedTrial,
    WriteTrial,
    write_description,
    write_falcon_session,
    write_hdf5_session,
    write_mat_session,
    write_nwb_session,
)
from arcuate.data.simulation.sentences import CORPORA, make_sentence
from arcuate.data.text import pronounce, text_to_characters
from arcuate.data.trial import (
    BIN_SECONDS,
    SIMULATED_PARTICIPANTS,
    SPLITS,
    Layout,
    Split,
    days_between,
    session_date,
)
from arcuate.errors import UserError
from arcuate.files import exclusive_lock, explain_write_error, fields_to_dict
from arcuate.progress import Progress

DIFFICULTIES: dict[str, float] = {"easy": 0.6, "real": 1.0, "hard": 1.4}
_MIN_NOISE, _MAX_NOISE = 0.01, 100.0

_STAGING = ".simulating"
_TRUTH_FIELDS = ("session", "split", "number", "block", "mode", "corpus", "text")
_FIRST_DATE = {"b2t25": date(2023, 8, 11), "b2t24": date(2022, 4, 28), "nwb": date(2023, 8, 11)}
# Sessions of FALCON H2, whose evaluator accepts no other dates: held in, then held out.
_FALCON_HELD_IN = (
    "2022.05.18 2022.05.23 2022.05.25 2022.06.01 2022.06.03 2022.06.06 2022.06.08 2022.06.13 2022.06.15 2022.06.22"
    " 2022.09.01 2022.09.29 2022.10.06 2022.10.18 2022.10.25 2022.10.27 2022.11.01 2022.11.03 2022.12.08 2022.12.15"
    " 2023.02.28"
).split()
_FALCON_HELD_OUT = "2023.04.17 2023.05.31 2023.06.28 2023.08.16 2023.10.09".split()
SIMULATED_LAYOUTS = tuple(FOLDERS)
_DAYS_FROM_IMPLANT = 25  # days from implantation to the first session
_BLOCK_TRIALS = 50
_CORPUS_PROBABILITIES = (0.7, 0.24, 0.06)
_SILENT_FRACTION = 0.35
_DEFAULT_MS_PER_PHONEME = 254.0
# Independent random streams; the data of a session depend on (seed, session index) only.
_ELECTRODES, _CALENDAR, _SESSION, _TRIAL, _THRESHOLDS = range(5)


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`."""

    path: Path
    layout: str
    sessions: tuple[str, ...]
    trials: dict[str, int]  # by split
    n_electrodes: int
    difficulty: str | float
    noise: float
    seed: int
    hours: float
    ms_per_phoneme: float

    def to_dict(self) -> dict[str, Any]:
        return {"electrodes" if name == "n_electrodes" else name: value for name, value in fields_to_dict(self).items()}


@dataclass(frozen=True)
class _Cohort:
    """Parameters of a cohort."""

    layout: Layout
    sessions: tuple[str, ...]
    n_trials: int
    n_electrodes: int
    difficulty: str | float
    noise: float
    seed: int
    ms_per_phoneme: float

    def rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *stream))


def simulate(
    out: str | Path,
    *,
    layout: str = "b2t25",
    n_sessions: int = 6,
    n_trials: int = 250,
    n_electrodes: int = 128,
    difficulty: str | float = "real",
    seed: int = 0,
    ms_per_phoneme: float = _DEFAULT_MS_PER_PHONEME,
    later: Sequence[int] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Simulation:
    """Write a simulated cohort to the folder `out`, in the layout of a release: b2t25, b2t24, nwb or falcon-h2.

    `n_trials` is the number of trials per session over all splits. `difficulty` is easy, real, hard or a noise level,
    where 1 resembles the real recordings. `later` adds one session at each of these numbers of days after the last
    regular one, to test decoders on unknown sessions. `force` replaces an earlier simulation.
    """
    out = Path(out)
    noise = _noise_level(difficulty)
    known_layout = _check_arguments(layout, n_sessions, n_trials, n_electrodes, seed, ms_per_phoneme, later)
    _check_target(out, force)
    sessions = tuple(session_names(known_layout, n_sessions, seed, later))
    cohort = _Cohort(known_layout, sessions, n_trials, n_electrodes, difficulty, noise, seed, ms_per_phoneme)
    with _staging_folder(out, known_layout) as staging:
        counts, n_bins, n_phonemes = _write_cohort(staging, cohort, progress)
    seconds = n_bins * BIN_SECONDS
    return Simulation(
        path=out,
        layout=layout,
        sessions=sessions,
        trials=counts,
        n_electrodes=n_electrodes,
        difficulty=difficulty,
        noise=noise,
        seed=seed,
        hours=round(seconds / 3600, 3),
        ms_per_phoneme=round(1000 * seconds / n_phonemes, 1),
    )


def session_names(layout: Layout, n_sessions: int, seed: int, later: Sequence[int] = ()) -> list[str]:
    """Names of sessions two to nine days apart, then of those given by `later` in days after the last regular one."""
    if layout == "falcon-h2":
        known = [f"{SIMULATED_PARTICIPANTS[layout]}.{recorded}" for recorded in (*_FALCON_HELD_IN, *_FALCON_HELD_OUT)]
        if n_sessions > len(known) or later:
            raise UserError(f"falcon-h2 has {len(known)} sessions and no later ones; give at most that many")
        return known[:n_sessions]
    dates = [_FIRST_DATE[layout]]
    for index in range(n_sessions - 1):
        gap = np.random.default_rng((seed, _CALENDAR, index)).integers(2, 10)
        dates.append(dates[-1] + timedelta(days=int(gap)))
    dates += [dates[-1] + timedelta(days=gap) for gap in later]
    return [f"{SIMULATED_PARTICIPANTS[layout]}.{recorded:%Y.%m.%d}" for recorded in dates]


# --- checks -------------------------------------------------------------------------------------------------


def _noise_level(difficulty: str | float) -> float:
    if isinstance(difficulty, str) and difficulty in DIFFICULTIES:
        return DIFFICULTIES[difficulty]
    try:
        noise = float(difficulty)
    except ValueError:
        noise = math.nan
    if not _MIN_NOISE <= noise <= _MAX_NOISE:
        raise UserError(
            f"unknown difficulty {difficulty!r}: use {', '.join(DIFFICULTIES)} or a noise level from"
            f" {_MIN_NOISE} to {_MAX_NOISE}"
        )
    return noise


def _check_arguments(
    layout: str,
    n_sessions: int,
    n_trials: int,
    n_electrodes: int,
    seed: int,
    ms_per_phoneme: float,
    later: Sequence[int],
) -> Layout:
    known = next((name for name in SIMULATED_LAYOUTS if name == layout), None)
    if known is None:
        raise UserError(
            f"unknown layout {layout!r}: use {', '.join(SIMULATED_LAYOUTS[:-1])} or {SIMULATED_LAYOUTS[-1]}"
        )
    if n_sessions < 1 or n_trials < 3:
        raise UserError("a cohort needs at least 1 session and 3 trials per session (train, val, test)")
    if n_electrodes < 4:
        raise UserError(f"a cohort needs at least 4 electrodes, got {n_electrodes}")
    if not 0 <= seed < 2**63:
        raise UserError(f"the seed must be an integer from 0 to {2**63 - 1}")
    if not 120 <= ms_per_phoneme <= 1000:
        raise UserError(f"the time per phoneme must be between 120 and 1000 ms, got {ms_per_phoneme:g}")
    if list(later) != sorted(set(later)) or any(not 1 <= days <= 1000 for days in later):
        raise UserError("later sessions must be given as increasing numbers of days from 1 to 1000, as in 5,8")
    return known


def _check_target(out: Path, force: bool) -> None:
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"{out} is not a folder; choose another one")
    occupied = any(os.path.lexists(out / name) for name in (*FOLDERS.values(), TRUTH_FILE))
    is_simulation = (out / TRUTH_FILE).is_file()
    if occupied and not (force and is_simulation):
        raise UserError(
            f"{out} already contains recordings; choose another folder, or use --force to replace a simulated cohort"
        )


# --- writing ------------------------------------------------------------------------------------------------


def _write_cohort(out: Path, cohort: _Cohort, progress: Progress | None) -> tuple[dict[str, int], int, int]:
    """Write sessions, ground truth and (b2t25) the table of blocks; return trials by split, bins and phonemes."""
    signal = SignalModel.from_noise(cohort.noise)
    description: list[tuple[object, ...]] = []
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    n_bins = n_phonemes = 0
    n_total = len(cohort.sessions) * cohort.n_trials
    with (out / TRUTH_FILE).open("w", encoding="utf-8") as truth:
        for index, electrodes in enumerate(_electrodes_by_session(cohort)):
            plan = _plan_session(cohort, index)
            dead = np.flatnonzero(electrodes.dead).tolist()
            with _open_session(out, cohort, index) as write:
                for trial in _simulate_trials(cohort, index, plan, electrodes, signal):
                    write(trial)
                    row = {name: getattr(trial, name) for name in _TRUTH_FIELDS} | {
                        "phonemes": trial.names,
                        "onsets_s": [round(float(onset), 3) for onset in trial.onsets * BIN_SECONDS],
                        "dead": dead,
                        "seed": cohort.seed,
                        "difficulty": cohort.difficulty,
                    }
                    truth.write(json.dumps(row) + "\n")
                    counts[trial.split] += 1
                    n_bins += len(trial.counts)
                    n_phonemes += len(trial.names)
                    if progress:
                        progress(sum(counts.values()), n_total, "simulating trials")
            if cohort.layout == "b2t25":
                description.extend(_description_rows(cohort.sessions[index], _FIRST_DATE[cohort.layout], plan))
    if cohort.layout == "b2t25":
        write_description(out / DESCRIPTION_FILE, description)
    return counts, n_bins, n_phonemes


@contextmanager
def _staging_folder(out: Path, layout: Layout) -> Iterator[Path]:
    """A hidden folder to write to, ignored by readers, whose contents move to `out` at the end.

    The recordings move last and in one rename, so a cohort that can be found is complete.
    """
    staging = out / _STAGING
    is_new = not out.exists()
    busy = f"another `arcuate simulate` is writing {out}; wait for it to finish"
    try:
        with exclusive_lock(out / f"{_STAGING}.lock", busy, remove=True):
            shutil.rmtree(staging, ignore_errors=True)  # left by a killed process
            staging.mkdir()
            try:
                yield staging
                for folder in FOLDERS.values():
                    shutil.rmtree(out / folder, ignore_errors=True)
                (out / DESCRIPTION_FILE).unlink(missing_ok=True)
                for part in sorted(staging.iterdir(), key=lambda path: path.name == FOLDERS[layout]):
                    part.replace(out / part.name)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise explain_write_error(error, out) from error
    finally:
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _open_session(out: Path, cohort: _Cohort, index: int) -> AbstractContextManager[WriteTrial]:
    if cohort.layout == "b2t25":
        return write_hdf5_session(out, cohort.sessions[index])
    if cohort.layout == "nwb":
        return write_nwb_session(out, cohort.sessions[index])
    if cohort.layout == "falcon-h2":
        return write_falcon_session(out, cohort.sessions[index], index >= len(_FALCON_HELD_IN))
    return write_mat_session(out, cohort.sessions[index], cohort.rng(_THRESHOLDS, index))


def _description_rows(session: str, first: date, plan: list[PlannedTrial]) -> Iterator[tuple[object, ...]]:
    recorded = session_date(session) or first
    for block in sorted({trial.block for trial in plan}):
        members = [trial for trial in plan if trial.block == block]
        split = "Train" if members[0].split == "train" else "Val/Test"
        since_implant = (recorded - first).days + _DAYS_FROM_IMPLANT
        corpus = members[0].corpus.capitalize()
        yield (recorded.isoformat(), since_implant, block, len(members), corpus, split)


# --- sessions -----------------------------------------------------------------------------------------------


def _electrodes_by_session(cohort: _Cohort) -> Iterator[Electrodes]:
    arrays = _simulated_arrays(cohort.layout, cohort.n_electrodes)
    electrodes = implant_electrodes(arrays, cohort.rng(_ELECTRODES, 0))
    yield electrodes
    for index in range(1, len(cohort.sessions)):
        gap = days_between(cohort.sessions[index], cohort.sessions[index - 1]) or 0
        electrodes = drift_electrodes(electrodes, gap, cohort.rng(_ELECTRODES, index))
        yield electrodes


def _simulated_arrays(layout: Layout, n_electrodes: int) -> tuple[SimulatedArray, ...]:
    """Four arrays; in the '24 layout the second half of the columns is area 44, with little tuning."""
    if layout == "b2t24":
        lower = n_electrodes // 2
        return (
            SimulatedArray(lower, 1.0, 5),
            SimulatedArray(n_electrodes - lower, 0.8, 4),
            SimulatedArray(lower, 0.12, 6),
            SimulatedArray(n_electrodes - lower, 0.08, 6),
        )
    sizes = [len(part) for part in np.array_split(np.arange(n_electrodes), 4)]
    return tuple(
        SimulatedArray(n, depth, lead)
        for n, depth, lead in zip(sizes, (1.0, 0.9, 0.55, 0.3), (5, 3, 6, 4), strict=True)
    )


def _plan_session(cohort: _Cohort, index: int) -> list[PlannedTrial]:
    """The trials of a session in order: blocks of one corpus and one speaking mode."""
    rng = cohort.rng(_SESSION, index)
    n_val = n_test = max(1, round(0.1 * cohort.n_trials))
    n_train = cohort.n_trials - n_val - n_test
    if cohort.layout == "b2t24":  # the session starts with the holdout and ends with the test block
        segments: list[list[Split]] = [["test"] * n_test, ["train"] * n_train, ["val"] * n_val]
    else:  # validation and test sentences share their blocks
        shared = rng.permutation(np.array(["val"] * n_val + ["test"] * n_test)).tolist()
        segments = [["train"] * n_train, shared]
    planned: list[PlannedTrial] = []
    numbers = dict.fromkeys(SPLITS, 0)
    block = int(rng.integers(1, 4))
    for segment in segments:
        n_blocks = max(math.ceil(len(segment) / _BLOCK_TRIALS), min(2, len(segment) // 10), 1)
        modes = _draw_modes(n_blocks, rng)
        for part, members in enumerate(np.array_split(np.array(segment), n_blocks)):
            corpus = str(rng.choice(CORPORA, p=_CORPUS_PROBABILITIES))
            for order, split in enumerate(members.tolist()):
                planned.append(PlannedTrial(split, numbers[split], block, order, corpus, modes[part]))
                numbers[split] += 1
            block += 1
    return planned


def _draw_modes(n_blocks: int, rng: np.random.Generator) -> list[str]:
    """Speaking modes of the blocks in random order, with the expected fraction of silent blocks."""
    n_silent = int(n_blocks * _SILENT_FRACTION + rng.random())
    modes = ["silent"] * n_silent + ["vocalised"] * (n_blocks - n_silent)
    return rng.permutation(np.array(modes)).tolist()


def _simulate_trials(
    cohort: _Cohort, index: int, plan: list[PlannedTrial], electrodes: Electrodes, signal: SignalModel
) -> Iterator[SimulatedTrial]:
    """The trials of a session in order."""
    session_rng = cohort.rng(_SESSION, index, 1)
    session_tempo = session_rng.lognormal(0.0, 0.06)
    n = len(electrodes.log_rate)
    offset = np.zeros(n)
    for position, planned in enumerate(plan):
        rng = cohort.rng(_TRIAL, index, position)
        if planned.order == 0:  # the baseline has shifted during the pause between blocks
            offset = 0.12 * session_rng.standard_normal(n)
        offset = 0.99 * offset + 0.015 * session_rng.standard_normal(n)
        mode = MODES[planned.mode]
        text = make_sentence(planned.corpus, rng)
        if cohort.layout == "falcon-h2":
            text = text.lower().replace(" ", SPACE).replace(".", FULL_STOP)
            names = token_names(text_to_characters(text.replace(SPACE, " "), CHARACTERS)[0], CHARACTERS)
            text = "".join(names)
        else:
            names = pronounce(text).names
        tempo = mode.tempo * session_tempo * rng.lognormal(0.0, 0.07)
        tempo *= cohort.ms_per_phoneme / _DEFAULT_MS_PER_PHONEME
        timing = Timing(0.205 * tempo, rng.uniform(0.2, 0.7), rng.uniform(0.15, 0.5))
        onsets, n_bins = draw_onsets(names, timing, rng)
        positions = articulate(names, onsets, n_bins)
        counts, power = record_trial(electrodes, positions, mode, signal, offset, rng)
        yield SimulatedTrial(
            **vars(planned),
            session=cohort.sessions[index],
            text=text,
            names=names,
            onsets=onsets,
            counts=counts,
            power=power,
        )
