"""Live sources from outside the package: by import path, as an installed entry point, and invalid ones."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from arcuate import StreamingDecoder, plugins
from arcuate.data.store import Store
from arcuate.decoding.options import SearchOptions
from arcuate.live.input import End, Mark
from arcuate.live.options import LiveOptions
from arcuate.models.io import save_model
from support.command import arcuate
from support.live_parts import bins, options_of, small_model, wait_for, write_words
from support.workspace import RIG

EXAMPLE = Path(__file__).parents[2] / "examples" / "udp_source.py"
INVALID = """
from arcuate.live.input import Source

number = 3

class Unstoppable:
    def __init__(self, n_channels, put): ...
    def start(self): ...

class Idle(Source):
    def __init__(self, n_channels, put):
        super().__init__("idle")

class Choosy(Source):
    def __init__(self, n_channels, put, address):
        super().__init__("choosy")

    def _run(self): ...

class Occupied(Source):
    def __init__(self, n_channels, put):
        raise OSError(98, "Address already in use")

    def _run(self): ...
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("uvicorn", reason="the extra live is not installed")
    folder = tmp_path_factory.mktemp("parts")
    save_model(folder / "model", small_model())
    lexicon, arpa = write_words(folder)
    return {"model": folder / "model", "lexicon": lexicon, "lm": arpa}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; entry points of packages in it are found, and nothing is allowed at the start."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(plugins.ALLOW_VARIABLE, raising=False)
    plugins._entry_points.cache_clear()
    yield tmp_path
    plugins._entry_points.cache_clear()
    os.environ.pop(plugins.ALLOW_VARIABLE, None)


def offline(parts: dict[str, Path], sent: np.ndarray) -> str | None:
    decoder = StreamingDecoder.load(parts["model"], SearchOptions(lm=parts["lm"], lexicon=parts["lexicon"]))
    decoder.push(sent)
    return decoder.finish().text


def test_bins_of_a_source_named_by_its_import_path_are_decoded_and_recorded(parts, tmp_path: Path) -> None:
    """The source delivers three sentences, then ends the server as Ctrl-C does."""
    (tmp_path / "rig_of_a_lab.py").write_text(RIG, "utf-8")
    words = ["--lexicon", parts["lexicon"], "--lm", parts["lm"]]
    options = ["--source", "rig_of_a_lab:Rig", "--record", "rec", "--port", 0]
    done = arcuate("live", parts["model"], *words, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    store = Store.open(tmp_path / "rec" / "store")
    rng = np.random.default_rng(0)
    sent = [rng.normal(size=(60, 6)).astype(np.float32) for _ in range(3)]
    for trial, expected in zip(store.trials, sent, strict=True):
        np.testing.assert_array_equal(store.read_bins(trial), expected)
    rows = [json.loads(line) for line in (tmp_path / "rec" / "journal.jsonl").read_text("utf-8").splitlines()]
    texts = [row["text"] for row in rows if row.get("type") == "final"]
    assert texts == [offline(parts, expected) for expected in sent] and any(texts)


def test_the_documented_source_works_as_an_installed_one(parts, lab: Path) -> None:
    """The example, registered by the metadata of a package, receives packets and they become text."""
    from arcuate.live.serve import prepare_server

    example = EXAMPLE.read_text("utf-8")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (lab / "udp_of_a_lab.py").write_text(example.replace("5005", str(port)), "utf-8")
    metadata = lab / "udp_of_a_lab-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: udp-of-a-lab\nVersion: 1.0\n", "utf-8")
    (metadata / "entry_points.txt").write_text("[arcuate.live_sources]\nudp = udp_of_a_lab:Udp\n", "utf-8")
    assert "udp" in plugins.component_names("live_sources")
    options = options_of(parts)
    server = prepare_server(parts["model"], LiveOptions(**options.model_dump(), source="udp", port=0))
    server.listener.close()
    session, source, events = server.live.session, server.live.source, []
    session.subscribers.append(events.append)
    session.start()
    assert source is not None
    source.start()
    try:
        sent = bins(50, seed=7)
        session.put(Mark("one"))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rig:
            for row in sent:
                rig.sendto(row.tobytes(), ("127.0.0.1", port))
        wait_for(lambda: session.decoder.n_bins == len(sent))
        session.put(End())
        finals = lambda: [e for e in list(events) if isinstance(e, dict) and e["type"] == "final"]
        final = wait_for(finals)[0]
    finally:
        source.stop()
        session.stop()
    reference = StreamingDecoder.load(parts["model"], options)
    reference.push(sent)
    assert final["text"] == reference.finish().text and final["text"]
    assert not [e for e in events if isinstance(e, dict) and e["type"] == "fault"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("unknown", "or an import path such as mylab.live:Source"),
        ("nowhere.to:Be", "no module nowhere"),
        ("sources_of_a_lab:Missing", "check the name after the colon"),
        ("sources_of_a_lab:number", "is a value of type int"),
        ("sources_of_a_lab:Unstoppable", "has no start and stop"),
        ("sources_of_a_lab:Idle", "does not define _run"),
        ("sources_of_a_lab:Choosy", "missing a required argument: 'address'"),
        ("sources_of_a_lab:Occupied", "Address already in use"),
    ],
)
def test_an_invalid_source_is_one_sentence(parts, tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "sources_of_a_lab.py").write_text(INVALID, "utf-8")
    done = arcuate("live", parts["model"], "--lm", "none", "--port", 0, "--source", source, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
