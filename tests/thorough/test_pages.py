"""Every code block of README, tutorials, how-to pages and four others runs as printed, in order; training and cohorts
are smaller.

Comments in the source of a page prepare what the reader already has: `<!-- setup: COMMAND -->` runs first, and
`<!-- replace: A => B -->` exchanges what this machine lacks (a GPU, the released recordings). Training commands that
do not state a number of steps get a small one. `<!-- expect: COMMAND => TEXT -->` states what a command of the page
prints. A block of Python or YAML that begins with a comment with a file name (`# mylab/models.py`) is written to that
file. A command marked `# keeps running` is a server: it must print its address.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from support.command import arcuate
from support.forking import PROGRAM, forking_environment, start

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("compare", "export", "language-models", "scaling", "your-data", "your-encoder")
    ),
    *(p for folder in ("tutorials", "how-to") for p in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
STEPS = "train.steps=12 train.log_every=4"


def commands(block: str) -> list[str]:
    """The commands of a shell block, one per entry."""
    return [line for line in re.sub(r"\\\n", " ", block).splitlines() if line.strip() and not line.startswith("#")]


def shortened(command: str) -> str:
    if re.match(r"arcuate train\b", command) and "train.steps" not in command and "--resume" not in command:
        return f"{command} {STEPS}"
    return command


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder in which the given commands have run; pages with the same setup share it."""

    @cache
    def make(*setup: str) -> Path:
        folder = tmp_path_factory.mktemp("page")
        for command in setup:
            run(command, folder)
        return folder

    return make


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, prepared: Callable[..., Path]) -> None:
    text = page.read_text("utf-8")
    expected = dict(pair.split(" => ") for pair in re.findall(r"<!-- expect: (.*?) -->", text))
    replaced = [pair.split(" => ") for pair in re.findall(r"<!-- replace: (.*?) -->", text)]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(prepared(*re.findall(r"<!-- setup: (.*?) -->", text)), tmp_path, dirs_exist_ok=True)
    blocks = re.findall(r"```(sh|python|yaml)\n(.*?)```", text, re.DOTALL)
    assert blocks, f"{page.name} has no code"
    for _, code in blocks:
        if named := re.match(r"# (\S+\.(?:py|yaml))\n", code):
            (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / named[1]).write_text(code, "utf-8")
    blocks = [(language, code) for language, code in blocks if language != "yaml"]
    servers = re.findall(
        r"^arcuate (?:board|live) (?!.*--help).*$", "\n".join(code for _, code in blocks), re.MULTILINE
    )
    assert all("# keeps running" in command for command in servers), f"mark servers with `# keeps running`: {servers}"
    for language, group in groupby(blocks, key=lambda block: block[0]):  # Python blocks in a row are one program
        block = "\n".join(code for _, code in group)
        block = re.sub(r"--trials \d+ --electrodes \d+", "--trials 40 --electrodes 16", block)
        for old, new in replaced:
            block = block.replace(old, new)
        if language == "python" and page.name == "README.md":
            continue  # run by tests/test_readme.py, which also looks at the results
        if language == "python":
            block = re.sub(r'"train.steps": \d+', '"train.steps": 12', block)
            (tmp_path / "block.py").write_text(block, "utf-8")
            run(f"{shlex.quote(sys.executable)} block.py", tmp_path)
            continue
        for command in commands(block):
            if "# keeps running" in command:
                serve(command.split("#")[0], tmp_path)
            else:
                printed = run(shortened(command), tmp_path)
                wanted = expected.pop(command.partition(" #")[0].strip(), "")
                assert wanted in printed, f"{command}\n{printed}\nexpected: {wanted}"
    assert not expected, f"{page.name} has no such commands: {list(expected)}"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(command: str, folder: Path) -> str:
    """Output of a command of a page; `arcuate` alone in a process forked from one that has imported it."""
    if command.startswith("arcuate ") and not set(command) & set("|<>;&$`*"):
        done = arcuate(*shlex.split(command, comments=True)[1:], cwd=folder, environment=environment())
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout
    python = shlex.quote(sys.executable)
    programs = {"arcuate": shlex.join(PROGRAM), "python": python, "torchrun": f"{python} -m torch.distributed.run"}
    script = "\n".join([*(f'{name}() {{ {program} "$@"; }}' for name, program in programs.items()), command])
    variables = forking_environment(environment())
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def serve(command: str, folder: Path) -> None:
    """Start a server on a free port, wait for its address, stop it."""
    words = [*shlex.split(command)[1:], "--port", "0"]
    with start(
        *words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        printed: list[str] = []
        for line in server.stdout:
            printed.append(line)
            if "http://" in line:
                break
        assert printed and "http://" in printed[-1], f"{command}\n{''.join(printed)}"
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
    assert server.returncode in (0, 128 + signal.SIGTERM), f"{command}\n{''.join(printed)}{rest}"
