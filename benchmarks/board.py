"""Time until the board shows a folder of many runs in a browser, and until every row is complete.

python benchmarks/board.py --runs 200
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen


def fabricate(root: Path, n: int) -> None:
    """Runs of one recipe that differ in their seed, with a log of 600 steps."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    first = import_module("support.fabricate_runs").make_run(root / "run000")
    for i in range(1, n):
        copy = root / f"run{i:03d}"
        shutil.copytree(first.path, copy)
        facts = json.loads((copy / "environment.json").read_text())
        facts["started"] = f"2030-01-01T{i // 60:02d}:{i % 60:02d}:00+00:00"
        (copy / "environment.json").write_text(json.dumps(facts))
        recipe = (copy / "recipe.yaml").read_text()
        (copy / "recipe.yaml").write_text(recipe.replace("seed: 0", f"seed: {i}", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--port", type=int, default=8796)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or sys.exit("no chromium on this machine")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        fabricate(Path(folder), options.runs)
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        address = f"http://127.0.0.1:{options.port}/"
        command = [sys.executable, "-m", "arcuate", "board", folder, "--port", str(options.port)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            begin = time.perf_counter()
            while True:
                try:
                    urlopen(address).close()
                    break
                except URLError:
                    time.sleep(0.02)
            up = time.perf_counter()
            page.goto(address)
            page.wait_for_function(f"() => document.querySelectorAll('#runs tbody tr').length === {options.runs}")
            shown = time.perf_counter()
            wait = "() => !document.getElementById('count').textContent.includes('being read')"
            page.wait_for_function(wait, timeout=120_000)
            complete = time.perf_counter()
            page.reload()
            page.wait_for_function(f"() => document.querySelectorAll('#runs tbody tr').length === {options.runs}")
            again = time.perf_counter()
        finally:
            server.terminate()
            server.wait()
        browser.close()
    print(f"{options.runs} runs: server up after {up - begin:.2f} s, all rows shown {shown - up:.2f} s later,")
    print(f"all verdicts {complete - up:.2f} s later; page reloaded in {again - complete:.2f} s")


if __name__ == "__main__":
    main()
