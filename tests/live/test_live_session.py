"""Live sessions: endpointing, closed sessions, events, the decoding thread, slow viewers, a soak test."""

import asyncio
import json
import threading
import time

import numpy as np
import pytest

from arcuate.data.alphabet import BLANK, CLASSES, SILENCE
from arcuate.decoding.hypothesis import word_alternatives
from arcuate.errors import UserError
from arcuate.evaluation.metrics import align_words
from arcuate.evaluation.unlabelled import ErrorReference
from arcuate.live.clients import Broadcaster, Viewer, parse_command
from arcuate.live.config import Endpoints, LiveSettings, Start
from arcuate.live.endpointing import Endpointer
from arcuate.live.input import Chunk, Command, End, LogProbs, Mark
from arcuate.live.session import LiveSession
from support.live_parts import bins, small_decoder, small_search

SEARCH = small_search()
BY_TRIAL = LiveSettings(endpoints=Endpoints(enabled=False))


def loud(n: int) -> np.ndarray:
    """Bins that count as speech in `mark_loud_as_speech`."""
    return np.full((n, 6), 5.0, np.float32)


def push_script(endpointer: Endpointer, script: str) -> None:
    """Push frames given as letters: a phoneme for a letter, blank for a dot."""
    for sign in script:
        frame = np.full((1, len(CLASSES)), -12.0, np.float32)
        token = BLANK if sign == "." else SILENCE if sign == " " else 1 + "abcdefg".index(sign)
        frame[0, token] = 0.0
        frame -= np.log(np.exp(frame).sum())
        endpointer.push_log_probs(frame)


def make_endpointer(settings: LiveSettings = BY_TRIAL) -> tuple[Endpointer, list[dict]]:
    found: list[dict] = []
    return Endpointer(small_decoder(SEARCH), settings, found.append), found


def finals(events: list[dict]) -> list[str]:
    return [e["text"] for e in events if e["type"] == "final"]


def test_a_marked_sentence_is_decoded_as_offline() -> None:
    endpointer, events = make_endpointer()
    chunk = bins(100)
    endpointer.start_trial(Mark("t1", "day1", "the reference"))
    for row in chunk:
        endpointer.push(row[None])
    endpointer.end()
    decoder = small_decoder(SEARCH)
    decoder.reset("day1")
    decoder.push(chunk)
    expected = decoder.finish()
    final = next(e for e in events if e["type"] == "final")
    assert final["text"] == expected.text and final["trial"] == "t1" and final["n_bins"] == 100
    assert final["alignment"] and final["reference"] == "the reference"
    assert any(e["type"] == "partial" for e in events)


def test_partials_have_settled_words() -> None:
    endpointer, events = make_endpointer()
    logits = np.random.default_rng(1).normal(scale=2.0, size=(60, len(CLASSES)))
    for frame in (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32):
        endpointer.push_log_probs(frame[None])
    endpointer.end()
    partials = [e for e in events if e["type"] == "partial"]
    final = next(e for e in events if e["type"] == "final")
    assert all(e["words"][: e["n_settled"]] == final["words"][: e["n_settled"]] for e in partials)
    assert final["words"]


def mark_loud_as_speech(monkeypatch: pytest.MonkeyPatch, endpointer: Endpointer) -> None:
    """Treat frames as speech where the first channel is above 3."""
    state = {"loud": False}
    push = endpointer.decoder.push

    def push_piece(piece):
        state["loud"] = bool(np.asarray(piece)[-1, 0] > 3)
        return push(piece)

    monkeypatch.setattr(endpointer.decoder, "push", push_piece)
    monkeypatch.setattr(endpointer, "_is_speech", lambda log_probs: [state["loud"]] * len(log_probs))


def test_silence_ends_a_sentence_and_speech_starts_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    endpointer, events = make_endpointer(LiveSettings(endpoints=Endpoints(silence_s=0.8, pre_roll_s=0.4)))
    mark_loud_as_speech(monkeypatch, endpointer)
    silence = np.zeros((100, 6), np.float32)
    for _ in range(2):
        endpointer.push(silence)
        endpointer.push(loud(60) + bins(60) * 0.1)
        endpointer.push(silence)
    states = [e["state"] for e in events if e["type"] == "state"]
    assert states == ["listening", *["speaking", "listening"] * 2]
    n_bins = [e["n_bins"] for e in events if e["type"] == "final"]
    assert len(n_bins) == 2 and all(60 + 20 + 40 - 8 <= n <= 60 + 20 + 40 + 16 for n in n_bins)


def test_silence_alone_makes_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    endpointer, events = make_endpointer(LiveSettings())
    mark_loud_as_speech(monkeypatch, endpointer)
    for _ in range(20):
        endpointer.push(np.zeros((50, 6), np.float32))
    assert not finals(events) and endpointer.decoder.n_frames < 100  # memory stays bounded


def test_a_sentence_ends_at_its_maximum_length(monkeypatch: pytest.MonkeyPatch) -> None:
    endpointer, events = make_endpointer(LiveSettings(endpoints=Endpoints(max_s=2.0)))
    mark_loud_as_speech(monkeypatch, endpointer)
    endpointer.push(loud(350))
    assert len(finals(events)) == 3


def test_nothing_is_decoded_while_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BY_TRIAL.model_copy(update={"start": Start(closed=True)})
    endpointer, events = make_endpointer(settings)
    monkeypatch.setattr(endpointer.decoder, "push", lambda _: pytest.fail("decoded while closed"))
    endpointer.push(bins(100))
    endpointer.end()
    assert [e["type"] for e in events] == ["state"] and events[0]["state"] == "closed"


def test_opening_and_closing() -> None:
    settings = BY_TRIAL.model_copy(update={"start": Start(closed=True)})
    endpointer, events = make_endpointer(settings)
    endpointer.push(bins(80))
    endpointer.open()
    endpointer.push(bins(80))
    endpointer.close()
    endpointer.push(bins(80))
    endpointer.end()
    assert len(finals(events)) == 1
    assert [e["state"] for e in events if e["type"] == "state"] == ["closed", "speaking", "closed"]


def test_a_phrase_opens_and_is_never_shown() -> None:
    settings = BY_TRIAL.model_copy(update={"start": Start(closed=True, phrase="Aa ae!")})
    endpointer, events = make_endpointer(settings)
    for script in ("c . d.", "a. .b.", "c. "):
        push_script(endpointer, script)
        endpointer.end()
    assert finals(events) == ["ah"]
    assert not any(e["type"] == "partial" and "aa" in e["words"] for e in events)
    states = [e["state"] for e in events if e["type"] == "state"]
    assert states == ["closed", "speaking"]
    assert events.index({"type": "state", "state": "speaking"}) < min(
        k for k, e in enumerate(events) if e["type"] in ("partial", "final")
    )


def test_the_state_is_published_before_the_first_sentence() -> None:
    """A page that joins an idle session must not look disconnected."""
    _, events = make_endpointer(LiveSettings())
    assert events == [{"type": "state", "state": "listening"}]


def test_a_sentence_that_was_partly_closed_is_not_scored() -> None:
    """Closed or opened in the middle: the remainder must not be scored against the full reference."""
    endpointer, events = make_endpointer()
    endpointer.start_trial(Mark("a", "day1", "The full sentence."))
    endpointer.push(bins(60))
    endpointer.close()
    endpointer.start_trial(Mark("b", "day1", "Another full sentence."))
    endpointer.push(bins(60))
    endpointer.open()
    endpointer.push(bins(60))
    endpointer.end()
    endpointer.close()
    endpointer.start_trial(Mark("c", "day1", "A third."))
    endpointer.open()  # before its first bin
    endpointer.push(bins(60))
    endpointer.end()
    found = [(e["trial"], e["reference"], e["alignment"] is None) for e in events if e["type"] == "final"]
    assert found == [("a", None, True), ("b", None, True), ("c", "A third.", False)]


def test_words_are_aligned_with_the_reference() -> None:
    aligned = align_words("the cat sat down", ["a", "cat", "sat", "right", "down"])
    assert [part["word"] for part in aligned] == ["a", "cat", "sat", "right", "down"]
    assert [part["op"] for part in aligned] == ["substitution", "correct", "correct", "insertion", "correct"]
    assert aligned[0]["reference"] == "the" and "reference" not in aligned[3]
    assert align_words(None, ["a"]) is None
    assert [part["op"] for part in align_words("a b", ["a"])] == ["correct", "deletion"]


def test_alternatives_are_aligned_with_words() -> None:
    words = ["i", "scream", "now"]
    found = word_alternatives(words, [["i", "cream", "now"], ["ice", "cream", "now"], words])
    assert found == {1: ["cream"], 0: ["ice"]}


# --- the thread ---------------------------------------------------------------------------------------------


def run_session(items: list, settings: LiveSettings = BY_TRIAL) -> tuple[LiveSession, list]:
    found: list = []
    session = LiveSession(small_decoder(SEARCH), settings, found.append)
    session.start()
    for item in items:
        session.put(item)
    session.stop()
    return session, found


def dict_events(events: list) -> list[dict]:
    return [e for e in events if isinstance(e, dict)]


def test_a_session_decodes_measures_and_draws() -> None:
    items = [Mark("a"), *(Chunk(row[None]) for row in bins(80)), End()]
    session, events = run_session(items)
    assert len(finals(dict_events(events))) == 1 and session.error is None
    assert session.latency.n_frames == session.latency.summary()["n_frames"] == (80 - 4 - 14) // 4 + 1
    images = [e for e in events if isinstance(e, bytes)]
    rows = sum(int.from_bytes(p[8:10], "little") for p in images if p[0] == 1)
    assert rows == 80 and sum(p[0] == 2 for p in images) == session.latency.n_frames


def test_the_error_rate_is_estimated_from_the_third_sentence_on() -> None:
    found: list = []
    reference = ErrorReference(0.1, 50, (0.5, -1.0, -0.5, -1.0, -1.5))
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, found.append, error_reference=reference)
    session.start()
    for name in "abcd":
        for item in (Mark(name), Chunk(bins(80)), End()):
            session.put(item)
    session.stop()
    estimates = [event["estimate"] for event in dict_events(found) if event["type"] == "final"]
    assert estimates[:2] == [None, None] and [e["n_trials"] for e in estimates[2:]] == [3, 4]
    assert all(0 < e["low"] < e["error_rate"] < e["high"] < 1 for e in estimates[2:])
    _, without = run_session([Mark("a"), Chunk(bins(80)), End()])
    assert [event["estimate"] for event in dict_events(without) if event["type"] == "final"] == [None]


def test_commands_and_log_probs_use_the_same_queue() -> None:
    frame = np.full((6, len(CLASSES)), -np.log(len(CLASSES)), np.float32)
    items = [Command("close"), Chunk(bins(50)), Command("open"), LogProbs(frame), Command("end")]
    _, events = run_session(items)
    assert len(finals(dict_events(events))) == 1


def test_a_clean_sentence_after_many_faults_is_decoded_correctly() -> None:
    """Gaps, NaN, wrong shapes, clock jumps and reconnects must not affect a later sentence."""
    rng, items = np.random.default_rng(0), []
    for k in range(400):
        chunk = bins(int(rng.integers(0, 6)), int(rng.choice([6, 6, 6, 4])), seed=k)
        if rng.random() < 0.3 and chunk.size:
            chunk[0, 0] = rng.choice([np.nan, np.inf])
        first = int(rng.integers(0, rng.choice([200, 10_000]))) if rng.random() < 0.3 else None
        time_s = float(rng.normal(0, 1e6)) if rng.random() < 0.3 else None
        items.append(Chunk(chunk, time_s, first))
        if rng.random() < 0.02:
            items.append(Mark(f"t{k}", str(rng.choice(["day1", "day2"]))))
    clean = bins(90, seed=999)
    items += [Mark("clean", "day2"), *(Chunk(row[None]) for row in clean), End()]
    session, events = run_session(items)
    decoder = small_decoder(SEARCH)
    decoder.push(clean)
    assert session.error is None
    assert finals(dict_events(events))[-1] == decoder.finish().text
    kinds = {e["kind"] for e in dict_events(events) if e["type"] == "fault"}
    assert kinds == {"channels", "not_finite", "gap", "clock", "repeat", "restart"}


def test_log_probs_of_another_model_scroll_the_page() -> None:
    """Frames without bins are drawn one after another, not all at the same position."""
    frame = np.full((3, len(CLASSES)), -np.log(len(CLASSES)), np.float32)
    _, events = run_session([LogProbs(frame), LogProbs(frame), End()])
    positions = [int.from_bytes(p[4:8], "little") for p in events if isinstance(p, bytes) and p[0] == 2]
    assert positions == [12, 24]


def stopped_by(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[LiveSession, list]:
    """A session whose thread fails on its first bins."""
    found: list = []
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, found.append)

    def fail(_: np.ndarray) -> list[float]:
        raise error

    monkeypatch.setattr(session._endpointer, "push", fail)
    session.start()
    session.put(Chunk(bins(4)))
    session._thread.join(300)
    assert not session.alive
    return session, found


def test_a_stopped_session_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue without a consumer must not block producers."""
    session, events = stopped_by(UserError("it broke"), monkeypatch)
    while session.put(Chunk(bins(1))):
        pass
    session.stop()
    assert session.error == "it broke" and dict_events(events)[-1] == {"type": "error", "message": "it broke"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_unexpected_errors_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    session, events = stopped_by(ZeroDivisionError(), monkeypatch)
    assert session.error is not None and dict_events(events)[-1] == {"type": "error", "message": session.error}


def test_memory_stays_flat_over_many_sentences() -> None:
    session = LiveSession(small_decoder(SEARCH), BY_TRIAL, lambda _: None)
    session.start()
    rows: list[int] = []
    for k in range(60):
        session.put(Mark(f"t{k}"))
        session.put(Chunk(bins(100, seed=k)))
        session.put(End())
        if k % 20 == 19:
            while session.n_sentences < k + 1:
                time.sleep(0.01)
            rows.append(len(session.decoder._now.frames) + session._queue.qsize())
    session.stop()
    assert session.n_sentences == 60 and rows == [0, 0, 0]


# --- viewers ------------------------------------------------------------------------------------------------


def test_a_slow_viewer_misses_images_but_no_text_and_delays_no_one() -> None:
    async def watch() -> None:
        broadcaster = Broadcaster(asyncio.get_running_loop(), max_viewers=3, capacity=16)
        slow, quick = broadcaster.join(), broadcaster.join()
        seen: list[int] = []
        read = threading.Semaphore(0)

        async def read_quickly() -> None:
            while True:
                message = await quick.get()
                if isinstance(message, str) and (event := json.loads(message))["type"] == "final":
                    seen.append(event["number"])
                    read.release()

        def decode() -> None:
            for k in range(200):
                broadcaster.publish(b"\x01image")
                broadcaster.publish({"type": "final", "number": k})
                assert read.acquire(timeout=300), "the quick viewer waits for the slow one"

        reader = asyncio.create_task(read_quickly())
        await asyncio.to_thread(decode)
        reader.cancel()
        assert seen == list(range(200)) and quick.n_dropped == 0
        assert len(slow.queue) <= 17 and slow.n_dropped > 0
        assert finals_of(slow)[-50:] == list(range(150, 200))

    asyncio.run(watch())


def test_a_viewer_that_falls_behind_receives_a_snapshot() -> None:
    async def watch() -> None:
        broadcaster = Broadcaster(asyncio.get_running_loop(), max_viewers=1, capacity=16)
        viewer = broadcaster.join()
        for k in range(40):  # while the viewer reads nothing
            broadcaster.publish({"type": "final", "number": k})
        await asyncio.sleep(0)
        assert finals_of(viewer) == list(range(40))

    asyncio.run(watch())


def finals_of(viewer: Viewer) -> list[int]:
    """Numbers of the finals that a viewer has after receiving its queue."""
    known: list[int] = []
    for message in viewer.queue:
        event = json.loads(message) if isinstance(message, str) else {"type": "image"}
        if event["type"] == "snapshot":
            known = [e["number"] for e in event["finals"]]
        elif event["type"] == "final":
            known.append(event["number"])
    return known


def test_viewers_are_limited_and_leave() -> None:
    async def join() -> None:
        broadcaster = Broadcaster(asyncio.get_running_loop(), max_viewers=2, capacity=16)
        first = broadcaster.join()
        broadcaster.join()
        with pytest.raises(UserError, match="2 viewers is reached"):
            broadcaster.join()
        broadcaster.leave(first)
        broadcaster.join()

    asyncio.run(join())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"type": 3}', "[" * 5000, "\x00", '"open"'])
def test_malformed_commands_are_rejected(text: str) -> None:
    with pytest.raises(UserError):
        parse_command(text)
