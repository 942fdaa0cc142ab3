# ruff: noqa: E402 - the browser may be missing
"""`examples/browser` in a real browser: the same log-probabilities as in Python, without a network."""

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
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "browser"
ORT_WEB = Path(os.environ.get("ORT_WEB") or ROOT / "node_modules/onnxruntime-web")
if not ORT_WEB.is_dir():
    pytest.skip("ONNX Runtime Web is not installed (npm install onnxruntime-web@1.30.0)", allow_module_level=True)

from arcuate.data.alphabet import CLASSES
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.model import Model
from arcuate.runtime import Decoder
from support.exports import export_model
from support.live_parts import bins

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
    data.astype("<f4").tofile(tmp_path / "bins.f32")
    folder = shutil.copytree(PAGE, tmp_path / "page", ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "onnxruntime-web").symlink_to(ORT_WEB.resolve())
    decoder = Decoder.load(path)
    decoder.push(data)
    expected, tokens = decoder.sentence_log_probs(), decoder.finish().tokens
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
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
        page.set_input_files("#model", path)
        page.set_input_files("#file", tmp_path / "bins.f32")
        page.wait_for_selector("#start:not([disabled])", timeout=60_000)
        frames = page.evaluate(
            """async () => {
                const { load, decodeBins } = globalThis.arcuate;
                const [model, file] = ["model", "file"].map((id) => document.getElementById(id).files[0].arrayBuffer());
                const frames = await decodeBins(await load(await model), new Float32Array(await file), null);
                return frames.map((row) => Array.from(row));
            }"""
        )
        page.uncheck("#realtime")
        page.click("#start")
        page.wait_for_selector("#status:not(:empty)")
        assert "ms per frame" in page.inner_text("#status")
        shown = page.inner_text("#phonemes").split()
    finally:
        context.close()
        server.shutdown()
        server.server_close()
    assert not problems
    np.testing.assert_allclose(np.array(frames)[: len(expected)], expected, rtol=0, atol=1e-4)
    assert shown == [CLASSES[token] for token in tokens]
