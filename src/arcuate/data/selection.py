"""Trial selection: the trials of a store that a recipe trains and validates on, and the dev split held out of train."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from arcuate.data.alphabet import min_frames
from arcuate.data.config import DataConfig
from arcuate.data.store import Store, TrialInfo
from arcuate.data.text import normalise_text
from arcuate.errors import UserError

CountFrames = Callable[[int], int]  # bins -> frames of a given model, such as `Patch.count_frames`


@dataclass(frozen=True)
class Selection:
    """The trials of one training run."""

    sessions: tuple[str, ...]
    train: tuple[TrialInfo, ...]
    validation: tuple[TrialInfo, ...]
    selected_on: str  # split that checkpoints are selected on: "dev" (held out of train) or "val"
    unaligned: tuple[TrialInfo, ...] = ()  # excluded training trials: too few frames for their label


def select(store: Store, settings: DataConfig, count_frames: CountFrames) -> Selection:
    """Select training and validation trials; raises UserError if the store does not match the recipe.

    `count_frames` is the frame count of the model. CTC has no path for a label longer than its frames, so training
    trials with such a label are excluded.
    """
    sessions = _select_sessions(store, settings)
    _check_channels(store, settings)
    labelled = [t for t in store.trials if t.session in sessions and t.tokens is not None]
    train: list[TrialInfo] = []
    unaligned: list[TrialInfo] = []
    for t in labelled:
        if t.split == "train" and t.usable:
            (train if can_align(t.tokens or (), count_frames(t.n_bins)) else unaligned).append(t)
    if settings.dev_fraction == 0:
        validation = [t for t in labelled if t.split == "val"]
        return Selection(sessions, tuple(train), tuple(validation), "val", tuple(unaligned))
    dev = dev_split(train, settings.dev_fraction, settings.seed)
    if not dev or len(dev) == len(train):
        raise UserError(
            f"data.dev_fraction={settings.dev_fraction} of {len(train)} training trials leaves the dev or training"
            " split empty; prepare more data or set it to 0"
        )
    return Selection(
        sessions,
        tuple(t for t in train if t.id not in dev),
        tuple(t for t in train if t.id in dev),
        "dev",
        tuple(unaligned),
    )


def dev_split(infos: Iterable[TrialInfo], fraction: float, seed: int) -> set[str]:
    """Ids of the training trials held out to select checkpoints on.

    Sentences are assigned by hash, so all repetitions of a sentence are in the same split. Sessions are processed in
    order, each up to the quota so far, so an added session does not change the split of earlier ones.
    """
    by_session: dict[str, dict[bytes, list[str]]] = {}
    for info in infos:
        if info.split == "train":
            by_session.setdefault(info.session, {}).setdefault(_sentence_key(info, seed), []).append(info.id)
    in_dev: set[bytes] = set()
    in_train: set[bytes] = set()
    dev: set[str] = set()
    n_seen = 0
    for sentences in by_session.values():
        n_seen += sum(len(ids) for ids in sentences.values())
        quota = int(fraction * n_seen + 0.5)
        dev.update(trial for key in in_dev & sentences.keys() for trial in sentences[key])
        for key in sorted(sentences.keys() - in_dev - in_train):
            if len(dev) + len(sentences[key]) <= quota:
                in_dev.add(key)
                dev.update(sentences[key])
        in_train |= sentences.keys() - in_dev
    return dev


def _sentence_key(info: TrialInfo, seed: int) -> bytes:
    """A pseudo-random key of the sentence; without a text, of the label, else of the trial id."""
    content = normalise_text(info.text) if info.text else repr(info.tokens) if info.tokens else info.id
    return hashlib.sha256(f"{seed}\n{content}".encode()).digest()


def can_align(tokens: Sequence[int], n_frames: int) -> bool:
    """Whether CTC has a path for these tokens: one frame per token and a blank between equal neighbours."""
    return min_frames(tokens) <= n_frames


def select_split(
    store: Store, settings: DataConfig, count_frames: CountFrames, split: str, sessions: Sequence[str]
) -> tuple[TrialInfo, ...]:
    """Trials of one split in the model's sessions; "dev" and "train" are separated as in training."""
    if split in ("dev", "train"):
        selection = select(store, settings, count_frames)
        if split == "train":
            return tuple(t for t in selection.train if t.session in sessions)
        if selection.selected_on != "dev":
            raise UserError("this run has no dev split (data.dev_fraction is 0); use --split val")
        return tuple(t for t in selection.validation if t.session in sessions)
    if split not in ("val", "test"):
        raise UserError(f"unknown split {split!r}; choose train, dev, val or test")
    return tuple(t for t in store.trials if t.split == split and t.session in sessions)


def _select_sessions(store: Store, settings: DataConfig) -> tuple[str, ...]:
    """The sessions that `data.sessions` and `data.max_sessions` leave, in the order of the store."""
    sessions = store.sessions
    if settings.sessions is not None:
        if missing := [s for s in settings.sessions if s not in sessions]:
            raise UserError(
                f"data.sessions contains {missing[0]!r}, which is not in {store.path.name};"
                f" its sessions are {sessions[0]} … {sessions[-1]}"
            )
        sessions = tuple(s for s in sessions if s in settings.sessions)
    if settings.max_sessions is not None:
        sessions = sessions[: settings.max_sessions]
    return sessions


def _check_channels(store: Store, settings: DataConfig) -> None:
    if settings.release is not None and settings.size.n_channels != store.n_channels:
        raise UserError(
            f"the recipe is for {settings.release} with {settings.size.n_channels} channels, but {store.path.name} has"
            f" {store.n_channels}; use another recipe, or set data.release=null to accept any number"
        )
