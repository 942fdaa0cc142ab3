"""Simulation of a cohort: sessions, blocks and trials, and the ground truth that the file layouts cannot hold."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arcuate.data.alphabet import CHARACTERS, FULL_STOP, SPACE, token_names
from arcuate.data.readers.release import DESCRIPTION_FILE, TRUTH_FILE
from arcuate.data.releases import RELEASES
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
from arcuate.data.simulation.layouts import FALCON_HELD_IN, FALCON_HELD_OUT, WRITERS, PlannedTrial, SimulatedTrial
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
from arcuate.files import fields_to_dict, locked_folder
from arcuate.progress import Progress

DIFFICULTIES: dict[str, float] = {"easy": 0.6, "real": 1.0, "hard": 1.4}
_MIN_NOISE, _MAX_NOISE = 0.01, 100.0
_TRUTH_FIELDS = ("session", "split", "number", "block", "mode", "corpus", "text")
_DESCRIPTION = ("Date", "Post-implant day", "Block number", "Number of sentences", "Corpus", "Split")
_DAYS_FROM_IMPLANT = 25  # days from implantation to the first session
_BLOCK_TRIALS = 50
_CORPUS_PROBABILITIES = (0.7, 0.24, 0.06)
_SILENT_FRACTION = 0.35
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

    def rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *stream))


def simulate(
    out: Path | str,
    *,
    layout: Literal["b2t25", "b2t24", "falcon-h2"] = "b2t25",
    n_sessions: int = 6,
    n_trials: int = 250,
    n_electrodes: int = 128,
    difficulty: Literal["easy", "real", "hard"] | float = "real",
    seed: int = 0,
    later: Sequence[int] = (),
    progress: Progress | None = None,
) -> Simulation:
    """Simulate recordings and write them as files in the layout of a release.

    Args:
        out: Folder to write the recordings to; an earlier simulation in it is replaced.
        layout: b2t25 (HDF5, T15), b2t24 (.mat, T12) or falcon-h2 (handwriting, NWB).
        n_sessions: Number of sessions.
        n_trials: Number of trials per session, over all splits.
        n_electrodes: Number of electrodes.
        difficulty: easy, real, hard or a noise level, where 1 resembles the real recordings.
        seed: Seed of all random draws.
        later: Additional sessions on which to test decoders: for each, the number of days after the last regular one.
        progress: Called with the number of trials simulated so far.
    """
    out = Path(out)
    noise = _noise_level(difficulty)
    _check_arguments(layout, n_sessions, n_trials, n_electrodes, seed, later)
    _check_target(out)
    sessions = tuple(session_names(layout, n_sessions, seed, later))
    cohort = _Cohort(layout, sessions, n_trials, n_electrodes, difficulty, noise, seed)
    with locked_folder(out) as folder:
        counts, n_bins, n_phonemes = _write_cohort(folder, cohort, progress)
        _check_target(out)  # another program may have written there in the meantime
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
        known = [f"{SIMULATED_PARTICIPANTS[layout]}.{recorded}" for recorded in (*FALCON_HELD_IN, *FALCON_HELD_OUT)]
        if n_sessions > len(known) or later:
            raise UserError(f"falcon-h2 has {len(known)} sessions and no later ones; give at most that many")
        return known[:n_sessions]
    dates = [RELEASES[layout].first]
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
    layout: str, n_sessions: int, n_trials: int, n_electrodes: int, seed: int, later: Sequence[int]
) -> None:
    if layout not in WRITERS:
        more = "; for NWB files, export a prepared cohort" if layout == "nwb" else ""
        raise UserError(f"unknown layout {layout!r}: use {', '.join(WRITERS)}{more}")
    if n_sessions < 1 or n_trials < 3:
        raise UserError("a cohort needs at least 1 session and 3 trials per session (train, val, test)")
    if n_electrodes < 4:
        raise UserError(f"a cohort needs at least 4 electrodes, got {n_electrodes}")
    if not 0 <= seed < 2**63:
        raise UserError(f"the seed must be an integer from 0 to {2**63 - 1}")
    if list(later) != sorted(set(later)) or any(not 1 <= days <= 1000 for days in later):
        raise UserError("later sessions must be given as increasing numbers of days from 1 to 1000, as in 5,8")


def _check_target(out: Path) -> None:
    """Raise UserError unless `out` is free, empty, or holds nothing but an earlier simulation."""
    if not out.is_dir():
        if out.exists() or out.is_symlink():
            raise UserError(f"{out} is not a folder; choose another one")
        return
    names = {path.name for path in out.iterdir()}
    written = {TRUTH_FILE, DESCRIPTION_FILE, *(folder for folder, _ in WRITERS.values())}
    if names and (TRUTH_FILE not in names or not names <= written):
        other = min(names - written, default=min(names))
        raise UserError(f"{out} already contains {other}, which is not of a simulated cohort; choose another folder")


# --- writing ------------------------------------------------------------------------------------------------


def _write_cohort(out: Path, cohort: _Cohort, progress: Progress | None) -> tuple[dict[str, int], int, int]:
    """Write sessions, ground truth and (b2t25) the table of blocks; return trials by split, bins and phonemes."""
    signal = SignalModel.from_noise(cohort.noise)
    folder, write = WRITERS[cohort.layout]
    plans = [_plan_session(cohort, index) for index in range(len(cohort.sessions))]
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    n_bins = n_phonemes = 0
    n_total = len(cohort.sessions) * cohort.n_trials
    with (out / TRUTH_FILE).open("w", encoding="utf-8") as truth:
        for index, electrodes in enumerate(_electrodes_by_session(cohort)):
            dead = np.flatnonzero(electrodes.dead).tolist()
            trials = []
            for trial in _simulate_trials(cohort, index, plans[index], electrodes, signal):
                trials.append(trial)
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
            write(out / folder, trials, cohort.rng(_THRESHOLDS, index))
    if cohort.layout == "b2t25":
        with (out / DESCRIPTION_FILE).open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(_DESCRIPTION)
            for session, plan in zip(cohort.sessions, plans, strict=True):
                table.writerows(_description_rows(session, plan))
    return counts, n_bins, n_phonemes


def _description_rows(session: str, plan: list[PlannedTrial]) -> Iterator[tuple[object, ...]]:
    """Rows of the table of blocks of the '25 release."""
    first = RELEASES["b2t25"].first
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
