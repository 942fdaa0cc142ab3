# ruff: noqa: E402 - dependencies of the board may be missing
"""The board: rows, security, and the page in a real browser while runs appear and train."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
uvicorn = pytest.importorskip("uvicorn", reason="the extra live is not installed (uvicorn)")

from fastapi.testclient import TestClient

from arcuate.doctor import diagnose
from arcuate.doctor.page import diagnosis_page
from arcuate.errors import UserError
from arcuate.files import append_jsonl
from arcuate.insight import board as board_module
from arcuate.insight.board import Board, make_app, prepare_board
from arcuate.insight.report import write_report
from arcuate.live import web
from arcuate.live.access import Access, bind, port_of
from support.browser import find_chromium, launched, opened
from support.fabricate_runs import make_run
from support.forking import start
from support.pages import check_page

LOCAL = Access("127.0.0.1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "first", per=0.3)
    make_run(tmp_path / "sub" / "second", ["schedule.peak_lr=0.001"], per=0.2, minute=1, seed=1)
    return tmp_path


def client(folder: Path, access: Access = LOCAL) -> TestClient:
    app = make_app(Board(folder, diagnose), access, lambda run: diagnosis_page(diagnose(run)))
    return TestClient(app, base_url="http://127.0.0.1")


def rows(board: Board, **options: float) -> dict[str, dict[str, Any]]:
    board.refresh(**options)
    return {row["name"]: row for row in board.rows}


def test_rows_have_verdict_best_rate_and_changes(folder: Path) -> None:
    found = rows(Board(folder, diagnose))
    second = found["sub/second"]
    assert list(found) == ["sub/second", "first"]  # latest first
    assert second["best_per"] == pytest.approx(0.2, abs=0.01) and second["verdict"]
    assert second["parent"] == "first" and second["changes"] == ["schedule.peak_lr 0.003 → 0.001"]
    assert second["curve"][-1][0] == second["steps"] == second["planned"]


def test_runs_appear_change_and_vanish_and_only_changed_ones_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, read = Board(folder, diagnose), []
    real = board_module.read_run
    monkeypatch.setattr(board_module, "read_run", lambda run, *rest: (read.append(run.name), real(run, *rest))[1])
    rows(board)
    version = board.version
    rows(board)
    assert read == ["first", "second"] and board.version == version
    shutil.copytree(folder / "first", folder / "third")
    assert rows(board).keys() == {"first", "third", "sub/second"} and board.version > version
    append_jsonl(folder / "third" / "metrics.jsonl", {"step": 650, "split": "val", "per": 0.11, "loss": 0.2})
    assert rows(board)["third"]["best_per"] == 0.11 and read[2:] == ["third", "third"]
    shutil.rmtree(folder / "third")
    assert rows(board).keys() == {"first", "sub/second"}


def test_a_large_folder_is_shown_as_it_is_read(folder: Path) -> None:
    board = Board(folder, diagnose)
    assert rows(board, seconds=0.0) == {} and board.n_pending == 2
    assert all(row["parent"] for row in rows(board).values()) and board.n_pending == 0


def test_damaged_runs_and_names_that_are_not_text_are_listed(folder: Path) -> None:
    shutil.copytree(folder / "first", folder / os.fsdecode(b"bad\xff"))
    (folder / "first" / "recipe.yaml").write_text("name: [")
    damaged = json.loads((folder / "sub" / "second" / "environment.json").read_text())
    (folder / "sub" / "second" / "environment.json").write_text(json.dumps({**damaged, "started": "\ud800"}))
    make_run(folder / "<img src=x onerror=alert(1)>")
    served = client(folder)
    answer = served.get("/api/runs")
    found = {row["name"]: row for row in answer.json()["runs"]}
    assert found.keys() == {"bad\\udcff", "first", "sub/second", "<img src=x onerror=alert(1)>"}
    assert found["first"]["problems"] and answer.headers["content-type"] == "application/json"
    assert all(served.get("/report", params={"run": name}).status_code == 200 for name in found)


def test_an_empty_folder_is_a_board_without_rows(tmp_path: Path) -> None:
    assert rows(Board(tmp_path)) == {}
    with pytest.raises(UserError, match="no such folder"):
        prepare_board(tmp_path / "nowhere")
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match=r"cannot listen on .* choose another --port"):
        prepare_board(tmp_path, port=port_of(taken))


def test_pages_are_rendered_on_demand(folder: Path) -> None:
    served = client(folder)
    assert served.head("/").status_code == 200
    for address in ("/report?run=first", "/doctor?run=sub/second", "/compare?run=first&run=sub/second", "/ledger"):
        answer = served.get(address)
        assert answer.status_code == 200, answer.text
        check_page(answer.text)
    assert "<h2>1. first: " in answer.text and "<strong>Purpose:</strong>" in answer.text and "**" not in answer.text
    assert not (folder / "first" / "report.html").exists()
    assert "second is better than first" in served.get("/api/compare?run=first&run=sub/second").json()["sentences"][0]
    assert "<h3>PER on validation</h3>" in served.get("/api/curves?run=first").json()["html"]
    assert "at most" in served.get("/api/curves?" + "run=first&" * 100).json()["error"]


def test_only_runs_of_the_board_can_be_reached(folder: Path) -> None:
    make_run(folder.parent / f"{folder.name}-other")
    served = client(folder)
    for name in (f"../{folder.name}-other", "/etc", "first/../first", ""):
        assert served.get("/report", params={"run": name}).status_code == 404
    for name in ("..%2Fboard.html", "board.html"):
        assert served.get(f"/assets/{name}").status_code == 404


def test_other_hosts_and_origins_are_refused(folder: Path) -> None:
    served = client(folder)
    assert served.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert served.get("/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    headers = served.get("/").headers
    policy = headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe-eval" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_a_token_is_required_where_the_board_is_public(folder: Path) -> None:
    served = client(folder, Access("0.0.0.0", "correct-horse"))
    assert served.get("/api/runs").status_code == served.get("/api/runs?token=wrong-token").status_code == 401
    cookie = served.get("/?token=correct-horse").headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert served.get("/api/runs").status_code == 200


def test_a_stored_page_cannot_reach_the_board(folder: Path) -> None:
    """The page of an ablation is a file beside runs from elsewhere; its scripts must not read other runs."""
    experiment = folder / "ablation"
    shutil.copytree(folder / "first", experiment / "base" / "seed1")
    (experiment / "experiment.json").write_text("{}")
    (experiment / "ablation.html").write_bytes(b"<script>fetch('/api/runs')</script>\xff")
    answer = client(folder).get("/ablation", params={"run": "ablation/base/seed1"})
    policy = answer.headers["Content-Security-Policy"]
    assert answer.status_code == 200 and "sandbox allow-scripts;" in policy and "default-src 'none'" in policy
    assert "same-origin" not in policy and "connect-src" not in policy


def test_a_free_port_is_printed_and_a_signal_ends_the_board(tmp_path: Path) -> None:
    with start("runs", "board", tmp_path, "--port", "0", stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "open http://" in line)
            address = line.split()[1]
            assert ":0/" not in address and json.loads(urlopen(address + "api/runs").read())["runs"] == []
            process.terminate()
            assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


# --- in a browser ---


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(web.bounded_config(make_app(Board(folder, diagnose), LOCAL)))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port_of(listener)}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(find_chromium()) as found:
        yield found


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all("#runs tbody tr", "rows => rows.map(row => row.dataset.run)")


@pytest.mark.thorough
def test_board_in_a_browser(folder: Path, browser: Any) -> None:
    shutil.copytree(folder / "first", folder / "<b>bold")
    with serving(folder) as address:
        with opened(browser, address) as page:
            page.wait_for_selector("text=3 runs")
            assert page.query_selector("#runs tbody b") is None
            page.fill("#filter", "peak_lr")
            assert names(page) == ["sub/second"] and "filter=peak_lr" in page.url
            page.fill("#filter", "")
            page.click("text=best PER")
            assert names(page)[0] == "sub/second" and "sort=best_per" in page.url
            assert page.query_selector("th[aria-sort=ascending] button[data-key=best_per]")
            assert not page.is_visible("th.target")  # no run states one
            for name in ("first", "sub/second"):
                page.check(f"tr[data-run='{name}'] input")
            page.wait_for_selector("text=second is better than first")
            make_run(folder / "new", per=0.25, minute=5)
            page.wait_for_selector("tr[data-run='new']")
            for place in ("first", "last"):  # a click hides a run in both charts
                page.wait_for_selector(f"#charts figure:{place}-child .plot[data-drawn]")
                line = f"#charts figure:{place}-child .mark-line path[aria-label*='series: first;']"
                page.wait_for_selector(line, state="attached")
            page.click("#charts .legend button:text-is('first')")
            for place in ("first", "last"):
                line = f"#charts figure:{place}-child .mark-line path[aria-label*='series: first;']"
                page.wait_for_selector(line, state="detached")
        with opened(browser, f"{address}?filter=second&sort=best_per&run=first") as page:
            page.wait_for_selector("#charts .plot[data-drawn]")
            assert names(page) == ["sub/second"] and page.input_value("#filter") == "second"
        with opened(browser, address, viewport={"width": 390, "height": 844}) as page:
            page.wait_for_selector("tr[data-run='first']")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_report_and_doctor_pages_in_a_browser(folder: Path, browser: Any, tmp_path: Path) -> None:
    report = write_report(folder / "first")
    with opened(browser, report.as_uri()) as page:
        page.wait_for_selector(".plot[data-drawn] svg")
        page.wait_for_function("() => !document.querySelector('.plot:not([data-drawn])')")  # also those out of view
        page.hover(".plot[data-drawn] svg .mark-symbol path")
        page.wait_for_selector("#vg-tooltip-element.visible")
        before = page.eval_on_selector(".plot svg", "svg => svg.querySelectorAll('.mark-line path').length")
        page.click("button[data-series]")
        page.wait_for_function(
            "n => document.querySelector('.plot svg').querySelectorAll('.mark-line path').length < n", arg=before
        )
    with opened(browser, report.as_uri(), java_script_enabled=False) as page:
        assert page.is_visible("noscript p") and not page.is_visible(".plot")
    diagnose(folder / "first", html=tmp_path / "doctor.html")
    with opened(browser, (tmp_path / "doctor.html").as_uri(), viewport={"width": 390, "height": 844}) as page:
        page.wait_for_selector(".plot[data-drawn] svg")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
