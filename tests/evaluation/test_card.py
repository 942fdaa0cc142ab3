"""Model cards of runs, calibrated runs, imported models and exports."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from arcuate.config import parse_yaml
from arcuate.errors import UserError
from arcuate.evaluation.card import OWN_TEXT, card_metadata, exported_card, read_card, refresh_card, write_card
from arcuate.evaluation.decode import decode
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.train import train
from arcuate.run import Run

GOLDEN = Path(__file__).parents[1] / "golden"


def copied(name: str, folder: Path) -> Path:
    return shutil.copytree(GOLDEN / name, folder / name, symlinks=True)


def metadata(run: Path) -> dict:
    return card_metadata(read_card(run / "MODEL_CARD.md"), "the card")


def test_a_card_states_data_metrics_use_and_limits(tmp_path: Path) -> None:
    run = copied("run", tmp_path)
    result = write_card(run, licence="cc-by-4.0")
    text, facts = read_card(result.path), metadata(run)
    assert facts["license"] == "cc-by-4.0" and facts["library_name"] == "arcuate" and "gru" in facts["tags"]
    (entry,) = facts["model-index"][0]["results"]
    values = json.loads((run / "results/val.json").read_text("utf-8"))
    assert entry["dataset"]["revision"] == values["data_hash"] and entry["dataset"]["split"] == "val"
    (metric,) = entry["metrics"]
    assert metric["type"] == "per" and metric["value"] == pytest.approx(100 * values["per"], abs=1e-3)
    assert metric["args"]["interval_95"] == pytest.approx([100 * values["per_low"], 100 * values["per_high"]], abs=1e-3)
    for part in (
        "## Data",
        "## Intended use",
        "## Limits",
        "## References",
        values["data_hash"],
        "selected on this split",
    ):
        assert part in text
    assert json.dumps(result.to_dict())


def test_hugging_face_reads_the_metadata(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    run = copied("run", tmp_path)
    write_card(run, licence="mit")
    data = hub.ModelCard.load(run / "MODEL_CARD.md").data
    assert data.license == "mit" and data.model_name == "run"
    (result,) = data.eval_results
    assert result.metric_type == "per" and result.dataset_split == "val" and result.metric_args["n_trials"] == 4


def test_own_text_and_licence_are_kept(tmp_path: Path) -> None:
    run = copied("run", tmp_path)
    write_card(run, licence="mit")
    with (run / "MODEL_CARD.md").open("a", encoding="utf-8") as card:
        card.write("\n## Our lab\n\nWrite to us.\n")
    before = read_card(run / "MODEL_CARD.md")
    write_card(run)
    refresh_card(Run(run))
    assert read_card(run / "MODEL_CARD.md") == before and before.endswith("Write to us.\n")


def test_a_card_of_another_author_is_not_replaced(tmp_path: Path, messages: list[str]) -> None:
    run = copied("run", tmp_path)
    (run / "MODEL_CARD.md").write_text("# Mine\n", "utf-8")
    refresh_card(Run(run))
    assert read_card(run / "MODEL_CARD.md") == "# Mine\n" and "left as it is" in messages[0]
    with pytest.raises(UserError, match="add --force"):
        write_card(run)
    write_card(run, force=True)
    assert OWN_TEXT in read_card(run / "MODEL_CARD.md")


def test_simulated_data_are_marked(tmp_path: Path) -> None:
    run = copied("run", tmp_path)
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    environment["data"] |= {"simulated": True}
    (run / "environment.json").write_text(json.dumps(environment), "utf-8")
    assert write_card(run).simulated
    assert "simulated-data" in metadata(run)["tags"] and metadata(run)["datasets"] == ["simulated-b2t25"]
    assert "> **Simulated data.**" in read_card(run / "MODEL_CARD.md")


def test_calibrated_runs_and_imported_models(tmp_path: Path) -> None:
    run, model = copied("run-calibrated", tmp_path), copied("model", tmp_path)
    assert write_card(run).n_results == 1
    assert "held-out sentences of t15.2023.08.24" in read_card(run / "MODEL_CARD.md")
    assert write_card(model).n_results == 0 and "datasets" not in metadata(model)


def test_training_evaluation_and_decoding_write_the_card(cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ["encoder.width=8", "encoder.depth=1", "train.steps=3", "train.validate_every=3", "runtime.threads=1"]
    train("tiny", cohort_store, run, overrides=small)
    first = read_card(run / "MODEL_CARD.md")
    assert "Not evaluated yet. Lowest PER during training" in first and "simulated-data" in metadata(run)["tags"]
    assert str(tmp_path) not in first and str(cohort_store) not in first
    (run / "MODEL_CARD.md").unlink()  # killed before it was written
    train("tiny", cohort_store, run, overrides=small, resume=True)
    assert read_card(run / "MODEL_CARD.md") == first
    evaluate(run)
    assert [m["type"] for m in metadata(run)["model-index"][0]["results"][0]["metrics"]] == ["per"]
    decode(run, lm=GOLDEN / "words.alm", lexicon=GOLDEN / "lexicon.txt")
    assert metadata(run)["metrics"] == ["cer", "per", "wer"]


def test_an_export_contains_the_card(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="exporting needs the extra `export`")
    from arcuate.decoding.options import SearchOptions
    from arcuate.experiments.export import export

    run = copied("run", tmp_path)
    write_card(run, licence="mit")
    export(run, tmp_path / "model.arcx", search=SearchOptions(lm="none"))
    text = exported_card(tmp_path / "model.arcx")
    assert text is not None and text == read_card(run / "MODEL_CARD.md")
    assert exported_card(run) is None


@pytest.mark.parametrize("licence", ["MIT License", "", "a" * 61, "../x"])
def test_licences_that_are_not_identifiers(tmp_path: Path, licence: str) -> None:
    with pytest.raises(UserError, match="is not an identifier"):
        write_card(copied("run", tmp_path), licence=licence)


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    run = copied("run", tmp_path).rename(tmp_path / "a|b <script> ---")
    write_card(run)
    text = read_card(run / "MODEL_CARD.md")
    assert "<script>" not in text.split("---\n\n", 1)[1]
    assert isinstance(parse_yaml(text.split("---\n")[1]), dict)


def test_damaged_results_are_a_warning_after_training(tmp_path: Path, messages: list[str]) -> None:
    run = copied("run", tmp_path)
    (run / "results" / "test.json").write_text("{", "utf-8")
    refresh_card(Run(run))
    assert any("the model card was not written" in m for m in messages)


def test_a_run_without_a_checkpoint_gets_no_card(tmp_path: Path, messages: list[str]) -> None:
    run = copied("run", tmp_path)
    shutil.rmtree(run / "checkpoints")
    (run / "MODEL_CARD.md").unlink(missing_ok=True)
    refresh_card(Run(run))
    assert not messages and not (run / "MODEL_CARD.md").exists()


def test_metadata_that_are_not_a_mapping() -> None:
    for block in ("- a", "a: [", "!!python/object:os.system {}"):
        with pytest.raises(UserError, match="metadata"):
            card_metadata(f"---\n{block}\n---\n", "the card")
    assert card_metadata("# no metadata", "the card") == {}
    assert yaml.safe_load("a: 1") == card_metadata("---\na: 1\n---", "the card")
