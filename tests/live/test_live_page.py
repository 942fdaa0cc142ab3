# ruff: noqa: E402 - dependencies of the page may be missing
"""The page in a real browser: words appear, the raster moves, hover shows alternatives, viewers join."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
pytest.importorskip("uvicorn", reason="the extra live is not installed (uvicorn)")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine (Debian: apt-get install chromium)", allow_module_level=True)

from arcuate.evaluation.floor import FloorRates
from arcuate.live import viewers
from arcuate.live.input import Chunk, End, Mark
from support.live_parts import (
    Served,
    adapting_decoder,
    bins,
    decoder_of,
    marked,
    replaying,
    serving,
    small_model,
    wait_for,
)

pytestmark = pytest.mark.thorough

ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PATIENT_MS = 180_000


@pytest.fixture(scope="module")
def served(cohort_store: Path) -> Iterator[Served]:
    with replaying(cohort_store, speed=4.0, pause_s=1.0) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served: Served) -> Iterator:
    """A connected page; errors in its console fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(PATIENT_MS)
    errors: list[str] = []
    outside: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: outside.append(r.url) if f"127.0.0.1:{served.port}" not in r.url else None)
    page.goto(f"http://127.0.0.1:{served.port}/")
    page.wait_for_selector(".word")
    yield page
    context.close()
    assert not errors and not outside


COLOURS = """(() => { const c = document.querySelector('.raster canvas'); if (!c || !c.width) return 0;
    const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();
    for (let i = 0; i < d.length; i += 4) s.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]); return s.size; })()"""


def raster(page) -> int:
    """Number of colours in the first raster."""
    return page.evaluate(COLOURS)


def picture(page) -> str:
    return page.evaluate("document.querySelector('.raster canvas').toDataURL()")


def test_words_appear_and_become_final(page) -> None:
    page.wait_for_selector("#words[data-kind=partial] .word")
    errors = ", ".join(f"#history .{op}" for op in ("substitution", "deletion", "insertion"))
    page.wait_for_selector(errors, state="attached")  # the model is untrained
    page.wait_for_function(  # with the errors, after the sentence
        "() => document.getElementById('announce').textContent"
        " && document.getElementById('reference').innerText.startsWith('reference')"
    )
    page.wait_for_selector("#history li")


def test_the_reference_is_shown_before_the_end_only_on_demand(page) -> None:
    assert page.get_attribute("#toggle-reference", "aria-pressed") == "false"
    texts = [t["text"] for t in page.evaluate("fetch('info').then((r) => r.json())")["replay"]]
    options = page.locator("#trial option").all_inner_texts()
    assert not any(text in option for text in texts if text for option in options)
    page.wait_for_selector("#words[data-kind=partial] .word")
    page.wait_for_function(
        "() => document.querySelector('#words[data-kind=partial]') ? !document.querySelector('#reference b') : false"
    )
    page.keyboard.press("s")
    page.wait_for_selector("#toggle-reference[aria-pressed=true]")
    page.wait_for_function(
        "() => document.querySelector('#words[data-kind=partial]') && document.querySelector('#reference b')"
    )
    assert any(text in option for text in texts if text for option in page.locator("#trial option").all_inner_texts())
    page.click("#toggle-reference")
    page.wait_for_selector("#toggle-reference[aria-pressed=false]")


def test_the_word_error_rate_is_over_all_sentences(page, served: Served) -> None:
    page.wait_for_selector("#error-rate:not([hidden])")
    rate, title = page.evaluate(
        "[document.getElementById('wer').textContent, document.getElementById('error-rate').title]"
    )
    errors, words, sentences = (int(n) for n in re.findall(r"[0-9]+", title))
    assert rate == f"{100 * errors / words:.1f} %" and 0 < sentences <= served.live.session.n_sentences


def test_the_floor_of_the_run_is_shown(page, served: Served) -> None:
    assert page.evaluate("document.getElementById('floor').hidden")  # not measured
    served.live.floor = FloorRates(per=0.72, wer=0.964)
    try:
        page.reload()
        page.wait_for_selector("#floor:not([hidden])")
        assert page.inner_text("#floor-rate") == "96 %"
    finally:
        served.live.floor = None


def test_earlier_sentences_can_be_scrolled_back_to(page, served: Served) -> None:
    for k in range(60):
        final = {"type": "final", "number": k, "words": ["sentence", str(k)], "text": f"sentence {k}", "trial": None}
        served.live.broadcaster.publish(
            {**final, "alternatives": [], "reference": None, "alignment": None, "cut": False}
        )
    page.wait_for_function("() => document.querySelectorAll('#history li').length > 50")
    found = page.evaluate(
        "(() => { const h = document.getElementById('history');"
        " return [h.scrollHeight, h.clientHeight, h.scrollTop]; })()"
    )
    assert found[0] > found[1] and found[2] > 0  # the newest are in view
    page.evaluate("document.getElementById('history').scrollTop = 0")
    count = page.locator("#history li").count()
    page.wait_for_function(f"() => document.querySelectorAll('#history li').length > {count}")
    assert page.evaluate("document.getElementById('history').scrollTop") == 0  # reading is not interrupted


def test_finished_sentences_are_spoken_on_demand(page) -> None:
    page.evaluate(
        "() => { window.spoken = []; window.speechSynthesis.speak = (u) => window.spoken.push(u.text);"
        " window.speechSynthesis.cancel = () => window.spoken.push(null); }"
    )
    page.wait_for_selector("#words[data-kind=final]")
    assert page.evaluate("window.spoken") == []
    page.keyboard.press("v")
    page.wait_for_function("() => window.spoken.length > 0")
    assert page.evaluate("window.spoken[0]").strip()
    page.click("#toggle-voice")
    page.wait_for_function("() => window.spoken.at(-1) === null")


def test_a_page_opened_later_shows_the_last_seconds(browser, served: Served) -> None:
    """Its pictures are not empty, even if no bin arrives after it was opened."""
    wait_for(lambda: served.live.session._raster.n_bins > 100)
    served.live.handle_command({"type": "pause", "paused": True})
    try:
        page = browser.new_page()
        page.set_default_timeout(PATIENT_MS)
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("#state[data-state=paused]")
        page.wait_for_function(f"() => {COLOURS} > 10")
        page.close()
    finally:
        served.live.handle_command({"type": "pause", "paused": False})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_page_says_that_decoding_has_failed(browser) -> None:
    with serving() as served:
        page = browser.new_page()
        page.set_default_timeout(PATIENT_MS)
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("#state:not([data-state=connecting])")
        assert not page.is_visible("#failure")
        served.live.session.fail("the rig <b>stopped</b>")
        page.wait_for_selector("#state[data-state=stopped]")
        assert page.inner_text("#failure") == "the rig <b>stopped</b>"
        page.reload()  # a page opened later says so too
        page.wait_for_selector("#failure:text-is('the rig <b>stopped</b>')")
        page.close()


def test_without_words_phonemes_are_shown(browser) -> None:
    with serving(decoder_of(small_model())) as served:
        page = browser.new_page()
        page.set_default_timeout(PATIENT_MS)
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("#state[data-state=listening]")
        for item in marked("t1", bins(80), "a reference"):
            served.live.session.put(item)
        page.wait_for_selector("#words[data-kind=final] .word")
        final = json.loads(served.live.broadcaster.snapshot())["finals"][-1]
        assert page.locator("#words .word").all_inner_texts() == final["tokens"]
        assert page.evaluate("document.getElementById('error-rate').hidden")
        served.live.broadcaster.publish({**final, "tokens": [], "empty": True})
        page.wait_for_selector("#words:has-text('no phonemes decoded')")
        page.close()


def test_panels_have_colour_scales(page) -> None:
    """One for each panel, drawn as a gradient; the raster's follows from the grey levels of the server."""
    page.wait_for_selector(".raster .scale")
    bars = page.eval_on_selector_all(".scale i", "bars => bars.map((bar) => getComputedStyle(bar).backgroundImage)")
    assert len(bars) == page.locator("figure.panel").count() > 1 and all("linear-gradient(" in bar for bar in bars)
    assert len(set(bars)) == len(bars)
    script = (Path(viewers.__file__).parent / "page" / "live.js").read_text("utf-8")
    grey = re.search(r"GREY_PER_SD = (\d+), GREY_MEAN = (\d+);", script)
    assert grey is not None and float(grey[1]) == viewers._GREY_PER_SD
    level = viewers.RasterEncoder(1).encode(np.zeros((1, 1)))[-1]
    assert level == int(grey[2])


def test_the_raster_moves(page) -> None:
    page.wait_for_selector(".raster canvas[width]")
    assert page.evaluate("document.querySelector('.raster canvas').width") > 300
    first = picture(page)
    page.wait_for_function("(first) => document.querySelector('.raster canvas').toDataURL() !== first", arg=first)
    assert raster(page) > 10
    assert page.locator(".raster").count() == 2
    labels = page.locator(".raster").first.locator(".labels span").all_inner_texts()
    assert labels == ["ventral 6v", "area 4", "55b", "dorsal 6v"]


def pause_on_alternatives(page) -> None:
    """Pause the replay where a word on screen has alternatives, and wait until nothing moves any more."""
    for _ in range(20):
        page.wait_for_selector("#words .word.choice")
        page.keyboard.press(" ")
        page.wait_for_selector("#state[data-state=paused]")
        page.wait_for_timeout(500)
        if page.locator("#words .word.choice").count():
            return
        page.keyboard.press(" ")  # the sentence ended just before the pause
        page.wait_for_selector("#state:not([data-state=paused])")
    pytest.fail("no word had alternatives")


def test_hovering_over_a_word_shows_alternatives(page) -> None:
    pause_on_alternatives(page)
    word = page.locator("#words .word.choice").first
    others = json.loads(word.get_attribute("data-others"))
    word.hover()
    page.wait_for_selector("#tip:not([hidden])")
    assert page.inner_text("#tip").split("\n")[-len(others) - 1 :] == ["or", *others]  # below details of a final word
    page.mouse.move(2, 2)
    page.wait_for_selector("#tip", state="hidden")
    word.focus()
    page.wait_for_selector("#tip:not([hidden])")
    page.keyboard.press("Escape")
    page.wait_for_selector("#tip", state="hidden")
    word.hover()
    page.wait_for_selector("#tip:not([hidden])")
    page.keyboard.press("ArrowRight")  # the next trial has no words yet
    page.wait_for_selector("#words .hint")
    page.wait_for_selector("#tip", state="hidden")
    page.wait_for_selector("#state:not([data-state=paused])")


def test_low_confidence_is_marked_and_a_click_shows_it(page, served: Served) -> None:
    pause_on_alternatives(page)
    final = {"type": "final", "text": "thank you", "words": ["thank", "you"], "alternatives": [["think"], []]}
    served.live.broadcaster.publish({**final, "confidences": [0.97, 0.314], "doubtful": [1]})
    page.wait_for_selector("#words[data-kind=final] .doubtful:text-is('you')")
    assert page.locator("#words .doubtful").count() == 1
    page.click("#words .doubtful")
    page.wait_for_selector("#tip:has-text('confidence 31 %')")
    page.click("#words .word:text-is('thank')")
    page.wait_for_selector("#tip:has-text('confidence 97 %')")
    assert page.inner_text("#tip").split("\n") == ["confidence 97 %", "or", "think"]
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#state:not([data-state=paused])")


def contrast(page, selector: str) -> float:
    """Contrast of a text against the page, as defined by WCAG."""
    return page.evaluate(
        """(selector) => {
        const light = (text) => { const [r, g, b] = text.match(/[0-9.]+/g).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const probe = document.createElement('span'); probe.className = selector; probe.style.transition = 'none';
        document.getElementById('words').append(probe);
        const pair = [light(getComputedStyle(probe).color), light(getComputedStyle(document.body).backgroundColor)];
        probe.remove();
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05); }""",
        selector,
    )


def test_a_second_viewer_joins_and_sees_the_same(page, browser, served: Served) -> None:
    page.wait_for_selector("#words[data-kind=final]")
    other = browser.new_page()
    other.goto(f"http://127.0.0.1:{served.port}/")
    other.wait_for_selector("#history li", timeout=PATIENT_MS)
    page.wait_for_selector("#words[data-kind=final]")
    other.wait_for_selector("#words[data-kind=final]", timeout=PATIENT_MS)
    page.keyboard.press("Space")  # both show the same trial while paused
    page.wait_for_selector("#state[data-state=paused]")
    other.wait_for_selector("#state[data-state=paused]", timeout=PATIENT_MS)
    for _ in range(100):
        shown = page.inner_text("#trial-name"), other.inner_text("#trial-name")
        if shown[0] == shown[1]:
            break
        page.wait_for_timeout(100)
    assert shown[0] == shown[1]
    page.keyboard.press("Space")
    page.wait_for_selector("#state:not([data-state=paused])")
    assert json.loads(served.get("/healthz")[1])["viewers"] >= 2
    other.close()


def test_the_play_button_shows_what_it_does(page) -> None:
    assert page.is_visible("#play .pause") and not page.is_visible("#play .resume")
    page.click("#play")
    page.wait_for_selector("#play .resume", state="visible")
    assert not page.is_visible("#play .pause") and page.get_attribute("#play", "aria-label") == "Resume"
    page.click("#play")
    page.wait_for_selector("#play .pause", state="visible")


def test_keys_pause_speed_and_close(page) -> None:
    page.keyboard.press(" ")
    page.wait_for_selector("#state[data-state=paused]")
    page.keyboard.press(" ")
    page.wait_for_selector("#state:not([data-state=paused])")
    page.keyboard.press("4")
    page.wait_for_selector("#speeds button:nth-child(4)[aria-pressed=true]")
    page.keyboard.press("3")
    page.wait_for_selector("#speeds button:nth-child(3)[aria-pressed=true]")
    page.keyboard.press("o")
    page.wait_for_selector("#state[data-state=closed]")
    assert "not decoding" in page.inner_text("#state")
    page.click("#lock")
    page.wait_for_selector("#state:not([data-state=closed])")
    page.keyboard.press("?")
    page.wait_for_selector("#keys[open]")
    page.keyboard.press("Escape")


def test_the_page_shows_the_status_of_adaptation(browser) -> None:
    adapting = adapting_decoder()
    with serving(adapting) as served:
        page = browser.new_page()
        page.set_default_timeout(PATIENT_MS)
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("#adaptation:text-is('adapting, 0 of 0 used')")
        for item in (Mark("t1", "t15.2030.01.01"), Chunk(bins(60)), End()):
            served.live.session.put(item)
        page.wait_for_selector("#adaptation:has-text(' of 1 used')")
        assert page.get_attribute("#adaptation", "data-state") == "adapting"
        assert "started with the layer of day2" in page.get_attribute("#adaptation", "title")
        page.keyboard.press("r")
        page.wait_for_selector("#adaptation:text-is('adapting, 0 of 0 used')")
        now = {"type": "adaptation", **vars(adapting.adaptation)}
        for state, text in (("fell back", "fell back to the unadapted model"), ("off", "adaptation off")):
            served.live.broadcaster.publish({**now, "state": state, "reason": "a <b>reason</b>"})
            page.wait_for_selector(f"#adaptation:text-is('{text}')")
            assert page.get_attribute("#adaptation", "title").startswith("a <b>reason</b>; started with")
        page.close()


def test_selecting_a_trial(page) -> None:
    options = page.locator("#trial option")
    wanted = options.nth(options.count() - 1).get_attribute("value")
    page.select_option("#trial", wanted)
    page.wait_for_selector(f"#trial-name:text-is('{wanted.replace('/', ' · ')}')")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1920, 1080)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_phones_and_projectors(browser, served: Served, width: int, height: int, scheme) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{served.port}/")
    page.wait_for_selector("#words .word", timeout=PATIENT_MS)
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 150) == (scheme == "dark")
    assert contrast(page, "word unsettled") >= 3 and contrast(page, "hint") >= 4.5
    if width > 1000:
        bottom = page.evaluate("document.getElementById('controls').getBoundingClientRect().bottom")
        assert bottom <= height + 1
    context.close()
