"""Recordings of live sessions: safe as soon as final, whole after a kill, trials like any others."""

import json
from pathlib import Path

import numpy as np
import pytest

from arcuate.errors import UserError
from arcuate.live.chunk import Chunk, End, Mark
from arcuate.live.recorder import Recorder, seal
from arcuate.live.session import LiveSession
from arcuate.live.settings import Endpoints, LiveSettings
from arcuate.live.sources.replay import Replay, prepare_replay
from arcuate.store import Store
from live_parts import bins, small_decoder, small_search

SEARCH = small_search()
BY_TRIAL = LiveSettings(endpoints=Endpoints(enabled=False))
SENTENCES = [("one", "day1", "The cat sat."), ("two", "day1", None), ("three", "day2", "Down there.")]


def record(folder: Path, sentences: list = SENTENCES, start: int = 0) -> list[dict]:
    events: list = []
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, events.append, Recorder(folder, 6))
    session.start()
    for k, (trial, day, reference) in enumerate(sentences, start=start):
        session.put(Mark(trial, day, reference))
        for row in bins(70 + k, seed=k):
            session.put(Chunk(row[None]))
        session.put(End())
    session.stop()
    assert session.error is None
    return [e for e in events if isinstance(e, dict) and e["type"] == "final"]


def test_a_recording_is_a_store_of_the_very_bins(tmp_path: Path) -> None:
    finals = record(tmp_path / "rec")
    store = Store.open(tmp_path / "rec" / "store")
    assert [t.id for t in store.trials] == ["day1/val/0000", "day1/test/0000", "day2/val/0000"]
    assert [t.text for t in store.trials] == ["The cat sat.", None, "Down there."]
    assert store.trials[0].tokens and store.trials[1].tokens is None
    for k, info in enumerate(store.trials):
        np.testing.assert_array_equal(store.read_bins(info), bins(70 + k, seed=k))
    assert not store.find_changed()
    rows = [json.loads(line) for line in (tmp_path / "rec" / "store" / "live.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [f["text"] for f in finals]
    assert [row["id"] for row in rows] == [t.id for t in store.trials]
    assert all(row["partials"] and row["latencies_ms"] and row["at"] > 0 for row in rows)


def test_what_was_recorded_can_be_replayed_and_reads_the_same(tmp_path: Path) -> None:
    finals = record(tmp_path / "rec")
    prepared = prepare_replay(
        Store.open(tmp_path / "rec" / "store"), ("day1", "day2"), "none", False, split=None
    )
    events: list = []
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, events.append)
    session.start()
    replay = Replay(prepared, session.put, speed=64.0, rest_s=0.01, loop=False)
    replay.start()
    assert replay.done.wait(60)
    session.stop()
    again = [e["text"] for e in events if isinstance(e, dict) and e["type"] == "final"]
    assert again == [f["text"] for f in finals]


def test_a_killed_session_loses_nothing_that_was_final(tmp_path: Path) -> None:
    """A sentence half said is lost; the finals, and bins up to them, are there for the next server."""
    folder = tmp_path / "rec"
    recorder = Recorder(folder, 6)
    events: list = []
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, events.append, recorder)
    for item in (Mark("a", "day1", "Hello."), Chunk(bins(80)), End(), Mark("b"), Chunk(bins(40))):
        session._take(0.0, item)
    with (folder / "journal.jsonl").open("a") as file:  # killed in the middle of a line and of a bin
        file.write('{"type": "partial", "wor')
    recorder._bins.write(b"\x00" * 7)
    recorder._bins.flush()
    again = Recorder(folder, 6)
    said = [e["text"] for e in events if isinstance(e, dict) and e["type"] == "final"]
    assert [f["text"] for f in again.finals] == said
    assert len(again.finals) == 1 and again.n_bins == 120
    again.close()
    more = record(folder, [("c", "day2", "Again.")], start=5)
    store = Store.open(folder / "store")
    assert [t.text for t in store.trials] == ["Hello.", "Again."] and len(more) == 1
    np.testing.assert_array_equal(store.read_bins(store.trials[1]), bins(75, seed=5))


def test_a_sentence_that_was_cut_off_is_kept_without_its_reference(tmp_path: Path) -> None:
    """What was not said to its end must not be scored against the whole sentence."""
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, lambda _: None, Recorder(tmp_path / "rec", 6))
    session.start()
    for item in (Mark("a", "day1", "A whole sentence."), Chunk(bins(40)), Mark("b", "day1", "Another.")):
        session.put(item)
    session.stop()
    (info,) = Store.open(tmp_path / "rec" / "store").trials
    assert info.split == "test" and info.text is None and info.n_bins == 40


def test_a_recording_of_nothing_makes_no_store(tmp_path: Path) -> None:
    Recorder(tmp_path / "rec", 6).close()
    assert seal(tmp_path / "rec") is None and not (tmp_path / "rec" / "store").exists()


def test_other_folders_and_other_channels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is no recording"):
        Recorder(tmp_path / "full", 6)
    Recorder(tmp_path / "rec", 6).close()
    with pytest.raises(UserError, match="a recording of 6 channels"):
        Recorder(tmp_path / "rec", 8)
