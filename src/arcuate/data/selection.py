"""Which trials of a store a recipe trains on, and which it selects its checkpoint on."""

from dataclasses import dataclass

from arcuate.data.config import Data
from arcuate.data.frames import Patch
from arcuate.data.quality import can_align
from arcuate.data.splits import dev_split
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError


@dataclass(frozen=True)
class Selection:
    sessions: tuple[str, ...]
    train: tuple[TrialInfo, ...]
    validation: tuple[TrialInfo, ...]
    selected_on: str  # "dev" (carved out of train) or "val"
    unaligned: tuple[TrialInfo, ...] = ()  # training trials left out: too few frames for their label


def select(store: Store, settings: Data, patch: Patch) -> Selection:
    """The trials this recipe uses; refuses data that do not fit what the recipe fixes."""
    check_fit(store, settings)
    sessions = choose_sessions(store, settings)
    labelled = [t for t in store.trials if t.session in sessions and t.tokens is not None]
    usable = [t for t in labelled if t.split == "train" and t.usable]
    train = [t for t in usable if can_align(t.n_bins, t.tokens or (), patch.bins, patch.stride)]
    aligned = {t.id for t in train}
    unaligned = tuple(t for t in usable if t.id not in aligned)
    if settings.dev_fraction > 0:
        dev = dev_split(train, settings.dev_fraction, settings.seed)
        if not dev or len(dev) == len(train):
            raise UserError(
                f"data.dev_fraction={settings.dev_fraction} of {len(train)} training trials leaves one side"
                " empty; prepare more data or set it to 0"
            )
        validation, train = [t for t in train if t.id in dev], [t for t in train if t.id not in dev]
        return Selection(sessions, tuple(train), tuple(validation), "dev", unaligned)
    validation = [t for t in labelled if t.split == "val"]
    return Selection(sessions, tuple(train), tuple(validation), "val", unaligned)


def trials_of_split(
    store: Store, settings: Data, patch: Patch, split: str, sessions: tuple[str, ...]
) -> tuple[TrialInfo, ...]:
    """All trials of a split in the model's sessions; "dev" and "train" are told apart as in training."""
    if split in ("dev", "train"):
        chosen = select(store, settings, patch)
        if split == "train":
            return tuple(t for t in chosen.train if t.session in sessions)
        if chosen.selected_on != "dev":
            raise UserError("this run has no dev split (data.dev_fraction is 0); use --split val")
        return tuple(t for t in chosen.validation if t.session in sessions)
    if split not in ("val", "test"):
        raise UserError(f"there is no split {split!r}; choose train, dev, val or test")
    return tuple(t for t in store.trials if t.split == split and t.session in sessions)


def choose_sessions(store: Store, settings: Data) -> tuple[str, ...]:
    sessions = store.sessions
    if settings.sessions is not None:
        missing = [s for s in settings.sessions if s not in sessions]
        if missing:
            raise UserError(
                f"data.sessions names {missing[0]!r}, which is not in {store.path.name};"
                f" it holds {sessions[0]} … {sessions[-1]}"
            )
        sessions = tuple(s for s in sessions if s in settings.sessions)
    if settings.max_sessions is not None:
        sessions = sessions[: settings.max_sessions]
    return sessions


def check_fit(store: Store, settings: Data) -> None:
    if settings.channels is not None and settings.channels != store.n_channels:
        raise UserError(
            f"the recipe is for {settings.channels} channels but {store.path.name} has {store.n_channels};"
            " use a recipe of that size, or set data.channels=null to take what the data have"
        )
    n_sessions = len(choose_sessions(store, settings))
    if settings.n_sessions is not None and settings.n_sessions != n_sessions:
        raise UserError(
            f"the recipe is for {settings.n_sessions} sessions but {n_sessions} are selected from"
            f" {store.path.name}; set data.n_sessions=null to take what the data have"
        )
