"""Every packaged recipe builds and takes steps: official ones at full size, all others at reduced width."""

from pathlib import Path

import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.experiments.train import train
from arcuate.models.config import ModelConfig
from arcuate.models.model import count_parameters
from arcuate.run import Run
from arcuate.training.environment import PrecisionChoice
from support.cli import one_object
from support.command import arcuate

OFFICIAL = {
    "b2t25-gru": ("b2t25", 256),
    "b2t24-gru": ("b2t24", 128),
    "b2t25-transformer": ("b2t25", 256),
    "b2t24-transformer": ("b2t24", 128),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OFFICIAL)
def test_official_recipes_take_two_steps_at_full_size(name: str, tmp_path: Path) -> None:
    layout, electrodes = OFFICIAL[name]
    source, store, run = (tmp_path / n for n in ("source", "store", "run"))
    size = ["--layout", layout, "--sessions", "2", "--trials", "8", "--electrodes", electrodes]
    assert arcuate("simulate", source, *size).returncode == 0
    assert one_object(arcuate("prepare", source, store, "--json").stdout)["sessions"]
    batch = (
        ["data.batching.n_sessions=1", "data.batching.n_trials=2"]
        if name == "b2t25-gru"
        else ["data.batching.batch_size=2"]
    )
    done = arcuate("train", name, "--data", store, "--run", run, "train.steps=2", "train.log_every=1", *batch, "--json")
    assert done.returncode == 0, done.stderr
    result = one_object(done.stdout)
    per_session = {512: 512 * 513, 256: 256 * 257}[2 * electrodes]
    published = {
        "b2t25-gru": 44_315_177 - 43 * per_session,
        "b2t24-gru": 133_845_033 - 22 * per_session,
        "b2t25-transformer": 9_674_985,
        "b2t24-transformer": 9_378_537,
    }
    assert result["steps"] == 2
    assert result["n_parameters"] == published[name] or "encoder.width=256" in batch


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_builds_on_the_meta_device(name: str) -> None:
    recipe = load_recipe(name)
    size = recipe.data.size
    config = ModelConfig(
        settings=recipe.model,
        n_channels=size.n_channels,
        sessions=tuple(map(str, range(size.n_sessions))),
        classes=CLASSES,
    )
    assert count_parameters(config) > 100_000


def small(name: str) -> list[str]:
    """Overrides that make a recipe quick."""
    recipe = load_recipe(name)
    heads = ["encoder.n_heads=2"] if recipe.encoder.kind == "transformer" else []
    batch = "data.batching.n_trials=2" if recipe.data.batching.kind == "sessions" else "data.batching.batch_size=4"
    return ["encoder.width=16", "data.release=null", "data.workers=0", "train.log_every=1", *heads, batch]


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_steps_at_reduced_width(name: str, cohort_store: Path, tmp_path: Path) -> None:
    assert train(name, cohort_store, tmp_path / "run", overrides=[*small(name), "train.steps=2"]).steps == 2


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("name", ["b2t25-gru", "b2t24-gru", "b2t24-transformer", "mode-ssm", "mode-ssm-small"])
def test_recipes_step_in_mixed_precision(
    name: str, layers: bool, cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device that is fast at it: the same steps in bf16, and weights that stay near those of fp32."""
    monkeypatch.setattr("arcuate.experiments.train.choose_precision", lambda given, *_: PrecisionChoice(given.kind))
    loss, chosen = {}, f"front_end.session_layer.enabled={str(layers).lower()}"
    for kind in ("fp32", "bf16"):
        changed = [*small(name), "train.steps=3", chosen, f"train.precision.kind={kind}"]
        assert train(name, cohort_store, tmp_path / kind, overrides=changed).steps > 0
        run = Run(tmp_path / kind)
        assert run.environment()["precision"] == kind
        loss[kind] = [row["loss"] for row in run.metrics() if row["split"] == "train"]
    assert loss["bf16"] == pytest.approx(loss["fp32"], rel=0.05) and loss["bf16"] != loss["fp32"]
