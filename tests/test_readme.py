"""The Python code of the README runs as printed, apart from the number of training steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import arcuate

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    section = README.read_text("utf-8").split("## In Python")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_python_section_trains_evaluates_and_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, count = re.subn(r'"train.steps": \d+', '"train.steps": 60', "\n".join(blocks()))
    assert count == 1
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)  # the README is ours
    captured = capsys.readouterr()
    assert captured.err == ""  # the library reports through logger and callbacks only
    assert captured.out.startswith("PER ") and "WER " in captured.out
    assert names["result"].per >= 0.0 and len(names["words"]) > 0  # type: ignore[attr-defined, arg-type]
    final, words = names["final"], names["words"]
    offline = next(w for w in words if w.id == names["trial"].id)  # type: ignore[attr-defined]
    assert final.text == offline.text  # type: ignore[attr-defined]


def test_every_public_name_can_be_imported() -> None:
    for name in arcuate.__all__:
        assert getattr(arcuate, name) is not None
    assert set(arcuate.__all__) <= set(dir(arcuate))


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, arcuate; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
