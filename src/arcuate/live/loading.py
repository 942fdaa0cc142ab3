"""Loading of decoder and replay trials for `arcuate live` and `arcuate bench live`."""

from dataclasses import replace
from pathlib import Path

from arcuate.adaptation.config import METHODS, Adaptation
from arcuate.adaptation.evaluate import recording_order
from arcuate.adaptation.known_sessions import log_new_sessions
from arcuate.data.store import Store
from arcuate.decoding.config import DecodingConfig
from arcuate.errors import UserError
from arcuate.evaluation.transcribe import read_weights
from arcuate.live.decoder import StreamingDecoder
from arcuate.live.sources.replay import ReplayTrials, select_trials
from arcuate.progress import Progress
from arcuate.run import Run


def load_decoder(
    run: Path,
    *,
    lm: str | None,
    lexicon: str,
    decoding: DecodingConfig | str | Path | None,
    beam: int | None,
    session: str | None,
    adapt: str | Adaptation | None,
    data: str | Path | None,
    llm: str | Path | None = None,
    progress: Progress | None = None,
) -> StreamingDecoder:
    """Load a decoder; `decoding` may be a file of `arcuate tune`, and `beam` overrides its beam."""
    if decoding is None:
        decoding = DecodingConfig()
    elif not isinstance(decoding, DecodingConfig):
        decoding = read_weights(Path(decoding))[0]
    if beam is not None:
        decoding = decoding.model_copy(update={"beam": beam})
    return StreamingDecoder.load(
        run,
        lm=lm,
        lexicon=lexicon,
        decoding=decoding,
        session=session,
        llm=llm,
        adapt=adapt,
        data=data if adapt is not None else None,
        progress=progress,
    )


def check_method(adapt: str | Adaptation | None) -> None:
    if isinstance(adapt, str) and adapt not in METHODS:
        raise UserError(f"--adapt {adapt!r} is unknown; choose {', '.join(METHODS)}")


def open_store(run: Path, data: str | Path | None) -> Store:
    """Open a store, by default the one that the run was trained on."""
    if data is not None:
        return Store.open(Path(data))
    if not Run(run).environment_file.is_file():
        raise UserError(f"{run} does not record what it was trained on; name a store with --data")
    return Store.open(Path(str(Run(run).data().get("path", ""))))


def open_replay(
    run: Path, decoder: StreamingDecoder, data: str | Path | None, split: str, session: str | None
) -> ReplayTrials:
    """Open the trials to replay; with adaptation in recording order, including sessions new to the model."""
    store = open_store(run, data)
    if store.n_channels != decoder.n_channels:
        raise UserError(
            f"{store.path} has {store.n_channels} channels, but the model expects {decoder.n_channels}"
        )
    front_end = decoder.engine.model.config.settings.front_end
    adapts = decoder.adapter is not None
    sessions = store.sessions if adapts else decoder.sessions
    chosen_split = None if split == "all" else split
    found = select_trials(store, sessions, front_end.normalise, front_end.log1p, chosen_split, session)
    if not adapts:
        return found
    trials = recording_order(found.trials, store.sessions)
    log_new_sessions(store, decoder.engine.model, trials)
    return replace(found, trials=tuple(trials))
