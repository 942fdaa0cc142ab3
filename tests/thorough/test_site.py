"""The documentation site builds without a warning: no broken link or anchor, no page outside the navigation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_lists_every_command_and_every_public_name(site: Path) -> None:
    import arcuate
    from arcuate.cli.commands import COMMANDS

    commands = (site / "reference" / "commands.html").read_text("utf-8")
    assert [c for c in COMMANDS if f"<code>arcuate {c}" not in commands] == []
    assert "--allow-code" in commands
    python = (site / "reference" / "python.html").read_text("utf-8")
    assert [name for name in arcuate.__all__ if f".{name}" not in python] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?://[^"]*)"', page.read_text("utf-8"))
        assert [url for url in loaded if "canonical" not in url] == [], page


def test_every_task_is_one_click_from_the_start_page(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    article = start[start.index("<article") : start.index("</article>")]
    how_to = sorted(f"how-to/{path.stem}" for path in (ROOT / "docs" / "how-to").glob("*.md"))
    tasks = ["your-data", "your-encoder", "scaling", "export", "compare", "new-days", "tutorials/t15-on-a-gpu", *how_to]
    tasks += ["doctor", "decoding", "live", "verified", "security"]
    assert [name for name in tasks if f'href="{name}.html"' not in article] == []


def test_links_of_the_start_page_have_the_titles_of_their_pages() -> None:
    links = re.findall(r"\[([^]]*)\]\(([^)#]*\.md)\)", (ROOT / "docs" / "index.md").read_text("utf-8"))
    assert len(links) > 15
    pages = {path: (ROOT / "docs" / path).read_text("utf-8") for _, path in links}
    titles = {path: re.search(r"^# ([^:\n]+)", page, re.MULTILINE)[1] for path, page in pages.items()}
    assert [(text, titles[path]) for text, path in links if titles[path].lower() != text.lower()] == []
