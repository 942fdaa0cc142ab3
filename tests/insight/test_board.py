# ruff: noqa: E402 - dependencies of the board may be missing
"""The board: rows, security, and the page in a real browser while runs appear and train."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
uvicorn = pytest.importorskip("uvicorn", reason="the extra live is not installed (uvicorn)")

from fastapi.testclient import TestClient

from arcuate.doctor import diagnose
from arcuate.doctor.page import diagnosis_page
from arcuate.errors import UserError
from arcuate.files import append_jsonl
from arcuate.insight.board import Board, make_app, overlay, prepare_board
from arcuate.live import web
from arcuate.live.clients import Access, bind, port_of
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


def refreshed(folder: Path) -> Board:
    board = Board(folder, diagnose)
    board.refresh()
    return board


def client(board: Board, access: Access = LOCAL) -> TestClient:
    return TestClient(make_app(board, access, lambda run: diagnosis_page(diagnose(run))), base_url="http://127.0.0.1")


def test_rows_have_verdict_best_rate_and_changes(folder: Path) -> None:
    second, first = refreshed(folder).rows()
    assert (first.name, second.name) == ("first", "sub/second")
    assert second.best_per == pytest.approx(0.2, abs=0.01) and second.verdict and second.complete
    assert second.parent == "first" and any("peak_lr" in change for change in second.changes)
    assert second.curve[-1][0] == second.steps == second.planned


def test_only_changed_runs_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = refreshed(folder)
    read: list[str] = []
    monkeypatch.setattr("arcuate.insight.board.read_entry", lambda path, name: read.append(name))
    version = board.version
    board.refresh()
    assert read == [] and board.version == version


def test_runs_appear_change_and_vanish(folder: Path) -> None:
    board = refreshed(folder)
    version = board.version
    shutil.copytree(folder / "first", folder / "third")
    board.refresh()
    assert {row.name for row in board.rows()} == {"first", "third", "sub/second"} and board.version > version
    append_jsonl(folder / "third" / "metrics.jsonl", {"step": 650, "split": "val", "per": 0.11, "loss": 0.2})
    board.refresh()
    assert next(row.best_per for row in board.rows() if row.name == "third") == 0.11
    shutil.rmtree(folder / "third")
    board.refresh()
    assert {row.name for row in board.rows()} == {"first", "sub/second"}


def test_damaged_runs_are_listed(folder: Path) -> None:
    (folder / "first" / "recipe.yaml").write_text("name: [")
    row = next(row for row in refreshed(folder).rows() if row.name == "first")
    assert row.problems and row.complete


def test_a_large_folder_is_listed_before_it_is_read(folder: Path) -> None:
    board = Board(folder, diagnose)
    board.refresh(deadline=time.monotonic())  # no time for details
    assert {row.name for row in board.rows()} == {"first", "sub/second"}
    assert not any(row.complete for row in board.rows())
    board.refresh()
    assert all(row.complete for row in board.rows())


def test_an_empty_folder_is_a_board_without_rows(tmp_path: Path) -> None:
    assert refreshed(tmp_path).rows() == []
    with pytest.raises(UserError, match="no such folder"):
        prepare_board(tmp_path / "nowhere")


def test_pages_are_rendered_on_demand(folder: Path) -> None:
    web = client(refreshed(folder))
    for address in ("/report?run=first", "/doctor?run=sub/second", "/compare?run=first&run=sub/second", "/ledger"):
        answer = web.get(address)
        assert answer.status_code == 200, answer.text
        check_page(answer.text)
    assert "<h2>1. first: " in answer.text and "<b>Purpose:</b>" in answer.text and "**" not in answer.text
    assert not (folder / "first" / "report.html").exists()
    found = web.get("/api/compare?run=first&run=sub/second").json()
    assert "second is better than first" in found["sentences"][0]


def test_only_runs_of_the_board_can_be_reached(folder: Path) -> None:
    make_run(folder.parent / f"{folder.name}-other")
    web = client(refreshed(folder))
    for name in (f"../{folder.name}-other", "/etc", "first/../first", ""):
        assert web.get("/report", params={"run": name}).status_code == 404
    assert web.get("/assets/..%2Fboard.html").status_code == 404
    assert web.get("/assets/board.html").status_code == 404


def test_other_hosts_and_origins_are_refused(folder: Path) -> None:
    web = client(refreshed(folder))
    assert web.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert web.get("/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    answer = web.get("/")
    assert answer.status_code == 200 and "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe-eval" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"


def test_a_token_is_required_where_the_board_is_public(folder: Path) -> None:
    web = client(refreshed(folder), Access("0.0.0.0", "correct-horse"))
    assert web.get("/api/runs").status_code == 401
    assert web.get("/api/runs?token=wrong-token").status_code == 401
    answer = web.get("/?token=correct-horse")
    assert answer.status_code == 200 and {"HttpOnly", "SameSite=strict"} <= set(
        answer.headers["Set-Cookie"].split("; ")
    )
    assert web.get("/api/runs").status_code == 200


def test_overlay_is_bounded(folder: Path) -> None:
    board = refreshed(folder)
    assert "<h3>PER on validation</h3>" in overlay(board, ["first"])
    with pytest.raises(UserError, match="at most"):
        overlay(board, ["first"] * 100)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    make_run(tmp_path / "<img src=x onerror=alert(1)>")
    page = client(refreshed(tmp_path)).get("/api/runs")
    assert page.headers["content-type"] == "application/json" and json.loads(page.text)["runs"]


def test_a_stored_page_cannot_reach_the_board(folder: Path) -> None:
    """The page of an ablation is a file beside runs from elsewhere; its scripts must not read other runs."""
    experiment = folder / "ablation"
    shutil.copytree(folder / "first", experiment / "base" / "seed1")
    (experiment / "experiment.json").write_text("{}")
    (experiment / "ablation.html").write_bytes(b"<script>fetch('/api/runs')</script>\xff")
    answer = client(refreshed(folder)).get("/ablation", params={"run": "ablation/base/seed1"})
    policy = answer.headers["Content-Security-Policy"]
    assert answer.status_code == 200 and "sandbox allow-scripts;" in policy and "default-src 'none'" in policy
    assert "same-origin" not in policy and "connect-src" not in policy


def test_names_that_are_not_text_hide_no_runs(folder: Path) -> None:
    shutil.copytree(folder / "first", folder / os.fsdecode(b"bad\xff"))
    damaged = json.loads((folder / "sub" / "second" / "environment.json").read_text())
    (folder / "sub" / "second" / "environment.json").write_text(json.dumps({**damaged, "started": "\ud800"}))
    web = client(refreshed(folder))
    names = [row["name"] for row in web.get("/api/runs").json()["runs"]]
    assert sorted(names) == ["bad\\udcff", "first", "sub/second"]
    assert all(web.get("/report", params={"run": name}).status_code == 200 for name in names)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(path: Path, name: str) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("arcuate.insight.board.read_entry", defect)
    board = Board(folder, diagnose)
    with client(board) as web:
        assert board._thread is not None
        board._thread.join()
        assert web.get("/api/runs").status_code == 503


# --- on a port of this machine ---


def test_half_open_requests_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_REQUEST_S", 0.3)
    with serving(tmp_path) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client, suppress(ConnectionResetError):
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
            while client.recv(4096):  # raises TimeoutError if the connection is kept
                pass
        assert urlopen(address + "api/runs").status == 200


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match=r"cannot listen on .* choose another --port"):
        prepare_board(tmp_path, port=port_of(taken))


def test_a_free_port_is_printed_and_a_signal_ends_the_board(tmp_path: Path) -> None:
    with start("board", tmp_path, "--port", "0", stderr=subprocess.PIPE, text=True) as process:
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
    yield f"http://127.0.0.1:{port_of(listener)}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(find_chromium()) as found:
        yield found


def names(page: Any) -> list[str]:
    return page.eval_on_selector_all("#runs tbody tr", "rows => rows.map(row => row.dataset.run)")


def wait_until_up(page_address: str) -> None:
    for _ in range(200):
        try:
            urlopen(page_address + "api/runs").close()
            return
        except URLError:
            time.sleep(0.05)


@pytest.mark.thorough
def test_board_in_a_browser(folder: Path, browser: Any) -> None:
    hostile = folder / "<b>bold"
    shutil.copytree(folder / "first", hostile)
    with serving(folder) as address:
        wait_until_up(address)
        with opened(browser, address) as page:
            page.wait_for_selector("text=3 runs")
            assert page.query_selector("#runs tbody b") is None
            page.fill("#filter", "peak_lr")
            assert names(page) == ["sub/second"] and "filter=peak_lr" in page.url
            page.fill("#filter", "")
            page.click("text=best PER")
            assert names(page)[0] == "sub/second" and "sort=best_per" in page.url
            for name in ("first", "sub/second"):
                page.check(f"tr[data-run='{name}'] input")
            for place in ("first", "last"):
                page.wait_for_selector(f"#charts figure:{place}-child .plot[data-drawn]")
            page.wait_for_selector("text=second is better than first")
            assert "run=first" in page.url
            make_run(folder / "new", per=0.25, minute=5)
            page.wait_for_selector("tr[data-run='new']")
            page.wait_for_selector("#charts .mark-line path[aria-label*='series: first;']", state="attached")
            page.click("#charts .legend button:text-is('first')")
            for place in ("first", "last"):  # hidden in both charts
                line = f"#charts figure:{place}-child .mark-line path[aria-label*='series: first;']"
                page.wait_for_selector(line, state="detached")
        with opened(browser, f"{address}?filter=second&sort=best_per&run=first") as page:
            page.wait_for_selector("#charts .plot[data-drawn]")
            assert names(page) == ["sub/second"] and page.input_value("#filter") == "second"
        with opened(browser, address, viewport={"width": 390, "height": 844}) as page:
            page.wait_for_selector("tr[data-run='first']")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.usefixtures("drawings")
def test_report_and_doctor_pages_in_a_browser(folder: Path, browser: Any, tmp_path: Path) -> None:
    from arcuate.doctor import diagnose
    from arcuate.insight.report import write_report

    report = write_report(folder / "first")
    with opened(browser, report.as_uri()) as page:
        page.wait_for_selector(".plot[data-drawn] svg")
        page.hover(".plot[data-drawn] svg .mark-symbol path")
        page.wait_for_selector("#vg-tooltip-element.visible")
        before = page.eval_on_selector(".plot svg", "svg => svg.querySelectorAll('.mark-line path').length")
        page.click("button[data-series]")
        page.wait_for_function(
            "n => document.querySelector('.plot svg').querySelectorAll('.mark-line path').length < n", arg=before
        )
    with opened(browser, report.as_uri(), java_script_enabled=False) as page:
        assert page.is_visible("noscript svg") and not page.is_visible(".plot")
    diagnose(folder / "first", html=tmp_path / "doctor.html")
    with opened(browser, (tmp_path / "doctor.html").as_uri(), viewport={"width": 390, "height": 844}) as page:
        page.wait_for_selector(".plot[data-drawn] svg")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_lists_and_pages_load_altair_and_fastapi_only_when_they_are_needed() -> None:
    modules = "arcuate.insight.runs, arcuate.doctor, arcuate.insight.report, arcuate.insight.board"
    heavy = "('torch', 'altair', 'vl_convert', 'jinja2', 'fastapi', 'uvicorn')"
    code = f"import sys, {modules}; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
