"""Damaged files of other labs and programs: NWB, CSV folders, model cards."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from arcuate.data import watched
from arcuate.data.export import export_data
from arcuate.data.prepare import prepare
from arcuate.data.store import Store
from arcuate.data.text import text_to_tokens
from arcuate.evaluation.card import card_metadata, describe_run, run_card, write_card
from arcuate.run import Run
from support.fuzzing import damaged, fuzz
from support.recordings import FakeTrial, noise, write_hdf5

GOLDEN = Path(__file__).parents[1] / "golden"
EXAMPLES = Path(__file__).parents[2] / "examples"
SESSION = "t15.2023.08.11"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A small NWB file."""
    pytest.importorskip("pynwb", reason="pynwb is not installed")
    write_hdf5(tmp_path / "source" / SESSION / "data_train.hdf5", [FakeTrial(noise(20, 4, seed=i)) for i in range(3)])
    prepare(tmp_path / "source", tmp_path / "prepared")
    return export_data(tmp_path / "prepared", tmp_path / "nwb").files[0]


def _prepare(path: Path, folder: Path, layout: str) -> None:
    prepare(path.parent, folder / "store", layout=layout, force=True)
    assert Store.open(folder / "store").find_changed() == []


def test_nwb(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CPU_SECONDS", 2.0)
    seed = exported.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        exported.write_bytes(content)
        _prepare(exported, folder, "nwb")

    fuzz(read, damaged([seed], 0.25), tmp_path / "fuzz").check()


@pytest.mark.parametrize("part", ["sentences.csv", "0.csv"])
def test_csv_folders(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of `examples/my_reader`, with a damaged table or damaged bins of a trial."""
    monkeypatch.setattr(watched, "CPU_SECONDS", 2.0)
    monkeypatch.syspath_prepend(EXAMPLES / "my_reader")
    path = tmp_path / "csv" / SESSION / "train" / part
    path.parent.mkdir(parents=True)
    for number in range(3):
        np.savetxt(path.with_name(f"{number}.csv"), noise(12, 4, seed=number), delimiter=",", fmt="%.4g")
    rows = [f'{number}.csv,{number},"hello, you"\n' for number in range(3)]
    path.with_name("sentences.csv").write_text("".join(["file,block,text\n", *rows]), "utf-8")
    seed = path.read_bytes()
    text_to_tokens("hello")  # loads the pronunciations, which children then share

    def read(content: bytes, folder: Path) -> None:
        path.write_bytes(content)
        _prepare(path.parents[1], folder, "my_reader:CsvFolder")

    fuzz(read, damaged([seed], 0.25), tmp_path / f"csv-{part}").check()


def test_cards(tmp_path: Path) -> None:
    """A damaged card is refused or taken as it is."""
    run = shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True)
    card = write_card(run, run / "MODEL_CARD.md", licence="mit").path
    seed = card.read_bytes() + b"\n## Ours\n\ntext\n"

    def read(content: bytes, folder: Path) -> None:
        card.write_bytes(content)
        assert run_card(Run(run)) == content.decode("utf-8")

    fuzz(read, damaged([seed]), tmp_path / "cards").check(0.02)


@pytest.mark.parametrize("part", ["model.json", "recipe.yaml", "environment.json", "results/val.json"])
def test_cards_of_damaged_runs(part: str, tmp_path: Path) -> None:
    run = shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True)
    path = run / "checkpoints" / "best" / part if part == "model.json" else run / part
    seed = path.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        path.write_bytes(content)
        card_metadata(describe_run(Run(run)), "the card")

    fuzz(read, damaged([seed]), tmp_path / f"card-of-{path.name}").check()
