"""The report of complete, partial and damaged run folders."""

import base64
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.errors import UserError
from arcuate.files import read_json, read_jsonl, read_npz, write_json, write_jsonl
from arcuate.insight.charts.curves import MAX_POINTS, curve_of
from arcuate.insight.charts.images import png
from arcuate.insight.render import vega_bundle
from arcuate.insight.report import write_report
from arcuate.insight.report.curves import confidence_section
from arcuate.insight.report.trial import intensity
from arcuate.insight.run_data import read_run, read_words
from arcuate.run import Run
from support.cases import cases
from support.fabricate_runs import write_words
from support.pages import Outline, check_page

GOLDEN = Path(__file__).parents[1] / "golden" / "run"
ROWS = read_jsonl(GOLDEN / "results" / "val.jsonl")
LOG = read_jsonl(GOLDEN / "metrics.jsonl")
SECTIONS = ["learning", "sessions", "confusions", "trial", "decodings", "recipe", "environment"]
UNLABELLED = {"text": None, "reference": None, "per": None}


def copy_run(path: Path) -> Run:
    """A copy of the golden run: two sessions, two trials of each, three examples."""
    return Run(Path(shutil.copytree(GOLDEN, path, ignore=shutil.ignore_patterns("checkpoints"))))


def bare_run(path: Path) -> Run:
    """A run that was not evaluated."""
    run = copy_run(path)
    shutil.rmtree(run.path / "results")
    return run


def change(file: Path, **facts: Any) -> None:
    write_json(file, {**read_json(file), **facts})


def report(run: Run, split: str | None = None) -> tuple[str, Outline]:
    page = write_report(run, split).read_text("utf-8")
    return page, check_page(page)


def test_complete_run_has_every_section(tmp_path: Path) -> None:
    run = copy_run(tmp_path / "run")
    page, outline = report(run)
    assert [i for i in outline.ids if i in SECTIONS] == SECTIONS
    assert len(page) < 3_000_000
    for words in (
        "Phoneme error rate",
        "of 2 sessions",
        "checkpoint of step 500",
        "Most frequent substitutions",
        "clipped to 1",
        "selected on the same validation trials that are scored here",
    ):
        assert words in page
    assert page.count('class="chip sub"') > 5 and "decoded with" not in page
    values = read_json(run.results_file("val", ending="json"))
    assert f"<b>{100 * values['per']:.1f}\u202f%</b>" in page
    assert f"{100 * values['per_low']:.1f}–{100 * values['per_high']:.1f}" in page
    assert report(run)[0] == page


def test_search_and_selection_are_stated_and_broken_examples_not_fatal(tmp_path: Path) -> None:
    run = copy_run(tmp_path / "r")
    change(run.results_file("val", ending="json"), selected_on="dev", search="beam", beam=20)
    run.results_file("val", ending="npz").write_bytes(b"not an archive")
    page, _ = report(run)
    assert "decoded with beam size 20" in page and "val.npz cannot be read" in page
    assert "not on the trials scored here" in page


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\ud800\x00"
    run = copy_run(tmp_path / "<script>alert(3)<script>")
    named = dict.fromkeys(("text", "trial", "block", "session"), bad)
    rows = [{**r, **named, "flags": [bad], "hypothesis": [bad, *r["hypothesis"]]} for r in ROWS]
    run.results_file("val").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run.path / "results" / "a<b>.jsonl").write_text("")
    (run.path / "results" / "a<b>.json").write_text(json.dumps({"per": bad}))
    run.recipe_file.write_text(f"name: '</style>{'<script>'}'\nsummary: <script>\n<script>: {{a: </pre>}}\n")
    run.environment_file.write_text(
        json.dumps({"command": bad, "device": bad, bad: bad, "data": {"sessions": [bad], "path": bad}})
    )
    run.incidents_file.write_text(json.dumps({"step": 3, "kind": bad}) + "\n")
    run.metrics_file.write_text(json.dumps({"step": 1, "split": bad, "loss": 1.0, "per": 0.5}) + "\n")
    page, outline = report(run)
    assert "img" not in outline.tags  # and `check_page` knows every script
    assert page.count("alert(") == page.count("&gt;alert(") + page.count("\\u003ealert(") + page.count("=alert(2)")
    assert "alert(1)" in page


@pytest.mark.parametrize(
    "missing", ["results", "summary", "examples", "metrics", "environment", "recipe", "everything"]
)
def test_missing_files_are_tolerated(tmp_path: Path, missing: str) -> None:
    run = copy_run(tmp_path / "r")
    gone = {
        "results": [run.results_file("val")],
        "summary": [run.results_file("val", ending="json")],
        "examples": [run.results_file("val", ending="npz")],
        "metrics": [run.metrics_file],
        "environment": [run.environment_file],
        "recipe": [run.recipe_file],
    }
    gone["everything"] = [p for paths in gone.values() for p in paths]
    for path in gone[missing]:
        path.unlink()
    page, _ = report(run)
    assert ("--split val" in page) == (missing in ("results", "everything"))
    assert ("Best error rate in the log" in page) == (missing == "results")


@pytest.mark.parametrize(
    "log", [LOG[:1], [row for row in LOG if row["split"] == "train"]], ids=["one row", "not validated"]
)
def test_short_logs_are_drawn(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    run = bare_run(tmp_path / "r")
    write_jsonl(run.metrics_file, log)
    assert "Not evaluated yet" in report(run)[0]


@pytest.mark.parametrize("n_sessions", [1, 45])
def test_few_and_many_sessions_are_drawn(tmp_path: Path, n_sessions: int) -> None:
    run = copy_run(tmp_path / "r")
    names = [f"t15.2023.{8 + i // 28:02d}.{1 + i % 28:02d}" for i in range(n_sessions)]
    rows = [{**row, "session": name, "trial": f"{name}/{i}"} for name in names for i, row in enumerate(ROWS)]
    write_jsonl(run.results_file("val"), rows[: 1 if n_sessions == 1 else None])
    run.results_file("val", ending="json").unlink()
    page, _ = report(run)
    assert ("One session" in page) == (n_sessions == 1) and len(page) - len(vega_bundle()) < 1_500_000


@pytest.mark.parametrize("n_channels", [2, 3, 512])
def test_unusual_examples_are_drawn(tmp_path: Path, n_channels: int) -> None:
    """NaN bins, dead channels, an odd or a large channel count; a foreign alphabet, a trial nobody knows."""
    run = copy_run(tmp_path / "r")
    file = run.results_file("val", ending="npz")
    arrays = read_npz(file)
    bins = np.resize(arrays["bins_0"], (len(arrays["bins_0"]), n_channels))
    bins[3], bins[:, 1] = np.nan, 0.0
    foreign = {"trials": np.array(["nobody"]), "log_probs_0": np.full((9, 5), -np.inf)} if n_channels == 3 else {}
    np.savez_compressed(file, **{**arrays, "bins_0": bins, **foreign})
    page, _ = report(run)
    assert ("3 channels" in page) == (n_channels == 3) and len(page) - len(vega_bundle()) < 1_500_000


def test_trials_without_labels_are_decoded_and_not_preferred_to_scored_ones(tmp_path: Path) -> None:
    run = copy_run(tmp_path / "r")
    write_jsonl(run.results_file("test"), [{**row, **UNLABELLED} for row in ROWS])
    write_json(run.results_file("test", ending="json"), {"per": None, "n_trials": 4})
    assert "4 validation trials" in report(run)[0]
    page, _ = report(run, "test")
    assert "4 test trials" in page and "have no labels" in page and "chip sub" not in page
    with pytest.raises(UserError, match=r"arcuate evaluate .* --split dev"):
        write_report(run, "dev")


def test_long_log_gives_a_small_page(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "r")
    line = '{"step": %d, "split": "train", "loss": %.4f, "grad_norm": 1.5, "grad_norm_max": 2.5, "lr": 0.001}\n'
    noise = np.random.default_rng(0).random(120_000)
    run.metrics_file.write_text("".join(line % (i + 1, loss) for i, loss in enumerate(noise)))
    page, _ = report(run)
    assert len(page) - len(vega_bundle()) < 250_000  # every chart as data and as a drawing


def test_non_finite_values_become_counted_gaps(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "r")
    rows = [
        {"step": s, "split": "train", "loss": None if s > 4 else 1.0, "grad_norm": "NaN", "lr": 0.0} for s in range(8)
    ]
    run.metrics_file.write_text(
        "".join(json.dumps(r) + "\n" for r in rows) + '{"step": 9, "split": "train", "loss": NaN}\n'
    )
    assert "4 logged values not finite" in report(run)[0]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.sampled_from([0, 5e-324, 1e-300, 1.7e308, -1.7e308, 0.5]),
)
LOGGED = st.dictionaries(
    st.sampled_from(["step", "loss", "per", "lr", "lr_session", "grad_norm", "cost", "split"]), VALUES
)


@settings(max_examples=cases(0.1))
@given(train=st.lists(LOGGED, max_size=6), held=st.lists(LOGGED, max_size=6), result=st.lists(LOGGED, max_size=3))
def test_any_values_in_the_log_give_a_page(
    tmp_path: Path, train: list[dict[str, Any]], held: list[dict[str, Any]], result: list[dict[str, Any]]
) -> None:
    path = tmp_path / "r"
    run = Run(path) if path.exists() else copy_run(path)
    rows = [{"step": i, **r, "split": "train"} for i, r in enumerate(train)]
    rows += [{"step": i, **r, "split": "val"} for i, r in enumerate(held)]
    run.metrics_file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = [
        {"trial": "a", "reference": r.get("loss"), "hypothesis": r.get("per"), "text": r.get("lr")} for r in result
    ]
    run.results_file("val").write_text("".join(json.dumps(r) + "\n" for r in lines))
    write_json(run.results_file("val", ending="json"), held[0] if held else {})
    Outline(write_report(run).read_text("utf-8"))


def test_self_referencing_yaml_is_truncated(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "r")
    lines = [
        "a0: &a0 {x: 1, y: [1, 2]}",
        *(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 12)),
    ]
    run.recipe_file.write_text("\n".join(lines))
    assert len(report(run)[0]) < 1_000_000


def test_thinned_curve_keeps_the_extremes() -> None:
    rows = [{"step": i, "loss": 1000.0 if i == 777 else 1.0} for i in range(5000)]
    thinned = curve_of(rows, "loss")
    assert len(thinned.steps) <= MAX_POINTS
    assert max(thinned.values) == 1000.0


def test_intensity_is_between_zero_and_one() -> None:
    bins = np.array([[0.0, np.inf, 5.0], [0.0, 1.0, np.nan], [0.0, 9.0, 7.0]])
    values = intensity(bins)
    assert values.shape == (3, 3)
    assert ((values >= 0) & (values <= 1)).all()
    assert (values[0] == 0).all()


def test_png_contains_the_given_values() -> None:
    values = np.linspace(0, 1, 15).reshape(3, 5)
    content = base64.b64decode(png(values).partition(",")[2])
    assert struct.unpack(">IIBB", content[16:26]) == (5, 3, 4, 3)  # width, height, bits, palette
    at = content.index(b"IDAT")
    size = struct.unpack(">I", content[at - 4 : at])[0]
    lines = np.frombuffer(zlib.decompress(content[at + 4 : at + 4 + size]), np.uint8).reshape(3, 4)[:, 1:]
    shades = np.stack([lines >> 4, lines & 15], axis=-1).reshape(3, 6)[:, :5]
    np.testing.assert_array_equal(shades, np.rint(values * 15))


def test_words_stand_beside_phonemes(tmp_path: Path) -> None:
    run = copy_run(tmp_path / "run")
    page, outline = report(run)
    assert "sentences" not in outline.ids and "Word error rate" not in page
    write_words(run, 0.333)
    page, outline = report(run)
    assert "sentences" in outline.ids
    assert "Word error rate <b>33.3\u202f%</b>" in page and "small 3-gram" in page
    section = page.split('id="sentences"')[1].split("<section")[0]
    assert 'class="chip sub"' in section and 'class="chip del"' in section and "<b>two</b>" in section
    assert "<b>controversial" not in page  # text is escaped
    assert "Example decodings" in page and "val.words" not in page


def test_wer_of_the_log_is_drawn(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run")
    rows = [row | ({"wer": 0.4} if row["split"] == "val" else {}) for row in LOG]
    write_jsonl(run.metrics_file, rows)
    page, _ = report(run)
    assert "Word error rate over steps; lowest 40.0" in page and "Best word error rate in the log" in page


def test_the_confidence_of_words_is_shown_and_damaged_values_are_not(tmp_path: Path) -> None:
    run = copy_run(tmp_path / "run")
    write_words(run, 0.2)
    file = run.results_file("val", "words", "json")
    summary = json.loads(file.read_text())
    bins = [{"low": 0.9, "high": 1.0, "n": 80, "confidence": 0.96, "accuracy": 0.95}]
    facts = {"n": 100, "accuracy": 0.8, "ece": 0.021, "auroc": 0.93}
    words = facts | {"bins": bins, "risk_coverage": [[0.5, 0.0], [1.0, 0.2]]}
    measured = {"words": words, "accepted_share": 0.7, "accepted_accuracy": 0.957, "target_accuracy": 0.95}
    write_json(file, summary | {"confidence": measured, "words_per_minute": 61.7})
    page = write_report(run).read_text("utf-8")
    assert "by 2.1\u202f% on average (ECE)" in page and "95.7\u202f% of these are correct" in page
    assert "Accuracy of words by confidence" in page
    assert '<p class="name">Words per minute</p><p class="value">62</p>' in page
    for damaged in (
        "text",
        {"words": 3},
        {"words": {"ece": "x", "n": 1, "bins": 7}},
        {"words": words | {"bins": [None]}},
    ):
        write_json(file, summary | {"confidence": damaged, "rate": 3})
        assert confidence_section(read_words(read_run(run), "val")) is None


def test_the_floor_is_drawn_beside_the_error_rate(tmp_path: Path) -> None:
    run = copy_run(tmp_path / "run")
    assert "floor without neural information" not in report(run)[0]
    file = run.path / "results" / "floor" / "val.json"
    file.parent.mkdir()
    write_json(file, {"lowest": 0.812})
    assert "floor without neural information, 81.2\u202f%" in report(run)[0]
