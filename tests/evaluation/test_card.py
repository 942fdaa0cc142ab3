"""Model cards of runs, calibrated runs, imported models and exports; references of a run."""

import json
import shutil
from pathlib import Path

import pytest

from arcuate.config import parse_yaml
from arcuate.errors import UserError
from arcuate.evaluation.card import card_metadata, exported_card, read_card, run_card, write_card
from arcuate.evaluation.cite import cite
from arcuate.run import Run

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return copied("run", tmp_path)


def copied(name: str, folder: Path) -> Path:
    return shutil.copytree(GOLDEN / name, folder / name, symlinks=True)


def metadata(run: Path) -> dict:
    return card_metadata(read_card(run / "MODEL_CARD.md"), "the card")


def test_a_card_states_data_metrics_use_and_limits(run: Path) -> None:
    result = write_card(run, run / "MODEL_CARD.md", licence="cc-by-4.0")
    text, facts = read_card(result.path), metadata(run)
    assert facts["license"] == "cc-by-4.0" and facts["library_name"] == "arcuate" and "gru" in facts["tags"]
    (entry,) = facts["model-index"][0]["results"]
    values = json.loads((run / "results/val.json").read_text("utf-8"))
    assert entry["dataset"]["revision"] == values["data_hash"] and entry["dataset"]["split"] == "val"
    (metric,) = entry["metrics"]
    assert metric["type"] == "per" and metric["value"] == pytest.approx(100 * values["per"], abs=1e-3)
    assert metric["args"]["interval_95"] == pytest.approx([100 * values["per_low"], 100 * values["per_high"]], abs=1e-3)
    sections = ("Results", "Data", "Training", "Intended use", "Limits", "Use", "References")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(sections)
    assert values["data_hash"] in text and "selected on this split" in text and json.dumps(result.to_dict())
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    data = hub.ModelCard.load(run / "MODEL_CARD.md").data
    assert data.license == "cc-by-4.0" and data.model_name == "run"
    assert data.eval_results[0].metric_args["n_trials"] == 4


def test_a_card_in_the_run_folder_is_the_users(run: Path) -> None:
    assert "license: mit" in run_card(Run(run), licence="mit")
    write_card(run, run / "MODEL_CARD.md", licence="mit")
    with (run / "MODEL_CARD.md").open("a", encoding="utf-8") as card:
        card.write("\n## Our lab\n\nWrite to us.\n")
    assert run_card(Run(run)).endswith("Write to us.\n")
    with pytest.raises(UserError, match="states the licence 'mit'"):
        run_card(Run(run), licence="cc-by-4.0")
    with pytest.raises(UserError, match="exists; edit it"):
        write_card(run, run / "MODEL_CARD.md")


def test_simulated_data_are_marked_and_need_no_reference(run: Path) -> None:
    real = cite(run)
    assert [r.reason for r in real.references][:3] == ["software", "data", "ctc"]
    assert "dryad.dncjsxm85" in real.references[1].reference
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    environment["data"] |= {"simulated": True}
    (run / "environment.json").write_text(json.dumps(environment), "utf-8")
    assert write_card(run, run / "MODEL_CARD.md").simulated
    assert "simulated-data" in metadata(run)["tags"] and metadata(run)["datasets"] == ["simulated-b2t25"]
    assert "> **Simulated data.**" in read_card(run / "MODEL_CARD.md")
    assert "simulated" in cite(run).note and "data" not in {r.reason for r in cite(run).references}


def test_calibrated_runs_and_imported_models(tmp_path: Path) -> None:
    run, model = copied("run-calibrated", tmp_path), copied("model", tmp_path)
    assert write_card(run, run / "MODEL_CARD.md").n_results == 1
    assert "held-out sentences of t15.2023.08.24" in read_card(run / "MODEL_CARD.md")
    assert write_card(model, model / "MODEL_CARD.md").n_results == 0 and "datasets" not in metadata(model)


def test_an_export_contains_the_card(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="exporting needs the extra `export`")
    from arcuate.decoding.options import SearchOptions
    from arcuate.experiments.export import export

    export(run, tmp_path / "model.arcx", search=SearchOptions(lm="none"))
    assert exported_card(tmp_path / "model.arcx") == run_card(Run(run))
    assert exported_card(run) is None
    export(tmp_path / "model.arcx", tmp_path / "card.md")
    assert read_card(tmp_path / "card.md") == exported_card(tmp_path / "model.arcx")


@pytest.mark.parametrize("licence", ["MIT License", "", "a" * 61, "../x"])
def test_licences_that_are_not_identifiers(run: Path, licence: str) -> None:
    with pytest.raises(UserError, match="is not an identifier"):
        write_card(run, run / "MODEL_CARD.md", licence=licence)


def test_names_with_markup_stay_text(run: Path, tmp_path: Path) -> None:
    run = run.rename(tmp_path / "a|b <script> ---")
    write_card(run, run / "MODEL_CARD.md")
    text = read_card(run / "MODEL_CARD.md")
    assert "<script>" not in text.split("---\n\n", 1)[1]
    assert isinstance(parse_yaml(text.split("---\n")[1]), dict)


@pytest.mark.parametrize("block", ["- a", "a: [", "!!python/object:os.system {}"])
def test_metadata_that_are_not_a_mapping(block: str) -> None:
    with pytest.raises(UserError, match="metadata"):
        card_metadata(f"---\n{block}\n---\n", "the card")
