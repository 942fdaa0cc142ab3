"""The report of complete, partial and damaged run folders."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.data.alphabet import BLANK, CLASSES, PHONEME_ORDER, PHONEMES
from arcuate.errors import UserError
from arcuate.evaluation.metrics import score, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.experiments.recipe import load_recipe
from arcuate.files import write_json, write_jsonl
from arcuate.insight.charts.curves import MAX_POINTS, curve_of
from arcuate.insight.charts.images import png
from arcuate.insight.render import vega_bundle
from arcuate.insight.report import write_report
from arcuate.insight.report.curves import confidence_section
from arcuate.insight.report.trial import intensity
from arcuate.insight.run_data import read_run, read_words
from arcuate.run import Run, create_run
from support.cases import cases
from support.fabricate_runs import write_words
from support.pages import Outline, check_page

WORDS = {
    "i": "AY", "you": "Y UW", "we": "W IY", "want": "W AA N T", "need": "N IY D", "like": "L AY K",
    "water": "W AO T ER", "music": "M Y UW Z IH K", "help": "HH EH L P", "the": "DH AH",
    "window": "W IH N D OW", "open": "OW P AH N", "please": "P L IY Z", "think": "TH IH NG K",
    "about": "AH B AW T", "that": "DH AE T", "good": "G UH D", "morning": "M AO R N IH NG",
    "very": "V EH R IY", "cold": "K OW L D", "choose": "CH UW Z", "she": "SH IY", "job": "JH AA B",
    "measure": "M EH ZH ER", "boy": "B OY", "say": "S EY", "from": "F R AH M",
}  # fmt: skip
SECTIONS = ["learning", "sessions", "confusions", "trial", "decodings", "recipe", "environment"]


def sentence(rng: np.random.Generator) -> tuple[str, list[str]]:
    words = rng.choice(list(WORDS), size=int(rng.integers(3, 9)))
    return " ".join(words), [p for word in words for p in (*WORDS[word].split(), "SIL")]


def misread(rng: np.random.Generator, reference: list[str], rate: float) -> list[str]:
    """Errors as a decoder makes them: mostly a neighbour in articulation, or nothing, or one too many."""
    read = []
    for name in reference:
        draw = rng.random() / rate
        if name == "SIL" or draw >= 1:
            read.append(name)
        elif draw < 0.65:
            read.append(PHONEME_ORDER[(PHONEME_ORDER.index(name) + int(rng.choice([-1, 1, 1, 2]))) % 39])
        elif draw > 0.85:
            read += [name, str(rng.choice(PHONEMES))]
    return read


def result(
    rng: np.random.Generator, session: str, number: int, split: str, labelled: bool, rate: float
) -> dict[str, Any]:
    text, reference = sentence(rng)
    hypothesis = misread(rng, reference, rate)
    counted = score(reference, hypothesis)
    return {
        "trial": f"{session}/{split}/{number:04d}",
        "session": session,
        "block": 1 + number // 10,
        "number": number,
        "split": split,
        "corpus": None,
        "mode": None,
        "text": text if labelled else None,
        "reference": reference if labelled else None,
        "hypothesis": hypothesis,
        "substitutions": counted.substitutions if labelled else None,
        "insertions": counted.insertions if labelled else None,
        "deletions": counted.deletions if labelled else None,
        "n_tokens": counted.length if labelled else None,
        "per": counted.rate if labelled else None,
        "loss": 0.4 if labelled else None,
        "n_bins": 13 * len(reference),
        "flags": [],
    }


def summary(rows: list[dict[str, Any]], split: str, **more: Any) -> dict[str, Any]:
    scored = {r["trial"]: score(r["reference"], r["hypothesis"]) for r in rows if r["reference"] is not None}
    summed = total(scored.values())
    low, high = bootstrap_interval(list(scored.values()))
    sessions = sorted({r["session"] for r in rows if r["trial"] in scored})
    return {
        "per": summed.rate,
        "per_low": low,
        "per_high": high,
        "n_trials": len(rows),
        "n_scored": len(scored),
        "n_tokens": summed.length,
        "substitutions": summed.substitutions,
        "insertions": summed.insertions,
        "deletions": summed.deletions,
        "loss": 0.4,
        "per_by_session": {s: total(scored[r["trial"]] for r in rows if r["session"] == s).rate for s in sessions},
        "per_by_block": {},
        "split": split,
        "selected_on": "dev",
        "checkpoint": "best",
        "step": 1250,
        **more,
    }


def example(
    rng: np.random.Generator, row: dict[str, Any], n_channels: int, stride: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Bins (T, C) with bursts where phonemes are, and frame scores (F, 41) that spell the hypothesis."""
    tokens = [CLASSES.index(name) for name in row["hypothesis"]]
    n_frames = 3 * len(tokens) + 6
    logits = rng.normal(0, 0.8, (n_frames, len(CLASSES)))
    logits[:, BLANK] += 5
    for i, token in enumerate(tokens):
        logits[3 + 3 * i, token] += 9
        logits[3 + 3 * i, rng.integers(1, 41)] += 3.5
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    n_bins, half = 14 + stride * (n_frames - 1), n_channels // 2
    tuning = rng.gamma(1.5, 1.0, (41, half))
    drive = np.zeros((n_bins, half))
    for i, token in enumerate(tokens):
        centre = stride * (3 + 3 * i) + 4
        drive += np.exp(-0.5 * ((np.arange(n_bins)[:, None] - centre) / 5) ** 2) * tuning[token]
    crossings = rng.poisson(0.25 + 0.4 * drive)
    power = 20 + 8 * crossings + rng.gamma(2, 4, (n_bins, half))
    return np.concatenate([crossings, power], axis=1).astype(np.float32), log_probs.astype(np.float32)


def metrics(rng: np.random.Generator, steps: int, every: int, validate_every: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        share = step / steps
        loss = 0.25 + 4.2 * np.exp(-6 * share) + 0.06 * rng.random()
        norm = float(0.6 + 2.5 * np.exp(-5 * share) + 0.4 * rng.random())
        lr = 0.003 * min(step / 100, 0.5 + 0.5 * np.cos(np.pi * share))
        cost = {"seconds_per_step": 0.15 + 0.02 * rng.random()}
        row = {
            "step": step,
            "split": "train",
            "loss": loss,
            "grad_norm": norm,
            "grad_norm_max": norm * 2.2,
            "lr": lr,
        }
        rows.append({**row, "lr_session": lr, "blank_share": 0.6, "cost": cost})
        if step % validate_every == 0:
            per = 0.11 + 0.8 * np.exp(-5 * share) + 0.02 * rng.random()
            rows.append({"step": step, "split": "dev", "loss": loss * 1.2 + 0.15, "per": per, "blank_share": 0.6})
    return rows


def make_run(
    path: Path,
    *,
    steps: int = 1500,
    every: int = 25,
    validate_every: int = 125,
    sessions: int = 6,
    trials: int = 20,
    channels: int = 32,
    split: str | None = "val",
    labelled: bool = True,
    n_examples: int = 3,
    seed: int = 0,
) -> Run:
    """A run folder as training and evaluation leave it, with made-up but plausible content."""
    rng = np.random.default_rng(seed)
    names = [f"t15.2023.{8 + i // 28:02d}.{1 + i % 28:02d}" for i in range(sessions)]
    environment = {
        "arcuate": "0.1.0",
        "python": "3.11.9",
        "torch": "2.13.0",
        "numpy": "2.4.6",
        "platform": "Linux x86_64",
        "device": "cpu",
        "threads": 1,
        "data": {
            "path": "data/cohort",
            "layout": "b2t25",
            "n_channels": channels,
            "sessions": names,
            "manifest_hash": "3f9c2a7d51e0",
        },
        "n_parameters": 1_318_441,
        "command": f"arcuate train tiny --data data/cohort --run runs/{path.name} train.seed=3",
        "started": "2026-01-09T10:12:00Z",
        "selected_on": "dev",
    }
    recipe = load_recipe("tiny", [f"train.steps={max(steps, 100)}", "data.dev_fraction=0.1"])
    run = create_run(path, recipe, environment)
    write_jsonl(run.metrics_file, metrics(rng, steps, every, validate_every))
    if split:
        rows = [
            result(rng, name, number, split, labelled, 0.08 + 0.16 * rng.random() * (i / max(sessions - 1, 1)))
            for i, name in enumerate(names)
            for number in range(trials)
        ]
        write_results(run, split, rows, rng, channels, n_examples)
    return run


def write_results(
    run: Run,
    split: str,
    rows: list[dict[str, Any]],
    rng: np.random.Generator,
    channels: int,
    n_examples: int = 3,
) -> None:
    write_jsonl(run.results_file(split), rows)
    write_json(run.results_file(split, ending="json"), summary(rows, split))
    shown = sorted(rows, key=lambda r: abs(len(r["hypothesis"]) - 28))[:n_examples]
    arrays: dict[str, np.ndarray] = {"trials": np.array([r["trial"] for r in shown], dtype=np.str_)}
    for i, row in enumerate(shown):
        arrays[f"bins_{i}"], arrays[f"log_probs_{i}"] = example(rng, row, channels)
    np.savez_compressed(run.results_file(split, ending="npz"), **arrays)


def report(run: Run, split: str | None = None) -> tuple[str, Outline]:
    page = write_report(run, split).read_text("utf-8")
    return page, check_page(page)


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "demo")


def test_complete_run_has_every_section(complete_run: Run) -> None:
    page, outline = report(complete_run)
    assert [i for i in outline.ids if i in SECTIONS] == SECTIONS
    assert len(page) < 3_000_000
    for words in (
        "Phoneme error rate",
        "of 6 sessions",
        "checkpoint of step 1,250",
        "Most frequent substitutions",
        "clipped to 1",
    ):
        assert words in page
    assert page.count('class="chip sub"') > 5
    assert "not on the trials scored here" in page and "decoded with" not in page
    values = json.loads(complete_run.results_file("val", ending="json").read_text())
    assert f"<b>{100 * values['per']:.1f}\u202f%</b>" in page
    assert f"{100 * values['per_low']:.1f}–{100 * values['per_high']:.1f}" in page


def test_search_and_selection_are_stated_and_broken_examples_not_fatal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", sessions=1, n_examples=1)
    path = run.results_file("val", ending="json")
    facts = {"selected_on": "val", "search": "beam", "beam": 20, "head": "ctc"}
    write_json(path, {**json.loads(path.read_text()), **facts})
    run.results_file("val", ending="npz").write_bytes(b"not an archive")
    page, _ = report(run)
    assert "decoded with beam size 20" in page and "val.npz cannot be read" in page
    assert "selected on the same validation trials that are scored here" in page


def test_same_folder_gives_the_same_bytes(complete_run: Run) -> None:
    assert write_report(complete_run).read_bytes() == write_report(complete_run).read_bytes()


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\ud800\x00"
    run = make_run(tmp_path / "<script>alert(3)<script>", n_examples=1, sessions=2)
    rng = np.random.default_rng(1)
    rows = [result(rng, bad, i, "val", True, 0.2) for i in range(5)]
    rows = [
        {**r, "text": bad, "trial": bad, "block": bad, "flags": [bad], "hypothesis": [bad, *r["hypothesis"]]}
        for r in rows
    ]
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    run.results_file("val").write_text(lines)
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
    run = make_run(tmp_path / "r", sessions=2, trials=4, n_examples=1)
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
    "shape",
    [
        {"steps": 1, "every": 1, "validate_every": 1},
        {"validate_every": 10**9},
        {"steps": 50, "every": 50, "split": None},
        {"sessions": 1, "trials": 1},
        {"sessions": 45, "trials": 6},
        {"channels": 2},
        {"channels": 512, "n_examples": 1},
        {"split": "test", "labelled": False},
    ],
    ids=lambda shape: " ".join(f"{k}={v}" for k, v in shape.items()),
)
def test_all_sizes_are_drawn(tmp_path: Path, shape: dict[str, Any]) -> None:
    page, _ = report(make_run(tmp_path / "r", **{"sessions": 2, **shape}))
    assert len(page) - len(vega_bundle()) < 1_500_000


def test_trials_without_labels_are_decoded_and_not_scored(tmp_path: Path) -> None:
    page, _ = report(make_run(tmp_path / "r", sessions=2, split="test", labelled=False, n_examples=1))
    assert "have no labels" in page
    assert "chip sub" not in page


def test_scored_split_is_preferred_to_one_without_labels(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", sessions=2, n_examples=1)
    rng = np.random.default_rng(3)
    write_results(run, "test", [result(rng, "s", i, "test", False, 0.1) for i in range(4)], rng, 4)
    assert "validation trials" in report(run)[0]
    assert "4 test trials" in report(run, "test")[0]
    with pytest.raises(UserError, match=r"arcuate evaluate .* --split dev"):
        write_report(run, "dev")


def test_long_log_gives_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", split=None)
    line = '{"step": %d, "split": "train", "loss": %.4f, "grad_norm": 1.5, "grad_norm_max": 2.5, "lr": 0.001}\n'
    noise = np.random.default_rng(0).random(120_000)
    run.metrics_file.write_text("".join(line % (i + 1, loss) for i, loss in enumerate(noise)))
    page, _ = report(run)
    assert len(page) - len(vega_bundle()) < 250_000  # every chart as data and as a drawing


def test_non_finite_values_become_counted_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", split=None, steps=100, every=10, validate_every=50)
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
ROWS = st.dictionaries(
    st.sampled_from(["step", "loss", "per", "lr", "lr_session", "grad_norm", "cost", "split"]), VALUES
)


@settings(max_examples=cases(0.1))
@given(train=st.lists(ROWS, max_size=6), held=st.lists(ROWS, max_size=6), result=st.lists(ROWS, max_size=3))
def test_any_values_in_the_log_give_a_page(
    tmp_path: Path, train: list[dict[str, Any]], held: list[dict[str, Any]], result: list[dict[str, Any]]
) -> None:
    path = tmp_path / "r"
    run = Run(path) if path.exists() else make_run(path, sessions=1, trials=2, n_examples=1)
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
    run = make_run(tmp_path / "r", split=None)
    lines = [
        "a0: &a0 {x: 1, y: [1, 2]}",
        *(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 12)),
    ]
    run.recipe_file.write_text("\n".join(lines))
    assert len(report(run)[0]) < 1_000_000


def test_unusual_examples_are_drawn(tmp_path: Path) -> None:
    """NaN bins, dead channels, an odd channel count, a foreign alphabet, a trial nobody knows."""
    run = make_run(tmp_path / "r", sessions=2, n_examples=1)
    bins, log_probs = np.ones((40, 3)), np.full((9, 5), -np.inf)
    bins[3] = np.nan
    arrays = {"trials": np.array(["nobody"]), "bins_0": bins, "log_probs_0": log_probs}
    np.savez_compressed(run.results_file("val", ending="npz"), **arrays)
    assert "3 channels" in report(run)[0]


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
    run = make_run(tmp_path / "run")
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
    run = make_run(tmp_path / "run", split=None)
    rows = [row | ({"wer": 0.4} if row["split"] == "dev" else {}) for row in run.metrics()]
    write_jsonl(run.metrics_file, rows)
    page, _ = report(run)
    assert "Word error rate over steps; lowest 40.0" in page and "Best word error rate in the log" in page


def test_the_confidence_of_words_is_shown_and_damaged_values_are_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_words(run, 0.2)
    file = run.results_file("val", "words", "json")
    summary = json.loads(file.read_text())
    bins = [{"low": 0.9, "high": 1.0, "n": 80, "confidence": 0.96, "accuracy": 0.95}]
    words = {
        "n": 100,
        "accuracy": 0.8,
        "ece": 0.021,
        "auroc": 0.93,
        "bins": bins,
        "risk_coverage": [[0.5, 0.0], [1.0, 0.2]],
    }
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
    run = make_run(tmp_path / "run", n_examples=0)
    assert "floor without neural information" not in report(run)[0]
    file = run.path / "results" / "floor" / "val.json"
    file.parent.mkdir()
    write_json(file, {"lowest": 0.812})
    assert "floor without neural information, 81.2\u202f%" in report(run)[0]
