"""Take the screenshots of the live page for the documentation, from a run with its recordings.

python benchmarks/live_pictures.py --run runs/demo --out docs/images
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

ARGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SHOTS: dict[str, dict[str, Any]] = {
    "live": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "live-dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "live-phone": {
        "viewport": {"width": 390, "height": 844},
        "color_scheme": "light",
        "device_scale_factor": 2,
        "has_touch": True,
    },
}


def wait_for(address: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            urlopen(address + "healthz").close()
            return
        except URLError:
            time.sleep(0.3)
    sys.exit(f"{address} does not answer")


def take(browser: Any, address: str, name: str, out: Path, sentences: int) -> None:
    """Pause within a sentence that has both final and preliminary words, and show alternatives."""
    context = browser.new_context(**SHOTS[name], bypass_csp=True)
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(10_000)  # until the images are filled
    page.wait_for_function(f"document.querySelectorAll('#history > *').length >= {sentences}", timeout=120_000)
    page.wait_for_function(
        "document.querySelectorAll('#words[data-kind=partial] .word').length >= 6"
        " && document.querySelector('#words[data-kind=partial] .choice')",
        timeout=120_000,
    )
    page.keyboard.press("Space")
    page.wait_for_timeout(400)
    choices = page.query_selector_all("#words .choice")
    if choices:
        choices[-1].focus()
    page.wait_for_timeout(300)
    page.screenshot(path=out / f"{name}.png")
    page.keyboard.press("Space")
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--port", type=int, default=8797)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or sys.exit("no chromium on this machine")
    command = [sys.executable, "-m", "arcuate", "live", str(options.run), "--port", str(options.port)]
    server, address = subprocess.Popen(command), f"http://127.0.0.1:{options.port}/"
    try:
        wait_for(address)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=found, args=ARGS)
            for name in SHOTS:
                take(browser, address, name, options.out, sentences=2)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
