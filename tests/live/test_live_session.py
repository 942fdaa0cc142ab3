"""Live sessions: endpointing, marked trials, closed sessions, events, the decoding thread."""

import time
from pathlib import Path

import numpy as np
import pytest

from arcuate.data.alphabet import BLANK, CLASSES, SILENCE
from arcuate.decoding.hypothesis import word_alternatives
from arcuate.errors import UserError
from arcuate.evaluation.metrics import align_words
from arcuate.evaluation.unlabelled import ErrorReference
from arcuate.live.endpointing import Endpointer
from arcuate.live.input import Chunk, Command, End, LogProbs, Mark, SessionChange
from arcuate.live.options import LiveOptions
from support.live_parts import (
    OPTIONS,
    SEARCH,
    SessionRunner,
    bins,
    decoder_of,
    marked,
    small_decoder,
    small_model,
)

SILENT = np.zeros((100, 6), np.float32)


def loud(n: int) -> np.ndarray:
    """Bins of speech for the model of `detector`."""
    return np.full((n, 6), 5.0, np.float32) + bins(n) * 0.1


def detector(options: LiveOptions = OPTIONS) -> tuple[Endpointer, list[dict]]:
    """An endpointer whose model outputs phonemes for loud bins, and blank or silence for others."""
    model, found = small_model(), []
    model.head.weight.data.zero_()
    model.head.bias.data.fill_(-9.0)
    decoder, push = decoder_of(model, SEARCH), None
    push = decoder.push

    def push_piece(piece):
        is_loud = bool(np.asarray(piece)[-1, 0] > 3)
        model.head.bias.data[3 if is_loud else BLANK], model.head.bias.data[BLANK if is_loud else 3] = 9.0, -9.0
        return push(piece)

    decoder.push = push_piece  # the encoder's output is ignored: the last bin decides
    return Endpointer(decoder, options, found.append), found


def push_script(endpointer: Endpointer, script: str) -> None:
    """Push frames given as letters: a phoneme for a letter, blank for a dot."""
    for sign in script:
        frame = np.full((1, len(CLASSES)), -12.0, np.float32)
        token = BLANK if sign == "." else SILENCE if sign == " " else 1 + "abcdefg".index(sign)
        frame[0, token] = 0.0
        frame -= np.log(np.exp(frame).sum())
        endpointer.push_log_probs(frame)


def make_endpointer(options: LiveOptions = OPTIONS) -> tuple[Endpointer, list[dict]]:
    found: list[dict] = []
    return Endpointer(small_decoder(SEARCH), options, found.append), found


def finals(events: list[dict]) -> list[dict]:
    return [e for e in events if e["type"] == "final"]


def states(events: list[dict]) -> list[str]:
    return [e["state"] for e in events if e["type"] == "state"]


# --- sentences ------------------------------------------------------------------------------------------------------


def test_a_marked_trial_is_decoded_as_offline() -> None:
    sent, decoder = bins(100), small_decoder(SEARCH)
    runner = SessionRunner().run(marked("t1", sent, "the reference"))
    decoder.reset("day1")
    decoder.push(sent)
    (final,) = runner.events_of("final")
    assert final["text"] == decoder.finish().text and (final["trial"], final["n_bins"]) == ("t1", 100)
    assert final["alignment"] and final["reference"] == "the reference" and not final["empty"]


def test_settled_words_stay() -> None:
    logits = np.random.default_rng(1).normal(scale=2.0, size=(60, len(CLASSES)))
    frames = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    runner = SessionRunner().run([Mark(), *(LogProbs(frame[None]) for frame in frames), End()])
    partials, (final,) = runner.events_of("partial"), runner.events_of("final")
    assert partials and all(e["words"][: e["n_settled"]] == final["words"][: e["n_settled"]] for e in partials)


def test_silence_ends_a_sentence_and_speech_starts_the_next() -> None:
    endpointer, events = detector(LiveOptions(silence_s=0.8))
    for _ in range(2):
        for part in (SILENT, loud(60), SILENT):
            endpointer.push(part)
    assert states(events) == ["listening", *["speaking", "listening"] * 2]
    n_bins = [e["n_bins"] for e in finals(events)]
    assert len(n_bins) == 2 and all(60 + 30 + 40 - 8 <= n <= 60 + 30 + 40 + 16 for n in n_bins)


@pytest.mark.parametrize("pause_s", [2, 20])
def test_a_pause_within_a_marked_trial_does_not_split_it(pause_s: int) -> None:
    """The first part carried the id of the trial and was scored against its whole reference."""
    endpointer, events = detector()
    endpointer.start_trial(Mark("t", "day1", "aa b"))
    for part in (SILENT, loud(60), np.zeros((50 * pause_s, 6), np.float32), loud(60), SILENT):
        for row in part:
            endpointer.push(row[None])
    assert not finals(events)
    endpointer.end()
    (final,) = finals(events)
    assert (final["trial"], final["cut"], final["reference"]) == ("t", False, "aa b")
    assert final["n_bins"] == 100 + 60 + 50 * pause_s + 60 + 100


def test_a_marked_trial_longer_than_the_maximum_is_cut_and_not_scored() -> None:
    endpointer, events = detector(LiveOptions(max_s=2.0))
    endpointer.start_trial(Mark("t", "day1", "aa b"))
    for row in np.concatenate([loud(120), SILENT, loud(60)]):
        endpointer.push(row[None])
    endpointer.end()
    first, *rest = finals(events)
    assert 100 <= first["n_bins"] <= 104 and first["cut"] and first["reference"] is None and first["trial"] == "t"
    assert rest and all(e["trial"] is None and e["alignment"] is None for e in rest)
    assert all(e["running"]["n_sentences"] == 0 for e in finals(events))


def test_a_new_session_within_a_stream_is_not_a_trial() -> None:
    """As a continuous replay sends it: silences end sentences."""
    endpointer, events = detector()
    endpointer.push(loud(60))
    endpointer.change_session("day1")
    endpointer.push(loud(60))
    endpointer.push(SILENT)
    assert [(e["session"], e["cut"]) for e in finals(events)] == [("day2", True), ("day1", False)]


def test_silence_alone_makes_no_sentence() -> None:
    endpointer, events = detector()
    for _ in range(20):
        endpointer.push(SILENT[:50])
    assert not finals(events) and endpointer.decoder.n_frames < 100  # memory stays bounded


def test_a_sentence_ends_at_its_maximum_length() -> None:
    endpointer, events = detector(LiveOptions(max_s=2.0))
    endpointer.push(loud(350))
    assert [e["cut"] for e in finals(events)] == [False] * 3


# --- what a final event says ------------------------------------------------------------------------------------------


def test_phonemes_have_their_own_field_and_no_word_errors() -> None:
    """Without words a final had the phonemes as its text, which entered the running word error rate."""
    runner = SessionRunner(decoder_of(small_model())).run(marked("a", bins(80), "a reference"))
    (final,) = runner.events_of("final")
    assert final["tokens"] and set(final["tokens"]) <= set(CLASSES)
    assert (final["words"], final["text"], final["alignment"], final["empty"]) == ([], "", None, False)
    assert final["reference"] == "a reference" and final["running"]["n_sentences"] == 0
    partials = runner.events_of("partial")
    assert partials and all(e["tokens"] and not e["words"] for e in partials)


def test_an_empty_sentence_is_marked_and_counts_as_deletions(tmp_path: Path) -> None:
    endpointer, events = detector()
    endpointer.start_trial(Mark("t", "day1", "aa b"))
    endpointer.push(SILENT)
    endpointer.end()
    (final,) = finals(events)
    assert final["empty"] and final["words"] == final["tokens"] == [] and final["running"]["n_errors"] == 2


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


def test_the_error_rate_is_estimated_from_the_third_sentence_on() -> None:
    reference = ErrorReference(0.1, 50, (0.5, -1.0, -0.5, -1.0, -1.5))
    items = [item for name in "abcd" for item in (Mark(name), Chunk(bins(80)), End())]
    runner = SessionRunner(error_reference=reference).run(items)
    estimates = [event["estimate"] for event in runner.events_of("final")]
    assert estimates[:2] == [None, None] and [e["n_trials"] for e in estimates[2:]] == [3, 4]
    assert all(0 < e["low"] < e["error_rate"] < e["high"] < 1 for e in estimates[2:])


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_nothing_is_decoded_while_closed() -> None:
    endpointer, events = make_endpointer(LiveOptions(closed=True))
    endpointer.start_trial(Mark("t"))
    assert endpointer.push(bins(100)) == [] and endpointer.decoder.n_bins == 0
    endpointer.end()
    assert [e["type"] for e in events] == ["state"] and events[0]["state"] == "closed"


def test_a_phrase_opens_and_is_never_shown() -> None:
    endpointer, events = make_endpointer(LiveOptions(phrase="Aa ae!"))
    for script in ("c . d.", "a. .b.", "c. "):
        endpointer.start_trial(Mark())
        push_script(endpointer, script)
        endpointer.end()
    assert [e["text"] for e in finals(events)] == ["ah"]
    assert not any(e["type"] == "partial" and "aa" in e["words"] for e in events)
    assert states(events)[:2] == ["closed", "listening"]
    opened = next(k for k, e in enumerate(events) if e.get("state") == "listening")
    assert opened < min(k for k, e in enumerate(events) if e["type"] in ("partial", "final", "trial"))


def test_the_state_is_published_before_the_first_sentence() -> None:
    """A page that joins an idle session must not look disconnected."""
    _, events = make_endpointer()
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
    found = [(e["trial"], e["reference"], e["alignment"] is None) for e in finals(events)]
    assert found == [("a", None, True), ("b", None, True), ("c", "A third.", False)]


# --- the thread -------------------------------------------------------------------------------------------------------


def test_a_session_measures_and_draws() -> None:
    runner = SessionRunner().run(marked("a", bins(80)))
    n_frames = (80 - 4 - 14) // 4 + 1
    assert runner.session.latency.summary()["n_frames"] == n_frames and runner.session.error is None
    assert sum(int.from_bytes(p[8:10], "little") for p in runner.images if p[0] == 1) == 80
    assert sum(p[0] == 2 for p in runner.images) == n_frames


def test_commands_and_log_probs_use_the_same_queue() -> None:
    """Frames without bins are drawn one after another, not all at the same position."""
    frame = np.full((3, len(CLASSES)), -np.log(len(CLASSES)), np.float32)
    items = [Command("close"), Chunk(bins(50)), Command("open"), LogProbs(frame), LogProbs(frame), Command("end")]
    runner = SessionRunner().run(items)
    assert len(runner.texts) == 1
    positions = [int.from_bytes(p[4:8], "little") for p in runner.images if p[0] == 2]
    assert np.diff(positions).tolist() == [12]


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
        if rng.random() < 0.04:
            items.append(Mark(f"t{k}") if rng.random() < 0.5 else SessionChange(str(rng.choice(["day1", "day2"]))))
    clean = bins(90, seed=999)
    runner = SessionRunner().run([*items, *marked("clean", clean, session="day2")])
    decoder = small_decoder(SEARCH)
    decoder.push(clean)
    assert runner.session.error is None and runner.texts[-1] == decoder.finish().text
    kinds = {e["kind"] for e in runner.events_of("fault")}
    assert kinds == {"channels", "not_finite", "gap", "clock", "repeat", "restart"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [UserError("it broke"), ZeroDivisionError()])
def test_a_session_that_stopped_says_so_and_does_not_block(error: Exception) -> None:
    """A full queue without a consumer must not block producers."""

    def fail() -> None:
        raise error

    runner = SessionRunner().start()
    runner.session.put(End(on_done=fail))
    while runner.session.put(Chunk(bins(1))):
        pass
    runner.session.stop()
    expected = "it broke" if isinstance(error, UserError) else "decoding stopped unexpectedly"
    assert runner.session.error is not None and expected in runner.session.error
    assert runner.received[-1] == {"type": "error", "message": runner.session.error}


def test_bins_are_forgotten_after_every_sentence() -> None:
    runner = SessionRunner().start()
    for k in range(60):
        for item in (Mark(f"t{k}"), Chunk(bins(100, seed=k)), End()):
            runner.session.put(item)
        if k % 20 == 19:
            while runner.session.n_sentences < k + 1:
                time.sleep(0.01)
            assert (runner.session.decoder.n_bins, runner.session.decoder.n_frames) == (0, 0)
    runner.session.stop()
    assert runner.session.n_sentences == 60
