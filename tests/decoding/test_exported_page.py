# ruff: noqa: E402 - the browser may be missing
"""The page of an exported model in a real browser: the same log-probabilities as in Python, without a network."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine (Debian: apt-get install chromium)", allow_module_level=True)
ORT_WEB = Path(os.environ.get("ORT_WEB") or Path(__file__).parents[2] / "node_modules/onnxruntime-web")
if not ORT_WEB.is_dir():
    pytest.skip("ONNX Runtime Web is not installed (npm install onnxruntime-web@1.30.0)", allow_module_level=True)

from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import Statistics
from arcuate.decoding.hypothesis import greedy
from arcuate.errors import UserError
from arcuate.exported.read import open_export
from arcuate.exported.web import WebTrial, write_page
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.model import Model
from arcuate.runtime import Decoder
from support.exports import export_model
from support.live_parts import bins, small_model

pytestmark = pytest.mark.thorough

ENCODERS = {
    "gru": {
        "front_end": {"normalise": "block", "stem": {"enabled": True}},
        "encoder": {"kind": "gru", "width": 12, "depth": 2},
        "mode": {"enabled": True},
    },
    "ssm": {
        "front_end": {"normalise": "rolling", "log1p": True},
        "encoder": {"kind": "ssm", "width": 16, "depth": 2, "n_heads": 4, "state_dim": 8},
        "denoiser": {"enabled": True, "width": 8},
    },
    "transformer": {"encoder": {"kind": "transformer", "width": 16, "depth": 2, "n_heads": 2, "context": 9}},
    "int8": {"encoder": {"kind": "gru", "width": 64, "depth": 2}},
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def make_model(name: str) -> Model:
    torch.manual_seed(3)
    settings = ModelSettings.model_validate(ENCODERS[name])
    model = Model(ModelConfig(settings=settings, n_channels=6, sessions=("a", "b"), classes=CLASSES)).eval()
    with torch.no_grad():
        model.head.weight.mul_(4.0)
    return model


@pytest.mark.parametrize("name", ENCODERS)
def test_the_page_computes_what_python_computes(browser, tmp_path: Path, name: str) -> None:
    path = export_model(tmp_path / "m.arcx", make_model(name), words=False, session="b", int8=name == "int8")
    data = bins(60)
    known = Statistics(data.mean(0), data.std(0), 300)
    write_page(open_export(path), tmp_path / "page", ORT_WEB, [WebTrial("t0", "a text", data, known, True)])
    decoder = Decoder.load(path, statistics=known)
    expected = decoder.trial_log_probs(data)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "page"))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    context = browser.new_context()
    try:
        problems: list[str] = []
        page = context.new_page()
        page.route("**/*", lambda r: r.continue_() if r.request.url.startswith((origin, "blob:")) else r.abort())
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.goto(origin)
        page.wait_for_selector("#start:not([disabled])", timeout=60_000)
        frames = page.evaluate(
            """async () => {
                const { loaded, decodeBins, fetchFloats } = globalThis.arcuate;
                const trial = loaded.model.trials[0];
                const frames = await decodeBins(loaded, await fetchFloats(trial.file), trial.statistics);
                return frames.map((row) => Array.from(row));
            }"""
        )
        page.uncheck("#realtime")
        page.click("#start")
        page.wait_for_selector("#status:not(:empty)")
        assert "ms per frame" in page.inner_text("#status")
        assert page.is_visible("#simulated")
        shown = page.inner_text("#phonemes").split()
    finally:
        context.close()
        server.shutdown()
        server.server_close()
    assert not problems
    np.testing.assert_allclose(np.array(frames), expected, rtol=0, atol=1e-4)
    assert shown == [CLASSES[token] for token in greedy(expected)]


def test_other_files_than_those_of_the_pinned_version_are_refused(tmp_path: Path) -> None:
    fake = tmp_path / "onnxruntime-web"
    shutil.copytree(
        ORT_WEB / "dist", fake / "dist", ignore=lambda _, names: [n for n in names if "wasm.bundle" not in n]
    )
    path = export_model(tmp_path / "m.arcx", small_model(), words=False, session="day1")
    with pytest.raises(UserError, match="does not exist; install"):
        write_page(open_export(path), tmp_path / "page", fake)
    (fake / "dist" / "ort.wasm.min.mjs").write_text("changed")
    with pytest.raises(UserError, match="does not belong to"):
        write_page(open_export(path), tmp_path / "page", fake)
    assert not (tmp_path / "page").exists()


def test_only_an_earlier_page_is_replaced(tmp_path: Path) -> None:
    path = export_model(tmp_path / "m.arcx", small_model(), words=False, session="day1")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.json").write_text("{}")
    with pytest.raises(UserError, match="is not an exported page"):
        write_page(open_export(path), checkpoint, ORT_WEB)
    assert (checkpoint / "model.json").exists()
    for _ in range(2):
        write_page(open_export(path), tmp_path / "page", ORT_WEB)
    with pytest.raises(UserError, match="one session"):
        write_page(open_export(export_model(tmp_path / "all.arcx", small_model(), words=False)), tmp_path, ORT_WEB)
