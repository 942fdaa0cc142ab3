"""Confidence of the model on the sessions that it was trained on, against which drift is measured."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from arcuate.adaptation.drift import warn_about_recording
from arcuate.adaptation.online import OnlineAdapter, compute_log_probs
from arcuate.adaptation.state import ExpectedConfidence, confidence
from arcuate.data.batching import read_statistics
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import days_between, nearest_session
from arcuate.models.model import Model
from arcuate.progress import Progress, counted, logger

_TRIALS_PER_SESSION = 12  # on which confidence is measured
_MAX_TRIALS = 120  # over all sessions; limited because a stream waits until they are decoded
_MIN_SESSION_SD = 0.1  # lower bound of the SD of session means, relative to the mean uncertainty


def measure_confidence(
    adapter: OnlineAdapter, store: Store, progress: Progress | None = None
) -> dict[str, tuple[float, ...]]:
    """Confidence of the unadapted model on trials of each known session, validation trials if there are any."""
    sessions = [s for s in store.sessions if s in adapter.model.config.sessions]
    n_each = min(_TRIALS_PER_SESSION, max(_MAX_TRIALS // max(len(sessions), 1), 2))
    found = {}
    for i, session in enumerate(sessions, start=1):
        own = [t for t in store.trials if t.session == session and t.n_bins]
        trials = [t for t in own if t.split == "val"] or [t for t in own if t.split == "train"]
        model = adapter.unadapted_model(adapter.start(session))
        values = [confidence(compute_log_probs(model, normalised_bins(adapter, store, t))) for t in trials[:n_each]]
        if values:
            found[session] = tuple(values)
        if progress:
            progress(i, len(sessions), "decoding known sessions")
    return found


def expected_confidence(session: str, known: Mapping[str, Sequence[float]]) -> ExpectedConfidence | None:
    """Expected confidence from the other known sessions, each with equal weight; from `session` if it is the only one.

    The session itself is excluded: its trials are not available when it starts, and drift in them would lower the value
    that drift is measured against.
    """
    others = [values for name, values in known.items() if name != session] or list(known.values())
    if not others:
        return None
    means = [float(np.mean(values)) for values in others]
    mean = float(np.mean(means))
    within = [float(np.var(values, ddof=1)) for values in others if len(values) > 1]
    between = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    return ExpectedConfidence(
        mean,
        session_sd=max(between, _MIN_SESSION_SD * (1.0 - mean)),
        trial_sd=math.sqrt(float(np.mean(within))) if within else 0.0,
    )


def normalised_bins(adapter: OnlineAdapter, store: Store, trial: TrialInfo) -> torch.Tensor:
    """Read one trial and normalise it as the model does. (T, C)"""
    device = adapter.model.head.weight.device
    spec = adapter.model.config.settings.front_end.statistics_spec
    bins = torch.from_numpy(store.read_bins(trial))[None].to(device)
    statistics = read_statistics(store, [trial], spec)
    return adapter.model.normalise(bins, statistics and statistics.map(lambda t: t.to(device)))[0]


def log_new_sessions(store: Store, model: Model, trials: Sequence[TrialInfo]) -> None:
    """Log which layer decodes sessions that are new to the model, and problems with their recordings."""
    for session in dict.fromkeys(t.session for t in trials):
        if session in model.config.sessions:
            continue
        nearest = nearest_session(session, model.config.sessions)
        warn_about_recording(store, session, nearest)
        if not model.config.settings.front_end.session_layer.enabled:
            logger.info(f"{session} is new to the model, which has no session layers")
            continue
        days = days_between(session, nearest)
        when = "" if days is None else f", {counted(abs(days), 'day')} {'earlier' if days > 0 else 'later'}"
        logger.info(f"{session} is new to the model: decoded with the layer of {nearest}{when}")


def log_missing_reference() -> None:
    """Log that there are no recordings of known sessions."""
    logger.info(
        "there are no recordings of sessions that the model was trained on, so drift cannot be measured and every step"
        " has full length; give a store that has them with --data"
    )
