"""Recordings of live sessions: finals are synced, a killed session is recovered, sentences become trials."""

import errno
import json
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from arcuate.adaptation.calibration import split_session
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.live import recorder
from arcuate.live.input import Chunk, Mark
from arcuate.live.recorder import Recorder, make_store
from arcuate.live.sources.replay import Replay, select_trials
from arcuate.models.config import Patch
from support.live_parts import SessionRunner, bins, marked

SENTENCES = [("one", "day1", "The cat sat."), ("two", "day1", None), ("three", "day2", "Down there.")]


def record(folder: Path, sentences: list = SENTENCES, start: int = 0) -> list[dict]:
    items = []
    for k, (name, session, reference) in enumerate(sentences, start=start):
        items += marked(name, bins(70 + k, seed=k), reference, session)
    runner = SessionRunner(record=folder).run(items)
    assert runner.session.error is None
    return runner.events_of("final")


def test_a_recording_becomes_a_store_with_the_same_bins(tmp_path: Path) -> None:
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


def test_a_replayed_recording_is_decoded_the_same(tmp_path: Path) -> None:
    finals = record(tmp_path / "rec")
    prepared = select_trials(Store.open(tmp_path / "rec" / "store"), ("day1", "day2"), "none", False, split=None)
    runner = SessionRunner().start()
    replay = Replay(prepared, runner.session.put, speed=64.0, pause_s=0.01, loop=False)
    replay.start()
    assert replay.done.wait(300)
    runner.session.stop()
    assert runner.texts == [f["text"] for f in finals]


def test_a_killed_session_loses_nothing_that_was_final(tmp_path: Path) -> None:
    """An incomplete sentence is lost; the finals and their bins are kept."""
    folder = tmp_path / "rec"
    runner = SessionRunner(record=folder)
    recorder = runner.session.recorder
    for item in (*marked("a", bins(80), "Hello."), Mark("b"), Chunk(bins(40))):
        runner.session._process(0.0, item)
    with (folder / "journal.jsonl").open("a") as file:  # killed in the middle of a line and of a bin
        file.write('{"type": "partial", "wor')
    recorder._bins.write(b"\x00" * 7)
    recorder._bins.flush()
    recorder._lock.close()
    again = Recorder(folder, 6)
    assert [f["text"] for f in again.finals] == runner.texts
    assert len(again.finals) == 1 and again.n_bins == 120
    again.close()
    more = record(folder, [("c", "day2", "Again.")], start=5)
    store = Store.open(folder / "store")
    assert [t.text for t in store.trials] == ["Hello.", "Again."] and len(more) == 1
    np.testing.assert_array_equal(store.read_bins(store.trials[1]), bins(75, seed=5))
    rows = read_live(folder)
    assert [row["number"] for row in rows] == [1, 2]
    last = [p["words"] for p in rows[1]["partials"]]
    assert last == [
        e["words"] for e in events_of(folder, "partial")[-len(last) :]
    ]  # without those of the lost sentence


def events_of(folder: Path, kind: str) -> list[dict]:
    """Events written by the last server."""
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    start = max(k for k, row in enumerate(rows) if row["type"] == "recording")
    return [row for row in rows[start:] if row["type"] == kind]


def read_live(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "store" / "live.jsonl").read_text().splitlines()]


def test_a_full_disk_ends_the_recording_and_not_the_decoding(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    runner = SessionRunner(record=tmp_path / "rec")
    session, recorder = runner.session, runner.session.recorder
    for item in marked("a", bins(80), "Hello."):
        session._process(0.0, item)
    recorder._bins.close()
    recorder._bins = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - the recorder closes it
    runner.run(marked("b", bins(70), "Again."))
    assert [e["trial"] for e in runner.events_of("final")] == ["a", "b"] and session.error is None
    assert [e["on"] for e in runner.events_of("recording")] == [True, False]
    assert recorder.error is not None and "No space left" in recorder.error
    assert [t.text for t in Store.open(tmp_path / "rec" / "store").trials] == ["Hello."]


def test_two_servers_do_not_record_into_one_folder(tmp_path: Path) -> None:
    first = Recorder(tmp_path / "rec", 6)
    with pytest.raises(UserError, match="another server is recording"):
        Recorder(tmp_path / "rec", 6)
    first.close()
    Recorder(tmp_path / "rec", 6).close()


def test_an_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Recorder(tmp_path / "file" / "rec", 6)


def test_a_recorded_session_can_be_used_for_calibration(tmp_path: Path) -> None:
    """It has its own name, and its labelled sentences are in order."""
    texts = ["One.", None, "Two.", "Three."]
    items = [item for k, text in enumerate(texts) for item in marked(f"t{k}", bins(90, seed=k), text, "day2")]
    SessionRunner(record=tmp_path / "rec", record_session="day3").run(items)
    store = Store.open(tmp_path / "rec" / "store")
    assert store.sessions == ("day3",)
    found = split_session(store, "day3", 2, Patch())
    assert [t.text for t in found.calibration] == ["One.", "Two."] and [t.text for t in found.held_out] == ["Three."]
    assert [row["session"] for row in read_live(tmp_path / "rec")] == ["day2"] * 4  # whose layer decoded it


def test_latencies_are_those_of_the_sentence(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rec", 6)
    recorder.add_latency(99.0)  # outside a sentence
    recorder.add_event({"type": "state", "state": "speaking"})
    recorder.add_latency(5.0)
    recorder.add_event({"type": "final", "n_bins": 0})
    assert events_of(tmp_path / "rec", "final")[0]["latencies_ms"] == [5.0]
    recorder.close()


def test_a_sentence_that_was_cut_off_is_kept_without_its_reference(tmp_path: Path) -> None:
    """An incomplete sentence must not be scored against the full reference."""
    items = [Mark("a", "day1", "A full sentence."), Chunk(bins(40)), Mark("b", "day1", "Another.")]
    SessionRunner(record=tmp_path / "rec").run(items)
    (info,) = Store.open(tmp_path / "rec" / "store").trials
    assert info.split == "test" and info.text is None and info.n_bins == 40


def test_a_recording_without_sentences_makes_no_store(tmp_path: Path) -> None:
    Recorder(tmp_path / "rec", 6).close()
    assert make_store(tmp_path / "rec") is None and not (tmp_path / "rec" / "store").exists()


def test_other_folders_and_channel_counts_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a recording"):
        Recorder(tmp_path / "full", 6)
    Recorder(tmp_path / "rec", 6).close()
    with pytest.raises(UserError, match="a recording of 6 channels"):
        Recorder(tmp_path / "rec", 8)


@pytest.mark.parametrize("key", ["words", "at", "n_settled"])
def test_a_damaged_partial_text_does_not_lose_the_sentence(tmp_path: Path, key: str) -> None:
    record(tmp_path / "rec", [("a", "day1", "Hello.")])
    journal = tmp_path / "rec" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert any(row.pop(key, None) is not None for row in lines if row["type"] == "partial")
    journal.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert make_store(tmp_path / "rec") is not None
    assert read_live(tmp_path / "rec")[0]["text"] is not None


def test_a_folder_that_a_fault_left_half_created_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a kill between the creation of its files."""
    opened: list[Path] = []

    def fail_second(path: Path, mode: str) -> IO[Any]:
        if opened:
            raise OSError(errno.ENOSPC, "No space left on device")
        opened.append(path)
        return open(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_open_private", fail_second)
        with pytest.raises(UserError, match="No space left on device"):
            Recorder(tmp_path / "rec", 6)
    assert len(record(tmp_path / "rec")) == len(Store.open(tmp_path / "rec" / "store").trials) == len(SENTENCES)
