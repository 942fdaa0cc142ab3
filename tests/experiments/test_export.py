"""`arcuate export` on run folders, and the commands that accept an exported model."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import decode, export
from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import Statistics
from arcuate.data.store import Store
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.load import load
from arcuate.decoding.options import DecoderOptions, SearchOptions
from arcuate.errors import UserError
from arcuate.experiments.export import ExportResult, write_export
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.exported.file import open_export
from arcuate.live.bench import bench_live
from arcuate.live.input import Chunk, End, Mark
from arcuate.live.load import load_decoder
from arcuate.live.options import LiveOptions
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.io import load_model, save_model
from arcuate.models.model import Model, build_on_meta
from support.cli import assert_refused, one_object
from support.command import arcuate

GOLDEN = Path(__file__).parents[1] / "golden"
WORDS = {"lm": str(GOLDEN / "words.alm"), "lexicon": str(GOLDEN / "lexicon.txt")}
NO_WORDS = SearchOptions(lm="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the golden run, its store and its export."""
    target = tmp_path_factory.mktemp("golden")
    for name in ("run", "store", "words.alm", "lexicon.txt", "model.arcx"):
        source = GOLDEN / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target / name)  # type: ignore[operator]
    return target


def shipped_settings() -> dict[str, ModelSettings]:
    """The model of every packaged recipe; equal ones under the name of the first."""
    found: dict[str, ModelSettings] = {}
    for name in recipe_names():
        recipe = load_recipe(name)
        settings = ModelSettings(**{key: getattr(recipe, key) for key in ModelSettings.model_fields})
        if settings not in found.values():
            found[name] = settings
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", shipped_settings())
def test_every_packaged_recipe_exports_or_is_refused(tmp_path: Path, name: str) -> None:
    """At full width; few channels keep the file small."""
    torch.manual_seed(0)
    settings, path = shipped_settings()[name], tmp_path / "m.arcx"
    config = ModelConfig(settings=settings, n_channels=4, sessions=("a", "b"), classes=CLASSES)
    if not settings.encoder.causal:
        with pytest.raises(UserError, match="bidirectional"):
            write_export(path, build_on_meta(config), None)
        return
    model = Model(config).eval()
    write_export(path, model, None)
    bins = np.random.default_rng(0).normal(1.0, 2.0, (40, 4)).astype(np.float32)
    known = Statistics(bins.mean(0), bins.std(0), 100)
    exported = load(path).log_probs(bins, "b", known)
    expected = Decoder(TorchModel(model)).log_probs(bins, "b", known)
    np.testing.assert_allclose(exported, expected, rtol=0, atol=1e-4)


def test_the_command_describes_the_file(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.arcx"
    options = ("--lm", WORDS["lm"], "--lexicon", WORDS["lexicon"], "--int8", "--data", str(folder / "store"), "--json")
    result = one_object(arcuate("export", str(folder / "run"), str(target), *options).stdout)
    assert result["n_bytes"] == target.stat().st_size
    assert result["precision"] == "int8" and len(result["sessions"]) == 2 and result["n_words"] == 87
    assert result["int8"]["n_trials"] == 4
    assert result["int8"]["difference"] == pytest.approx(result["int8"]["per_int8"] - result["int8"]["per_fp32"])
    assert result["int8"]["acceptable"] and result["int8"]["measure"] == "PER"
    source = open_export(target).metadata.source
    assert source["run"] == "run" and len(source["recipe_hash"]) == 24


def test_a_model_that_int8_makes_worse_is_reported(folder: Path, tmp_path: Path) -> None:
    """The golden GRU with 80 more units that stay at zero, and large weights on one of them: nothing changes in fp32,
    but in int8 all other recurrent weights are rounded to zero."""
    narrow = load_model(GOLDEN / "run" / "checkpoints" / "best")
    n, width = narrow.config.settings.encoder.width, 96
    encoder = narrow.config.settings.encoder.model_copy(update={"width": width})
    settings = narrow.config.settings.model_copy(update={"encoder": encoder})
    wide = Model(narrow.config.model_copy(update={"settings": settings})).eval()
    gates = torch.cat([torch.arange(n) + gate * width for gate in range(3)])
    tensors = wide.state_dict()
    with torch.no_grad():
        for name, value in narrow.state_dict().items():
            tensor = tensors[name]
            if tensor.shape == value.shape:
                tensor.copy_(value)
            elif name.startswith("encoder.gru"):
                tensor.zero_()
                (tensor if tensor.ndim == 1 else tensor[:, : value.shape[1]])[gates] = value
            else:
                tensor.zero_()[..., :n] = value
        tensors["encoder.gru.weight_hh_l0"][:, -1] = 1e4
    save_model(tmp_path / "wide", wide)
    options = ("--lm", "none", "--int8", "--data", str(folder / "store"))
    command = ("export", str(tmp_path / "wide"), str(tmp_path / "m.arcx"), *options)
    found = one_object(arcuate(*command, "--json").stdout)["int8"]
    assert not found["acceptable"] and found["per_fp32"] + 0.02 < found["per_int8"]
    shown = arcuate(*command)
    assert shown.returncode == 0
    assert "int8 costs more than 0.2 points of PER here: export in fp32, without --int8" in shown.stdout
    original = export(folder / "run", tmp_path / "o.arcx", int8=True, search=NO_WORDS, data=folder / "store")
    assert isinstance(original, ExportResult) and original.int8 is not None and original.int8.is_acceptable
    assert original.int8.per_fp32 == pytest.approx(found["per_fp32"]) and "export in fp32" not in original.summary()


def test_one_session(folder: Path, tmp_path: Path) -> None:
    result = export(folder / "run", tmp_path / "m.arcx", session="t15.2023.08.11", search=NO_WORDS)
    assert isinstance(result, ExportResult)
    assert result.sessions == ("t15.2023.08.11",) and result.int8 is None
    assert Decoder.load(tmp_path / "m.arcx").sessions == result.sessions
    assert "session_weights.f32" not in open_export(tmp_path / "m.arcx").archive


def test_decode_gives_the_words_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    export("run", "tuned.arcx", search=SearchOptions(**WORDS, config=GOLDEN / "weights.yaml"))
    exported = decode("tuned.arcx", data="store")
    original = decode("run", SearchOptions(**WORDS, config=GOLDEN / "weights.yaml"), data="store")
    assert [t.text for t in exported] == [t.text for t in original]
    assert exported.search.lm == "words.alm" == original.search.lm


def test_a_trained_transducer_is_exported(folder: Path) -> None:
    export(GOLDEN / "run-ssm", folder / "ssm.arcx", search=SearchOptions(**WORDS))
    assert open_export(folder / "ssm.arcx").metadata.head == "both"
    run = shutil.copytree(GOLDEN / "run-ssm", folder / "run-ssm")
    for head in (None, "ctc", "transducer"):
        exported = decode(folder / "ssm.arcx", SearchOptions(head=head), data=folder / "store")
        original = decode(run, SearchOptions(**WORDS, head=head), data=folder / "store")
        assert exported.search.head == original.search.head
        assert [t.text for t in exported] == [t.text for t in original]
    export(run, folder / "ssm.arcx", search=SearchOptions(**WORDS, head="ctc"))
    assert "predictor.onnx" not in open_export(folder / "ssm.arcx").archive


def test_a_store_is_exported_to_nwb(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("pynwb", reason="pynwb is not installed")
    result = one_object(arcuate("export", folder / "store", tmp_path / "nwb", "--json").stdout)
    assert result["format"] == "nwb" and len(list((tmp_path / "nwb").glob("*.nwb"))) == len(result["files"]) > 0


def test_live_commands_accept_the_file(folder: Path) -> None:
    options = DecoderOptions(data=folder / "store")
    found = bench_live(folder / "model.arcx", seconds=12, real_time=False, options=options)
    assert found.timings.wall and found.n_lexicon_words == 87
    assert found.timings.correct_words_per_minute() is not None
    decoder = load_decoder(folder / "model.arcx", DecoderOptions(lm="none"))
    assert not decoder.decodes_words and decoder.adaptation is None


@pytest.mark.parametrize("words", [True, False], ids=["words", "phonemes, recorded"])
def test_the_live_server_decodes_with_the_file(folder: Path, tmp_path: Path, words: bool) -> None:
    pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
    from arcuate.live.serve import prepare_server
    from arcuate.live.server import page_info

    record: dict = {} if words else {"record": tmp_path / "record", "record_session": "t15.2023.08.11"}
    words_by = "default" if words else "none"
    options = LiveOptions(lm=words_by, data=folder / "store", port=0, speed=64.0, **record)
    server = prepare_server(folder / "model.arcx", options)
    server.listener.close()
    live = server.live
    assert page_info(live.session, None)["n_words"] == (87 if words else 0)
    finals: list[dict] = []
    done = threading.Event()

    def receive(event: object) -> None:
        if isinstance(event, dict) and event["type"] == "final":
            finals.append(event)
            done.set()

    live.session.subscribers.append(receive)
    store = Store.open(folder / "store")
    info = next(t for t in store.trials if t.split == "val" and t.session in live.session.decoder.sessions)
    live.session.start()
    live.session.put(Mark(info.id, info.session, info.text, store.block_statistics(info)))
    live.session.put(Chunk(store.read_bins(info)))
    live.session.put(End())
    assert done.wait(60)
    live.session.stop()
    expected = next(e for e in json.loads((GOLDEN / "export.json").read_text()) if e["id"] == info.id)
    if words:
        assert finals[0]["text"] == expected["text"]
        assert len(finals[0]["words"]) == len(finals[0]["confidences"]) > 0
    else:
        assert finals[0]["tokens"] == [CLASSES[token] for token in expected["tokens"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapt": True}, "which adapt cannot use"),
        ({"head": "both"}, "has no transducer"),
    ],
)
def test_options_that_need_the_run_are_refused(folder: Path, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_decoder(folder / "model.arcx", DecoderOptions(**options))


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    model = str(folder / "model.arcx")
    assert_refused(arcuate("decode", model), "give a store to decode with --data")
    assert_refused(arcuate("bench", "live", model, "--seconds", "1"), "give a store to replay with --data")
    assert_refused(arcuate("export", str(folder / "run"), str(tmp_path / "m.onnx")), "must end in .arcx")
    assert_refused(arcuate("export", str(folder / "run"), model, "--session", "t9"), "is unknown to this model")
    run, target = str(folder / "run"), str(tmp_path / "m.arcx")
    assert_refused(arcuate("export", run, target, "--lm", "none", "--data", str(folder / "store")), "trials for --int8")
    assert_refused(arcuate("export", run, target, "--lm", "none", "--int8", "--data", "none"), "no store at none")
    os.mkfifo(tmp_path / "pipe.arcx")
    assert_refused(arcuate("export", run, str(tmp_path / "pipe.arcx"), "--lm", "none"), "is not a regular file")
    assert not Path(target).exists()
    store = str(folder / "store")
    renamed = shutil.copy(model, tmp_path / "model.zip")
    assert arcuate("decode", str(renamed), "--data", store, "--json").returncode == 0
    text = tmp_path / "notes.arcx"
    text.write_text("notes")
    assert_refused(arcuate("export", str(folder / "run"), str(text), "--lm", "none"), "is not an earlier model.arcx")
    assert text.read_text() == "notes"
    assert_refused(arcuate("decode", str(text), "--data", str(folder / "store")), "damaged or not an exported model")
