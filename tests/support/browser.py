"""A real browser for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PATIENT_MS = 60_000


def find_chromium() -> str:
    """The installed browser; skips the calling module without one."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)", allow_module_level=True)
    return found


@contextmanager
def launched(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=ARGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page; errors in its console and requests to other addresses fail the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(PATIENT_MS)
    errors: list[str] = []
    origin = address.split("/", 3)[2] if address.startswith("http") else ""
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: None if _is_own(r.url, address, origin) else errors.append(f"loads {r.url}"))
    page.goto(address)
    yield page
    context.close()
    assert not errors, errors


def _is_own(url: str, address: str, origin: str) -> bool:
    return url.startswith(("data:", "blob:")) or url == address or (bool(origin) and url.split("/", 3)[2] == origin)
