"""Damaged files of every format that the project reads: refused in one sentence, or read.

Files with a hash or checksum must be refused or give exactly their original content.
"""

import gzip
import io
import json
import pickle
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import strategies as st

from arcuate.config import read_yaml
from arcuate.data import watched
from arcuate.data.alphabet import CLASSES
from arcuate.data.prepare import prepare
from arcuate.data.store import Store
from arcuate.data.unpickle import load_checkpoint as load_torch_checkpoint
from arcuate.data.unpickle import load_pickle
from arcuate.decoding.config import read_decoding_config
from arcuate.decoding.frame_files import read_frames
from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.evaluation.combine import read_weights
from arcuate.evaluation.sentences import read_decodings
from arcuate.evaluation.submission import read_texts
from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.experiments.sweep import read_space
from arcuate.exported.file import open_archive, write_archive
from arcuate.files import read_json
from arcuate.insight import render
from arcuate.insight.report.page import report_page
from arcuate.insight.run_data import read_run
from arcuate.insight.runs import list_runs
from arcuate.language.lexicon import read_lexicon
from arcuate.language.ngram.estimate import build_model
from arcuate.language.ngram.model import check_model_file
from arcuate.language.ngram.open import open_model, read_third_party
from arcuate.language.ngram.perplexity import score_text
from arcuate.language.ngram.text import read_sentences
from arcuate.models.io import load_model
from arcuate.run import Run
from arcuate.runtime import Decoder
from arcuate.training.checkpoint import load_checkpoint
from support.cases import cases
from support.dialects import DIALECTS
from support.doctor_logs import falling, log
from support.fuzzing import (
    Outcomes,
    damaged,
    edited_bytes,
    edited_json,
    edited_jsonl,
    edited_yaml,
    fuzz,
    generated,
)
from support.recordings import FakeTrial, noise, write_hdf5, write_mat

GOLDEN = Path(__file__).parents[1] / "golden"
SESSION = "t15.2023.08.11"
Reader = Callable[[bytes, Path], object]


def check(
    read: Reader,
    seeds: list[bytes],
    folder: Path,
    share: float = 0.5,
    minimum_refused: float = 0.0,
    documents: Callable[[bytes], st.SearchStrategy[bytes]] | None = None,
) -> Outcomes:
    """Half of the inputs by the byte mutator, half by hypothesis, which also edits parsed `documents`."""
    strategy = edited_bytes(seeds) if documents is None else st.one_of(map(documents, seeds)) | edited_bytes(seeds)
    by_hypothesis = generated(strategy, share / 2)
    outcomes = fuzz(read, [*damaged(seeds, share / 2), *by_hypothesis], folder)
    outcomes.check(minimum_refused)
    return outcomes


DOCUMENTS = {"json": edited_json, "jsonl": edited_jsonl, "yaml": edited_yaml}


def documents_of(part: str) -> Callable[[bytes], st.SearchStrategy[bytes]] | None:
    return DOCUMENTS.get(part.rsplit(".", 1)[-1])


def write_and(read: Callable[[Path], object], name: str) -> Reader:
    """Write the content to the file `name` and read it."""

    def write_and_read(content: bytes, folder: Path) -> object:
        (folder / name).write_bytes(content)
        return read(folder / name)

    return write_and_read


# --- recordings and stores -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["hdf5", "mat"])
def test_recordings(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CPU_SECONDS", 2.0)
    bins = [noise(20, 4, seed=i) for i in range(3)]
    if layout == "hdf5":
        path = write_hdf5(tmp_path / "source" / SESSION / "data_train.hdf5", [FakeTrial(b) for b in bins])
    else:
        path = write_mat(tmp_path / "source" / "train" / "t12.2022.04.28.mat", bins, ["One two.", "Yes.", "No."])
    seed = path.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        path.write_bytes(content)
        report = prepare(path.parents[1], folder / "store", force=True).report
        store = Store.open(folder / "store")
        assert store.find_changed() == []
        n_missing = sum(1 for row in report.unreadable) + sum("not trials" in row.detail for row in report.quality)
        assert len(store.trials) == 3 or n_missing, "a trial is missing and no row of the report says so"

    check(read, [seed], tmp_path / layout)


@pytest.mark.parametrize("part", ["manifest.json", f"sessions/{SESSION}.npy", f"sessions/{SESSION}.npz"])
def test_stores(tmp_path: Path, part: str) -> None:
    shutil.copytree(GOLDEN / "store", tmp_path / "old")
    write_hdf5(tmp_path / "source" / SESSION / "data_train.hdf5", [FakeTrial(noise(20, 4, seed=i)) for i in range(3)])
    prepare(tmp_path / "source", tmp_path / "store")
    path = tmp_path / "store" / part
    seed = path.read_bytes()
    original = _contents(tmp_path / "store")

    def read(content: bytes, folder: Path) -> None:
        path.write_bytes(content)
        found = _contents(tmp_path / "store")
        assert part == "manifest.json" or found == original, "changed content was read"

    check(read, [seed], tmp_path / f"store-{path.suffix[1:]}", documents=documents_of(part))


def _contents(path: Path) -> list[tuple[bytes, ...]]:
    store = Store.open(path)
    store.check_unchanged(store.trials)
    rows = []
    for info in store.trials:
        block, past = store.block_statistics(info), store.past_statistics(info, log=True)
        rows.append((store.read_bins(info).tobytes(), block.mean.tobytes(), past.sd.tobytes()))
    return rows


# --- runs and models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    ["recipe.yaml", "environment.json", "metrics.jsonl", "results/val.json", "results/val.jsonl", "results/val.npz"],
)
def test_run_folders(tmp_path: Path, part: str) -> None:
    render.vega_bundle()  # made before the fork, and cached
    shutil.copytree(GOLDEN / "run", tmp_path / "runs" / "run", ignore=shutil.ignore_patterns("checkpoints"))
    path = tmp_path / "runs" / "run" / part

    def read(content: bytes, folder: Path) -> None:
        path.write_bytes(content)
        list_runs(tmp_path / "runs", diagnose=diagnose).to_dicts()
        found = read_run(Run(tmp_path / "runs" / "run"))
        if zlib.crc32(content) % 4 == 0:  # a page takes half a second
            report_page(found)

    check(
        read,
        [path.read_bytes()],
        tmp_path / f"run-{part.replace('/', '-')}",
        0.1,
        documents=documents_of(part),
    )


@pytest.mark.parametrize("part", ["model.safetensors", "model.json"])
def test_model_folders(tmp_path: Path, part: str) -> None:
    shutil.copytree(GOLDEN / "model", tmp_path / "model")
    read = write_and(lambda path: load_model(path.parent), part)
    check(
        read,
        [(tmp_path / "model" / part).read_bytes()],
        tmp_path / f"model-{part}",
        documents=documents_of(part),
    )


@pytest.mark.parametrize("part", ["model.safetensors", "model.json", "state.json", "training.safetensors"])
def test_checkpoints(tmp_path: Path, part: str) -> None:
    shutil.copytree(GOLDEN / "run" / "checkpoints" / "step-00001000", tmp_path / "step-00001000")
    seed = (tmp_path / "step-00001000" / part).read_bytes()
    name = tmp_path / "step-00001000" / part

    def read(content: bytes, folder: Path) -> None:
        name.write_bytes(content)
        load_checkpoint(tmp_path / "step-00001000")
        load_model(tmp_path / "step-00001000")
        assert content == seed or part == "state.json", "changed content was read"

    check(read, [seed], tmp_path / f"checkpoint-{part}", minimum_refused=0.5, documents=documents_of(part))


def test_exported_models(tmp_path: Path) -> None:
    """The archive has a checksum, so a damaged one is refused."""
    pytest.importorskip("onnxruntime", reason="exported models need the extra `export`")
    seed = (GOLDEN / "model.arcx").read_bytes()

    def read(content: bytes, folder: Path) -> None:
        (folder / "model.arcx").write_bytes(content)
        Decoder.load(folder / "model.arcx", warm=False)
        assert content == seed, "changed content was read"

    check(read, [seed], tmp_path / "arcx", minimum_refused=0.8)


def test_members_of_exported_models(tmp_path: Path) -> None:
    """Descriptions, graphs and tables of an archive whose checksum is valid."""
    pytest.importorskip("onnxruntime", reason="exported models need the extra `export`")
    archive = open_archive(GOLDEN / "model.arcx")
    members = {name: archive.bytes(name) for name in archive.members}
    names = sorted(members)

    def read(content: bytes, folder: Path) -> None:
        name = names[content[0] % len(names) if content else 0]
        write_archive(folder / "model.arcx", members | {name: content[1:]})
        Decoder.load(folder / "model.arcx", warm=False)

    seeds = [bytes([i]) + members[name] for i, name in enumerate(names)]
    check(read, seeds, tmp_path / "arcx-members")


# --- language models, lexicons, decodings, scores ---------------------------------------------------------------

ARPA = b"""\\data\\
ngram 1=5
ngram 2=4

\\1-grams:
-99 <s> -0.3
-0.9 </s>
-0.7 the -0.2
-0.8 sea -0.1
-1.2 <unk>

\\2-grams:
-0.2 <s> the
-0.3 the sea
-0.4 sea </s>
-0.6 the the

\\end\\
"""


def test_arpa(tmp_path: Path) -> None:
    check(write_and(read_third_party, "words.arpa"), [ARPA, gzip.compress(ARPA, mtime=0)], tmp_path / "arpa")


def write_sphinx() -> bytes:
    """A small 3-gram in the binary format of Sphinx: words, quantised values and pointers as bit fields."""
    words, counts = ["<s>", "</s>", "the", "sea"], [4, 3, 2]
    out = [b"Trie Language Model", bytes([3]), np.array(counts, "<u4").tobytes(), np.array([0], "<i4").tobytes()]
    out += [np.linspace(-3.0, -0.01, 2**16, dtype="<f4").tobytes()] * 3
    unigrams = np.zeros(5, [("prob", "<f4"), ("backoff", "<f4"), ("first", "<u4")])
    unigrams["prob"], unigrams["first"] = -1.0, [0, 1, 1, 2, 3]
    out.append(unigrams.tobytes())
    for fields, size in (
        ([(2, 9, 8, 0), (3, 7, 6, 1), (1, 5, 4, 2), (0, 0, 0, 2)], 37),
        ([(3, 9), (1, 3), (0, 0)], 19),
    ):
        bits = 0
        for i, row in enumerate(fields):
            value = row[0] | (row[1] << 16 | row[2]) << 3 | row[3] << 35 if len(row) == 4 else row[0] | row[1] << 3
            bits |= value << (i * size)
        out.append(bits.to_bytes((len(fields) * size + 7) // 8 + 8, "little"))
    blob = b"".join(word.encode() + b"\0" for word in words)
    return b"".join([*out, np.array([len(blob)], "<u4").tobytes(), blob])


def test_sphinx(tmp_path: Path) -> None:
    """The head and the tail are damaged; the tables of levels between them are numbers without structure."""
    seed = write_sphinx()
    head, tail = seed[:60], seed[60 + 3 * 2**18 - 20 :]
    levels = seed[60 : len(seed) - len(tail)]

    def read(content: bytes, folder: Path) -> None:
        cut = min(len(content), 60)
        (folder / "words.lm.bin").write_bytes(content[:cut] + levels + content[cut:])
        read_third_party(folder / "words.lm.bin")

    (tmp_path / "words.lm.bin").write_bytes(seed)
    assert read_third_party(tmp_path / "words.lm.bin").order == 3
    check(read, [head + tail], tmp_path / "sphinx")


def test_model_files(tmp_path: Path) -> None:
    seed = (GOLDEN / "words.alm").read_bytes()

    def read(content: bytes, folder: Path) -> None:
        (folder / "words.alm").write_bytes(content)
        model = open_model(folder / "words.alm")
        score_text(model, ["the television show starts at four"])
        check_model_file(folder / "words.alm")
        assert content == seed or _same_arrays(content, seed), "changed content was read"

    check(read, [seed], tmp_path / "alm", minimum_refused=0.5)


def _same_arrays(content: bytes, seed: bytes) -> bool:
    """Whether only the header differs, such as a name in the metadata."""
    length = int.from_bytes(seed[:8], "little")
    return content[:8] == seed[:8] and content[8 + length :] == seed[8 + length :]


def test_lexicons(tmp_path: Path) -> None:
    seed = b"the DH AH\nthe(2) DH IY\nsea S IY\n;;; comment\nhello HH AH L OW\n"
    check(write_and(read_lexicon, "lexicon.txt"), [seed], tmp_path / "lexicon")


def test_decodings(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"{SESSION}/test/{i:04d}", "session": SESSION, "text": "the sea", "score": -1.5, "lm": "words.alm",
            "in_lm_text": None, "reference": "the sea", "nbest": [
                {"text": "the sea", "score": -1.5, "acoustic": -1.0, "lm": -0.5},
                {"text": "this", "score": -3.5, "acoustic": -2.0, "lm": -1.5},
            ],
        }
        for i in range(3)
    ]  # fmt: skip

    def read(path: Path) -> None:
        failures = []
        for function in (read_decodings, read_texts):
            try:
                function(path)
            except UserError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    seed = "".join(json.dumps(row) + "\n" for row in rows).encode()
    check(write_and(read, "words.jsonl"), [seed], tmp_path / "decodings", documents=edited_jsonl)


def test_frame_scores(tmp_path: Path) -> None:
    seed = (GOLDEN / "scores.npz").read_bytes()
    small = io.BytesIO()
    logp = np.log(np.full((6, 41), 1 / 41, np.float32))
    np.savez(small, logp=logp, lengths=np.array([4, 2]), trials=np.array(["a", "b"]), classes=np.array(CLASSES))
    check(write_and(read_frames, "scores.npz"), [seed, small.getvalue()], tmp_path / "npz")


def test_arrays_in_archives(tmp_path: Path) -> None:
    """The arrays (.npy) inside an intact archive, which has no checksum error to stop at."""
    array = io.BytesIO()
    np.save(array, np.log(np.full((2, 41), 1 / 41, np.float32)))  # so small that its header is often hit

    def read(content: bytes, folder: Path) -> None:
        with zipfile.ZipFile(folder / "scores.npz", "w") as archive:
            archive.writestr("logp.npy", content)
            for name, known in (("lengths", np.array([2])), ("classes", np.array(CLASSES))):
                other = io.BytesIO()
                np.save(other, known)
                archive.writestr(f"{name}.npy", other.getvalue())
        read_frames(folder / "scores.npz")

    read(array.getvalue(), tmp_path)
    check(read, [array.getvalue()], tmp_path / "npy")


def write_logits(folder: Path) -> dict[str, bytes]:
    """The same two trials in every format of `read_frames`."""
    rng = np.random.default_rng(1)
    trials = [rng.normal(size=(n, 41)).astype(np.float32) for n in (5, 3)]
    texts = ["Yes.", "No."]
    np.save(folder / "scores.npy", np.concatenate(trials))
    (folder / "scores.json").write_text(json.dumps({"lengths": [5, 3], "trials": ["a", "b"], "texts": texts}))
    np.savez(folder / "scores.npz", logits=np.concatenate(trials), lengths=np.array([5, 3]), texts=np.array(texts))
    cells = np.empty((1, 2), dtype=object)
    cells[0, :] = trials
    scipy.io.savemat(folder / "scores.mat", {"logits": cells, "texts": np.array(texts, dtype=object)})
    (folder / "scores.pkl").write_bytes(pickle.dumps({"logits": trials, "cue_sentence": texts}, 4))
    return {p.suffix[1:]: p.read_bytes() for p in folder.glob("scores.*")}


@pytest.mark.parametrize("kind", ["npy", "json", "npz", "mat", "pkl"])
def test_logits(tmp_path: Path, kind: str) -> None:
    (tmp_path / "logits").mkdir()
    seeds = write_logits(tmp_path / "logits")
    read_frames(tmp_path / "logits" / f"scores.{'npy' if kind == 'json' else kind}")

    def read(content: bytes, folder: Path) -> None:
        (tmp_path / "logits" / f"scores.{kind}").write_bytes(content)
        read_frames(tmp_path / "logits" / f"scores.{'npy' if kind == 'json' else kind}")

    check(read, [seeds[kind]], tmp_path / f"logits-{kind}", documents=documents_of(kind))


def test_logits_of_other_shapes(tmp_path: Path) -> None:
    """Pickles whose entries have any type and nesting."""
    values = st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.just(np.zeros((2, 41), np.float32)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["logits", "texts", "x"]), inner),
    )
    keys = st.sampled_from(["logits", "cue_sentence", "decoded_phonemes_raw", "texts"])
    contents = (st.dictionaries(keys, values) | st.lists(st.dictionaries(keys, values), max_size=3)).map(pickle.dumps)
    fuzz(write_and(read_frames, "scores.pkl"), generated(contents), tmp_path / "logits-shapes").check(0.3)


# --- training logs -----------------------------------------------------------------------------------------------


def test_training_logs(tmp_path: Path) -> None:
    seeds = []
    made = log(falling(n=25), falling(n=25), falling(n=25))
    for name, write in DIALECTS.items():
        path = tmp_path / f"{name}{'.tfevents.1.host' if name == 'events' else ''}"
        write(made, path)
        seeds.append(path.read_bytes())
    check(write_and(diagnose, "log"), seeds, tmp_path / "logs")


def test_event_files(tmp_path: Path) -> None:
    DIALECTS["events"](log(falling(n=25), falling(n=25), falling(n=25)), tmp_path / "events.out.tfevents.1.host")
    seed = (tmp_path / "events.out.tfevents.1.host").read_bytes()
    (tmp_path / "events").mkdir()
    check(write_and(diagnose, "events.out.tfevents.1.host"), [seed], tmp_path / "events")


@pytest.mark.shared
def test_real_logs(shared: Path, tmp_path: Path) -> None:
    """Logs as the programs of other groups wrote them."""
    files = sorted(p for p in (shared / "real/logs/raw").rglob("*") if p.is_file() and p.stat().st_size < 40_000)
    seeds = {file.suffix: [f.read_bytes() for f in files if f.suffix == file.suffix] for file in files}
    for suffix, contents in seeds.items():
        read = write_and(diagnose, f"log{suffix}")
        check(read, contents, tmp_path / f"real{suffix}")


def test_texts(tmp_path: Path) -> None:
    """Text for the estimation of a language model, plain and gzipped, and text that is scored."""
    seed = b"the sea is calm\nthe ship has left the harbour\n\xc3\xa9t\xc3\xa9\n" * 3
    model = open_model(GOLDEN / "words.alm")

    def read(content: bytes, folder: Path) -> None:
        (folder / "text").write_bytes(content)
        score_text(model, read_sentences(folder / "text"))
        build_model([folder / "text"], folder / "new.alm", order=2)

    check(read, [seed, gzip.compress(seed, mtime=0)], tmp_path / "text")


# --- settings ------------------------------------------------------------------------------------------------------

RECIPE = (GOLDEN / "run" / "recipe.yaml").read_bytes()
SPACE = b"schedule.peak_lr: {low: 1.0e-4, high: 1.0e-2, log: true}\nencoder.width: {choices: [32, 64]}\n"


@pytest.mark.parametrize(
    ("name", "seed", "read"),
    [
        ("recipe", b"extends: tiny\ntrain: {steps: 20, seed: 1}\nschedule: {peak_lr: 0.003}\n", load_recipe),
        ("run-recipe", RECIPE, lambda path: run_recipe(Run(path.rename(path.with_name("recipe.yaml")).parent))),
        ("space", SPACE, lambda path: read_space(path, "tiny")),
        ("weights", (GOLDEN / "weights.yaml").read_bytes(), read_decoding_config),
        (
            "linear",
            b"weights:\n  acoustic: 1.0\n  lm: 0.5\nabout: {n: 3}\n",
            lambda p: read_weights(p, ["acoustic", "lm"]),
        ),
        ("yaml", b"a: [1, 2.5, true]\nb: {c: null, d: 2024-01-02}\ne: |\n  text\n", read_yaml),
        ("json", b'{"a": [1, 2.5, null], "b": {"c": "text"}}', read_json),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings(tmp_path: Path, name: str, seed: bytes, read: Callable[[Path], object]) -> None:
    documents = edited_json if name == "json" else edited_yaml if name != "yaml" else None
    write_and(read, f"{name}.yaml")(seed, tmp_path)
    check(write_and(read, f"{name}.yaml"), [seed], tmp_path / name, documents=documents)


@pytest.mark.parametrize("kind", ["yaml", "jsonl"])
def test_generated_text(tmp_path: Path, kind: str) -> None:
    """Small documents assembled from the marks of a format, which byte mutations rarely combine."""
    marks = {
        "yaml": ["a", "b: ", "- ", "\n", "  ", "&x ", "*x", "<<: ", "{", "}", "[", "]", ",", "!!int ", "!", "? ", ": ",
                 "|", ">", "'", '"', "#", "---\n", "...", "%", "1e9", "2024-13-01", "0x", "~", "@", "\t", "é", "\x85"],
        "jsonl": ["{", "}", "[", "]", '"id"', '"text"', '"nbest"', ": ", ", ", '"a/test/0001"', "1e999", "NaN", "null",
                  "-", "\n", '"\\ud800"', "true", '"', "[[[[[[", '{"text": "a", "score": -1}'],
    }[kind]  # fmt: skip
    rng = random.Random(7)
    inputs = ["".join(rng.choices(marks, k=rng.randrange(1, 25))).encode() for _ in range(cases())]
    reader = write_and(read_yaml if kind == "yaml" else read_decodings, f"file.{kind}")
    fuzz(reader, inputs, tmp_path / f"generated-{kind}").check(minimum_refused=0.2)


# --- pickles and checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickles(tmp_path: Path, protocol: int) -> None:
    content = {"a": np.arange(6.0).reshape(2, 3), "b": [np.float32(1.5), {"x": ("y", None)}], "c": {1, 2}}
    check(write_and(load_pickle, "args"), [pickle.dumps(content, protocol)], tmp_path, minimum_refused=0.1)


@pytest.mark.parametrize("is_zip", [True, False])
def test_checkpoints_of_others(tmp_path: Path, is_zip: bool) -> None:
    content = {"model_state_dict": {"h0": torch.ones(2, 3), "w": torch.ones(5)}, "val_PER": np.float64(0.1), "n": 3}
    torch.save(content, tmp_path / "seed", _use_new_zipfile_serialization=is_zip)
    read = write_and(load_torch_checkpoint, "weights")
    check(read, [(tmp_path / "seed").read_bytes()], tmp_path / "fuzz", minimum_refused=0.1)
