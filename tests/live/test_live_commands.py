"""Live decoding from a user's side: loading, commands, the examples of the documentation."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from arcuate import StreamingDecoder
from arcuate.data.store import Store
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.options import DecoderOptions
from arcuate.errors import UserError
from arcuate.evaluation.causal import load_causal
from arcuate.live.input import Mark
from arcuate.live.load import CausalRescorer, load_decoder
from arcuate.live.options import LiveOptions
from arcuate.models.io import save_model
from arcuate.models.layout import Frames
from support.command import arcuate
from support.forking import start
from support.live_parts import (
    SEARCH,
    SessionRunner,
    bins,
    options_of,
    serving,
    small_decoder,
    small_model,
    wait_for,
    write_words,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, cohort_store: Path) -> dict[str, Path]:
    """A model folder for the cohort, and a lexicon and an n-gram as files."""
    folder = tmp_path_factory.mktemp("parts")
    store = Store.open(cohort_store)
    save_model(folder / "model", small_model(store.n_channels, "block", sessions=store.sessions))
    lexicon, arpa = write_words(folder)
    return {"model": folder / "model", "lexicon": lexicon, "lm": arpa, "store": cohort_store}


def choices(parts: dict[str, Path]) -> list[object]:
    return ["--lexicon", parts["lexicon"], "--lm", parts["lm"], "--data", parts["store"]]


def test_options_are_rejected_before_torch_is_imported() -> None:
    code = """
import sys
from arcuate.cli import main
sys.argv = ["arcuate", "live", "missing", "--source", "telepathy"]
try:
    main()
finally:
    assert "torch" not in sys.modules and "numba" not in sys.modules
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert "choose replay, socket, lsl" in found.stderr and "AssertionError" not in found.stderr, found.stderr


def test_a_decoder_loads_by_path_and_decodes(parts: dict[str, Path]) -> None:
    """Partials leave out the incomplete last word, so those of an untrained model may be empty."""
    store = Store.open(parts["store"])
    trial = next(t for t in store.trials if t.split == "val")
    block = store.block_statistics(trial)
    decoder = StreamingDecoder.load(parts["model"], options_of(parts))
    decoder.reset(trial.session, block)
    search = decoder.search
    state, partials = search.start(), []
    for chunk in np.array_split(store.read_bins(trial), 9):
        partials.append(partial := decoder.push(chunk))
        state = search.step(state, Frames(partial.log_probs))
        expected = search.partial(state)
        assert (partial.words, partial.n_settled) == (expected.words, expected.n_settled)
        assert partial.text == " ".join(partial.words) and partial.n_frames == len(decoder.sentence_log_probs())
    final = decoder.finish()
    assert final.text and final.tokens and len(final.times) == len(final.words)
    assert all(p.words[: p.n_settled] == final.words[: p.n_settled] for p in partials)
    other = decoder.stream(trial.session, block)
    other.push(store.read_bins(trial))
    assert other.finish().text == final.text and other.model is decoder.model


def test_bench_prints_one_object(parts: dict[str, Path]) -> None:
    done = arcuate("bench", "live", parts["model"], *choices(parts), "--seconds", 4, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 < found["frame_ms_p50"] <= found["frame_ms_p99"] <= found["frame_ms_max"]
    assert (found["missed_deadlines"] > 0) == (found["frame_ms_max"] > 80)
    assert found["n_frames"] > 30 and found["delay_ms"] == 140.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["live", "nowhere"], "no run folder nowhere"),
        (["live", "MODEL", "--source", "telepathy"], "choose replay, socket, lsl"),
        (["live", "MODEL", "--source", "redis-logits", "--lm", "none"], "needs a language model"),
        (["live", "MODEL", "--source", "socket", "--continuous"], "applies to stored trials"),
        pytest.param(
            ["live", "MODEL", "--source", "lsl:foo", "--lm", "none"],
            "no LSL stream named 'foo'",
            marks=pytest.mark.thorough,  # waits for it
        ),
        (["live", "MODEL", "--record", "OTHER"], "is not a recording"),
        (["live", "MODEL", "--record", "FILE/rec"], "cannot be written"),
        (["live", "MODEL", "--record-session", "t15.2023.09.12"], "requires --record"),
        (["live", "MODEL", "--source", "redis", "--redis", "redis://127.0.0.1:1", "--lm", "none"], "no Redis"),
        (["bench", "live", "MODEL", "--seconds", "2", "--lm", "none"], "give a store with --data"),
    ],
)
def test_invalid_options_exit_2_with_one_sentence(
    parts, tmp_path: Path, request, arguments: list[str], words: str
) -> None:
    (tmp_path / "file").write_text("")
    known = {"MODEL": str(parts["model"]), "FILE/rec": str(tmp_path / "file" / "rec"), "OTHER": str(tmp_path)}
    if "--redis" in arguments:
        pytest.importorskip("redis", reason="the extra redis is not installed")
    if "lsl:foo" in arguments:
        request.getfixturevalue("lsl")
    done = arcuate(*(known.get(a, a) for a in arguments))
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_server_starts_answers_records_and_stops(parts, tmp_path: Path, how) -> None:
    pytest.importorskip("uvicorn", reason="the extra live is not installed")
    port, record = free_port(), tmp_path / "rec"
    options = ["--port", port, "--source", "replay", "--speed", 16, "--record", record]
    with (tmp_path / "err").open("w+") as err:
        process = start("live", parts["model"], *choices(parts), *options, stderr=err, stdout=subprocess.DEVNULL)
        try:
            health = wait_for_sentences(port, 2)
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=120).read().decode()
            process.send_signal(how)
            assert process.wait(300) == 0
        finally:
            process.kill()
            process.wait()
        err.seek(0)
        messages = err.read()
    assert health["status"] == "ok" and "<title>Arcuate live</title>" in page
    assert f"http://localhost:{port}/" in messages and "Traceback" not in messages
    assert len(Store.open(record / "store").trials) >= 2


def wait_for_sentences(port: int, n: int) -> dict:
    for _ in range(6000):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=120) as answer:
                health = json.loads(answer.read())
            if health["sentences"] >= n:
                return health
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server did not come up")


def test_a_port_in_use_is_reported_before_loading(parts: dict[str, Path]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = arcuate("live", parts["model"], "--port", other.getsockname()[1])
    assert done.returncode == 2 and "choose another --port" in done.stderr


def test_port_0_takes_a_free_port_and_prints_it(parts: dict[str, Path]) -> None:
    pytest.importorskip("uvicorn", reason="the extra live is not installed")
    from arcuate.live.serve import prepare_server

    options = live_options(parts, source="socket", port=0)
    server = prepare_server(parts["model"], options, token="to-view-it")
    with server.listener:
        assert server.port > 0 and server.url == f"http://localhost:{server.port}/?token=to-view-it"
        assert server.send_url.startswith(f"ws://localhost:{server.port}/frames?token=")
        assert server.live.access.send_token in server.send_url
        with pytest.raises(UserError, match="choose another --port"):  # taken from now on
            prepare_server(parts["model"], options.model_copy(update={"port": server.port}))


def test_a_replay_is_normalised_as_the_bins_of_a_rig(parts: dict[str, Path]) -> None:
    """The same trial sent by a rig and replayed gives the same log-probabilities, unlike offline statistics."""
    from arcuate.live.serve import prepare_server

    store, decoded = Store.open(parts["store"]), []
    trial = next(t for t in store.trials if t.split == "val")
    for source in ("socket", "replay"):
        server = prepare_server(parts["model"], live_options(parts, source=source, port=0, data=parts["store"]))
        server.listener.close()
        decoder = server.live.session.decoder
        decoder.reset(trial.session)
        decoded.append(decoder.push(store.read_bins(trial)).log_probs)
    np.testing.assert_array_equal(decoded[0], decoded[1])
    decoder.reset(trial.session, store.block_statistics(trial))
    assert np.abs(decoded[1] - decoder.push(store.read_bins(trial)).log_probs).max() > 1e-3


def live_options(parts: dict[str, Path], **options: object) -> LiveOptions:
    return LiveOptions(**options_of(parts).model_dump() | options)


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['arcuate', 'live', '--help']\nfrom arcuate.cli import main\ntry: main()\n"
    code += "except SystemExit: print('torch' in sys.modules, 'fastapi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False False")


# --- rescoring at the end of a sentence ---------------------------------------------------------------------


def test_rescoring_reorders_hypotheses_by_the_blend(tmp_path: Path) -> None:
    from support.rescoring import MISSING
    from support.rescoring import small_model as made

    if MISSING:
        pytest.skip("the extra llm is not installed")
    factory = type("Factory", (), {"mktemp": lambda self, name: tmp_path})()
    rescorer = CausalRescorer(load_causal(made.__wrapped__(factory)), alpha=0.7)
    nbest = [
        Hypothesis((), {"acoustic": -5.0 - k, "lm": -3.0, "bonus": 0.0}, tuple(words), total=-8.0 - k)
        for k, words in enumerate((["a"], ["b", "c"], ["d"]))
    ]
    ordered = rescorer(nbest, lm_weight=0.8)
    expected = {r.text: r.scores["acoustic"] / 0.8 + 0.3 * -3.0 + 0.7 * r.scores["llm"] for r in ordered}
    assert [r.total for r in ordered] == pytest.approx(sorted(expected.values(), reverse=True))
    assert all(r.total == pytest.approx(expected[r.text]) for r in ordered)
    decoder = small_decoder(SEARCH)
    decoder = StreamingDecoder(decoder.model, decoder.search, rescorer=rescorer)
    decoder.push(bins(60))
    assert "llm" in decoder.finish().scores


def test_rescoring_needs_words(parts: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="rescoring needs words"):
        load_decoder(parts["model"], DecoderOptions(lm="none", llm="somewhere"))


# --- examples/send_bins.py ---------------------------------------------------------------------------------


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = import_module("send_bins")
    monkeypatch.setattr(module, "BIN_S", 0.001)
    return module


def run(send: Callable[..., None], store: Path, *address: str) -> threading.Thread:
    thread = threading.Thread(target=send, args=(Store.open(store), *address))
    thread.start()
    return thread


def expected_bins(store_path: Path) -> int:
    return next(t for t in Store.open(store_path).trials if t.split == "val").n_bins


def test_the_redis_example_runs(senders: ModuleType, redis_url: str, cohort_store: Path) -> None:
    from arcuate.live.sources.redis import RedisBins

    runner = runner_for(cohort_store)
    source = RedisBins(redis_url, runner.session.decoder.n_channels, runner.session.put, print)
    source.start()
    run(senders.send_redis, cohort_store, redis_url).join(300)
    final = wait_for(lambda: runner.events_of("final"))[0]
    source.stop()
    runner.session.stop()
    assert final["n_bins"] == expected_bins(cohort_store)


def test_the_lsl_example_runs(senders: ModuleType, lsl, cohort_store: Path) -> None:
    from arcuate.live.sources.lsl import LslBins

    runner, name = runner_for(cohort_store), f"arcuate-docs-{os.getpid()}"
    thread = run(senders.send_lsl, cohort_store, name)
    source = LslBins(name, runner.session.decoder.n_channels, runner.session.put)
    source.start()
    thread.join(300)
    n_bins = expected_bins(cohort_store)
    wait_for(lambda: runner.session.decoder.n_bins >= n_bins)
    source.stop()
    runner.session.stop()


def test_the_websocket_example_runs(senders: ModuleType, cohort_store: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra live is not installed")
    pytest.importorskip("websockets", reason="the extra live is not installed")
    store = Store.open(cohort_store)
    with serving(small_decoder(SEARCH, n_channels=store.n_channels, sessions=store.sessions)) as served:
        run(senders.send_websocket, cohort_store, served.url("/frames")).join(300)
        wait_for(lambda: json.loads(served.get("/healthz")[1])["sentences"] == 1)


def runner_for(store_path: Path) -> SessionRunner:
    store = Store.open(store_path)
    runner = SessionRunner(small_decoder(SEARCH, n_channels=store.n_channels, sessions=store.sessions)).start()
    runner.session.put(Mark())
    return runner
