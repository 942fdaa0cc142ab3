"""A run stopped after any step, and a live session killed at any bin, continue as if nothing had happened."""

import json
import os
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from arcuate.data.store import Store
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.load import load
from arcuate.experiments.train import train
from arcuate.live.input import Chunk, End, Mark
from arcuate.live.options import LiveOptions
from arcuate.live.recorder import Recorder
from arcuate.live.session import LiveSession
from arcuate.training.callbacks import Callback, Stop
from support.encoders import TRANSDUCERS
from support.kill_checks import without_cost
from support.laws import assert_same_frames, cases, law
from support.live_parts import bins, decoder_of, small_model, small_search

N_STEPS = 6
SMALL = [
    *("encoder.width=8", "encoder.depth=1", "data.batching.batch_size=3", "front_end.patch={bins: 14, stride: 8}"),
    *(f"train.steps={N_STEPS}", "train.log_every=2", "train.validate_every=4", "train.checkpoint_every=3"),
    *("ema.decay=0.9", "runtime.threads=1"),
]
ENCODERS = {
    "gru": [],
    "ssm": ["encoder={kind: ssm, width: 8, depth: 1, n_heads: 2, state_dim: 4}"],
    "transformer": ["encoder={kind: transformer, width: 8, depth: 1, n_heads: 2, context: 20}"],
    "transducer": ["transducer={enabled: true, width: 8}", "loss.rnnt.weight=0.5"],
}


class StopAfter(Callback):
    """Requests a stop after a step."""

    def __init__(self, step: int, stop: Stop) -> None:
        self.step, self.stop = step, stop

    def on_step(self, step: int) -> None:
        if step == self.step:
            self.stop.request()


def outcome(run: Path) -> tuple[list[Any], dict[str, np.ndarray]]:
    rows = [without_cost(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = {}
    for file in sorted((run / "checkpoints" / "last").glob("*.safetensors")):
        weights |= {f"{file.name}: {name}": values for name, values in load_file(file).items()}
    return rows, weights


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uninterrupted runs by kind of encoder, made when they are first needed."""
    return tmp_path_factory.mktemp("uninterrupted")


def uninterrupted(kind: str, store: Path, folder: Path) -> Path:
    if not (folder / kind).exists():
        train("tiny", store, folder / kind, overrides=[*SMALL, *ENCODERS[kind]])
    return folder / kind


@law(0.1)
@given(st.sampled_from(list(ENCODERS)), st.lists(st.integers(1, N_STEPS), min_size=1, max_size=3, unique=True))
def test_a_run_resumed_after_any_step(cohort_store, references, kind, stops):
    reference = uninterrupted(kind, cohort_store, references)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for i, step in enumerate([*sorted(stops), N_STEPS + 1]):
            stop = Stop()
            callbacks = [StopAfter(step, stop)]
            options = {"overrides": [*SMALL, *ENCODERS[kind]], "callbacks": callbacks, "stop": stop}
            train("tiny", cohort_store, run, resume=i > 0, **options)
        (rows, weights), (expected_rows, expected) = outcome(run), outcome(reference)
        assert rows == expected_rows, f"{kind} stopped after {stops}"
        different = [name for name in expected if weights[name].tobytes() != expected[name].tobytes()]
        assert not different, f"{kind} stopped after {stops}: {different[0]} differs"
        store = Store.open(cohort_store)
        trial = store.trials[0]
        inputs = store.read_bins(trial), trial.session, store.block_statistics(trial)
        before, after = (load(f"{path}@last").log_probs(*inputs) for path in (reference, run))
        patch = load(f"{run}@last").model.model.config.settings.front_end.patch
        assert_same_frames("resumed", after, before, patch, bound=0.0)
    cases["resumed"] += 1


# --- live sentences ------------------------------------------------------------------------------------------------

SEARCH = small_search()
HEADS = {
    "words": lambda: decoder_of(small_model(), SEARCH),
    "phonemes": lambda: decoder_of(small_model(seed=1)),
    "transducer": lambda: decoder_of(small_model(seed=2, transducer=TRANSDUCERS[0]), None, head="transducer"),
    "both": lambda: decoder_of(small_model(seed=3, transducer=TRANSDUCERS[1]), SEARCH, head="both"),
}
decoders = cache(lambda head: HEADS[head]())


def record_and_die(head: str, folder: Path, items: list[Any], published: int) -> None:
    """Process the items, then kill this process; texts are written to `published` as viewers receive them."""

    def publish(event: Any) -> None:
        if isinstance(event, dict) and event["type"] == "final":
            os.write(published, json.dumps([event["trial"], event["text"], event["tokens"]]).encode() + b"\n")

    recorder = Recorder(folder, 6)
    session = LiveSession(decoders(head).stream(), LiveOptions(), publish, recorder)
    for item in items:
        session._process(0.0, item)
    os.kill(os.getpid(), signal.SIGKILL)


@law(0.25)
@given(
    st.sampled_from(list(HEADS)),
    st.lists(st.integers(20, 70), min_size=1, max_size=3),
    st.integers(1, 9),
    st.floats(0, 1),
)
def test_a_live_session_killed_at_any_bin(head, sizes, chunk, moment):
    """Sentences that were published are in the recording, and its replay gives the same text and frames."""
    sent = {f"trial{k}": bins(n, seed=k) for k, n in enumerate(sizes)}
    items: list[Any] = []
    for k, values in enumerate(sent.values()):
        items.append(Mark(f"trial{k}", "day1", None))
        items += [Chunk(values[i : i + chunk]) for i in range(0, len(values), chunk)]
        items.append(End())
    until = round(moment * len(items))
    reference = decoders(head)  # before the fork
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "recording"
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                record_and_die(head, folder, items[:until], writing)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as stream:
            published = [json.loads(line) for line in stream]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        context = f"{head}, sentences of {sizes} bins in chunks of {chunk}, killed after item {until} of {len(items)}"
        again = Recorder(folder, 6)
        assert [[f["trial"], f["text"], f["tokens"]] for f in again.finals] == published, context
        everything = np.concatenate(list(sent.values()))
        recorded = np.fromfile(folder / "bins.f32", "<f4").reshape(-1, 6)
        assert recorded.tobytes() == everything[: len(recorded)].tobytes(), context
        again.close()
        if published:
            _check_replay(reference, folder, published, sent, context)
    cases["killed"] += 1


def _check_replay(decoder: Decoder, folder: Path, published: list, sent: dict[str, np.ndarray], context: str) -> None:
    store = Store.open(folder / "store")
    assert len(store.trials) == len(published), context
    for info, (trial, text, tokens) in zip(store.trials, published, strict=True):
        replayed, whole = decoder.stream("day1"), decoder.stream("day1")
        for row in store.read_bins(info):
            replayed.push(row)
        whole.push(sent[trial])
        frames = replayed.sentence_log_probs(), whole.sentence_log_probs()
        patch = decoder.model.model.config.settings.front_end.patch
        assert_same_frames("killed", *frames, patch, context=f"{trial}, {context}")
        found = replayed.finish()
        assert (found.text or "", found.phonemes) == (text, tokens), f"{trial}, {context}"
