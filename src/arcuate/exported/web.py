"""A static page that runs an exported model in the browser (`arcuate export --web`).

ONNX Runtime Web is copied from an installed npm package, because its WebAssembly file (14 MB) is larger than this
package. The version is pinned, and the files are compared with the checksums below before they are copied.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.statistics import Statistics
from arcuate.errors import UserError
from arcuate.exported.read import ExportedFile
from arcuate.files import atomic_folder

ORT_WEB = "onnxruntime-web@1.30.0"
_ORT_FILES = {  # SHA-256
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
_PAGE = ("index.html", "page.css", "decode.js", "LICENSE-onnxruntime-web.txt")
_MARKER = "arcuate-page.json"  # loaded by the page; only a folder that contains it is replaced


@dataclass(frozen=True, eq=False)
class WebTrial:
    """A recorded trial that the page offers."""

    id: str
    text: str | None
    bins: np.ndarray  # (T, C)
    statistics: Statistics | None
    simulated: bool = False


def write_page(file: ExportedFile, folder: Path, runtime: Path, trials: Sequence[WebTrial] = ()) -> None:
    """Write the page for a file with one session layer; `runtime` is the npm package of ONNX Runtime Web."""
    if file.n_sessions_stored:
        raise UserError("the page needs an export of one session; select one with --session")
    sources = find_runtime(runtime)
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARKER).is_file():
        raise UserError(f"{folder} exists and is not an exported page; choose another folder")
    page = files("arcuate.exported") / "page"
    with atomic_folder(folder.absolute()) as temporary:
        for name in _PAGE:
            (temporary / name).write_bytes((page / name).read_bytes())
        for source in sources:
            shutil.copyfile(source, temporary / source.name)
        for name in ("bin.onnx", "frame.onnx"):
            (temporary / name).write_bytes(file.archive.bytes(name))
        (temporary / _MARKER).write_text(json.dumps(_describe(file, temporary, trials), indent=1))


def find_runtime(package: Path) -> list[Path]:
    """Files of ONNX Runtime Web in an npm package folder, verified."""
    found = []
    for name, digest in _ORT_FILES.items():
        path = package / "dist" / name
        if not path.is_file():
            raise UserError(
                f"{path} does not exist; install ONNX Runtime Web with `npm install {ORT_WEB}` and give its folder"
                " with --ort-web"
            )
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UserError(f"{path} does not belong to {ORT_WEB}; install that version")
        found.append(path)
    return found


def _describe(file: ExportedFile, folder: Path, trials: Sequence[WebTrial]) -> dict[str, Any]:
    """The description that the page loads, after writing the arrays it names."""
    layout = file.layout
    states: dict[str, Any] = {}
    for graph, listed in file.metadata["states"].items():
        states[graph] = []
        for state in listed:
            member = f"initial.{state['name']}"
            stored = {"file": member} if member in file.archive else {}
            if stored:
                (folder / member).write_bytes(file.archive.bytes(member))
            states[graph].append({**state, **stored})
    offered = []
    for number, trial in enumerate(trials):
        name = f"trial{number}.f32"
        (folder / name).write_bytes(trial.bins.astype("<f4").tobytes())
        described = {"id": trial.id, "text": trial.text, "simulated": trial.simulated, "file": name}
        offered.append({**described, "statistics": _statistics(trial.statistics)})
    return {
        "classes": layout.classes,
        "session": layout.sessions[0],
        "n_channels": layout.n_channels,
        "patch_bins": layout.patch_bins,
        "stride": layout.stride,
        "look_ahead": layout.look_ahead,
        "normalise": layout.normalise,
        "rolling_bins": layout.rolling_bins,
        "delay_ms": layout.delay.total_ms,
        "precision": file.precision,
        "states": states,
        "trials": offered,
    }


def _statistics(known: Statistics | None) -> dict[str, Any] | None:
    if known is None:
        return None
    return {"mean": known.mean.tolist(), "sd": known.sd.tolist(), "n_bins": known.n_bins}
