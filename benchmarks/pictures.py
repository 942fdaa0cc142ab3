"""Make the pictures of the documentation, or some of them with --only; look at each before committing it.

python benchmarks/pictures.py --run runs/demo --out docs/images

report, trial and live need the demo run, ablation the folder of its experiment (docs/findings.md);
pictures whose folder is missing are left as they are. The others are made from
simulated data.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import arcuate

WIDTH = 1280
ARGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
TESTS = Path(__file__).parents[1] / "tests"


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or sys.exit("no chromium on this machine")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=ARGS)
        yield started
        started.close()


@contextmanager
def opened(page: Path | str, width: int = WIDTH, height: int = 900) -> Iterator[Any]:
    """A page in a browser with all charts in view drawn."""
    with browser() as chromium:
        shown = chromium.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        shown.goto(page.resolve().as_uri() if isinstance(page, Path) else page)
        shown.wait_for_selector(".plot[data-drawn]")
        shown.wait_for_timeout(1500)
        yield shown


def report(run: Path, out: Path) -> None:
    written = arcuate.write_report(run)
    with opened(written, height=1390) as page:
        page.screenshot(path=out / "report.png")


def trial(run: Path, out: Path) -> None:
    written = arcuate.write_report(run)
    with opened(written, height=8000) as page:
        page.locator("#trial figure").first.screenshot(path=out / "trial.png")


def drift(_: Path, out: Path) -> None:
    """Six sessions, and two much later ones."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        arcuate.simulate(root / "cohort", n_sessions=6, n_trials=40, n_electrodes=64, later=(30, 90))
        store = arcuate.prepare(root / "cohort", root / "simulated cohort")
        with opened(arcuate.write_report(store.path), height=1560) as page:
            page.screenshot(path=out / "drift.png")


def doctor(_: Path, out: Path) -> None:
    """A fabricated '25 run whose learning rate rises until the run is lost."""
    with tempfile.TemporaryDirectory() as folder:
        log, page_file = Path(folder) / "fabricated run.jsonl", Path(folder) / "doctor.html"
        log.write_text("".join(json.dumps(row) + "\n" for row in _degrading_run()))
        arcuate.diagnose(log, dataset="b2t25", planned_steps=120_000, html=page_file)
        with opened(page_file, height=1760) as page:
            page.screenshot(path=out / "doctor.png")


def _degrading_run() -> Iterator[dict[str, float]]:
    n, turn = 60, 0.42
    for i in range(1, n + 1):
        share = i / n
        lr = 0.005 * min(share / 0.8, 1.0)
        lost = max(0.0, share - turn)
        per = 0.13 + 0.85 * math.exp(-14 * share) + min(0.75, 3.2 * lost) + 0.008 * math.sin(5.1 * i)
        loss = 0.25 + 4 * math.exp(-10 * share) + 1.2 * lost
        norm = 1.2 + 8 * math.exp(-12 * share) + 12 * lost + 0.3 * abs(math.sin(7.7 * i))
        step = round(120_000 * share)
        yield {"batch": step, "val_PER": per, "train_loss": loss, "val_loss": 1.3 * loss, "lr": lr, "grad_norm": norm}


def board(_: Path, out: Path) -> None:
    """Five fabricated runs, two of them selected."""
    import threading

    import uvicorn

    from arcuate.insight.board import Board, make_app
    from arcuate.live.access import Access

    sys.path.insert(0, str(TESTS))
    make_run = import_module("support.fabricate_runs").make_run
    data = {"path": "/nowhere", "hashes": None, "sessions": ["s1"], "simulated": True}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        rates = {"first": 0.212, "higher-lr": 0.188, "no-warm-up": 0.34, "wider": 0.171, "wider-seed-1": 0.176}
        changes = {
            "higher-lr": ["schedule.peak_lr=0.005"],
            "no-warm-up": ["schedule.warmup_fraction=0"],
            "wider": ["encoder.width=384"],
            "wider-seed-1": ["encoder.width=384", "train.seed=1"],
        }
        for minute, (name, per) in enumerate(rates.items()):
            make_run(root / name, changes.get(name, []), per=per, minute=minute, seed=minute, data=data)
        port = 8795
        app = make_app(Board(root), Access("127.0.0.1"))
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.05)
        with opened(f"http://127.0.0.1:{port}/?sort=best_per&order=up&run=first&run=wider", height=1060) as page:
            page.screenshot(path=out / "board.png")
        server.should_exit = True
        thread.join()


def ablation(_: Path, out: Path) -> None:
    shutil.copyfile(Path("runs/ablation/effects.svg"), out / "ablation.svg")


LIVE: dict[str, dict[str, Any]] = {
    "live": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "live-dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "live-phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True},
}
SPEAKING = (
    "document.querySelectorAll('#history > *').length >= 2"
    " && document.querySelectorAll('#words[data-kind=partial] .word').length >= 6"
    " && document.querySelector('#words[data-kind=partial] .choice')"
)


def live(run: Path, out: Path) -> None:
    """The live page, light, dark and on a phone, paused within a sentence whose alternatives are shown."""
    port = 8797
    command = [sys.executable, "-m", "arcuate", "live", str(run), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        if not any("open http://" in line for line in server.stderr):
            sys.exit("the live server did not start")
        with browser() as chromium:
            for name, options in LIVE.items():
                page = chromium.new_context(**options, bypass_csp=True).new_page()
                page.goto(f"http://127.0.0.1:{port}/")
                page.wait_for_timeout(10_000)  # until the images are filled
                page.wait_for_function(SPEAKING, timeout=120_000)
                page.keyboard.press("Space")
                page.wait_for_timeout(400)
                for choice in page.query_selector_all("#words .choice")[-1:]:
                    choice.focus()
                page.screenshot(path=out / f"{name}.png")
                page.keyboard.press("Space")
                page.context.close()
    finally:
        server.terminate()
        server.wait()


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "report": report, "trial": trial, "drift": drift, "doctor": doctor, "board": board,
    "ablation": ablation, "live": live,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="the demo run")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        try:
            PICTURES[name](options.run, options.out)
            print(f"{name}: made")
        except FileNotFoundError as error:
            print(f"{name}: left as it is, {error} is missing")


if __name__ == "__main__":
    main()
