import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from arcuate.config import inner_models, known_paths, to_yaml
from arcuate.errors import UserError
from arcuate.experiments.other_names import NAMES as OTHER_NAMES
from arcuate.experiments.recipe import DOCUMENTED_RUNS, RECIPE_GROUPS, Recipe, list_recipes, load_recipe, recipe_names
from arcuate.training.schedule import learning_rate


def test_every_packaged_recipe_loads_and_survives_its_own_yaml(tmp_path) -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        (tmp_path / "again.yaml").write_text(to_yaml(recipe))
        assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_overrides_set_nested_values() -> None:
    recipe = load_recipe(
        "tiny", ["train.steps=1e4", "optimizer.eps=1e-3", "data.sessions=[a, b]", "train.clip_norm=null"]
    )
    assert recipe.train.steps == 10_000
    assert recipe.optimizer.eps == 1e-3
    assert recipe.data.sessions == ("a", "b")
    assert recipe.train.clip_norm is None


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("train.stepz=3", "train.stepz", "train.steps"),
        ("encoder.widht=3", "encoder.widht", "encoder.width"),
        ("trian.steps=3", "trian", "train"),
        ("schedule.peek_lr=3", "schedule.peek_lr", "schedule.peak_lr"),
        ("data.batching.batchsize=3", "data.batching.batchsize", "data.batching.batch_size"),
        ("optimizer.clip_norm=3", "optimizer.clip_norm", "train.clip_norm"),
    ],
)
def test_an_unknown_key_is_rejected_with_the_nearest_known_one(override: str, path: str, hint: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_recipe("tiny", [override])
    assert f"'{path}'" in str(refusal.value)
    assert f"'{hint}'" in str(refusal.value)


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=0",
        "train.steps=many",
        "encoder.dropout=1.5",
        "optimizer.eps=0",
        "schedule={kind: warmup_cosine, peak_lr: 0.1, warmup_steps: 99999}",
        "nonsense",
        "=3",
        "encoder=3",
        "encoder.kind=lstm",
        "train.clip_norm=.nan",
    ],
)
def test_values_out_of_range_are_rejected_with_a_message(override: str) -> None:
    with pytest.raises(UserError):
        load_recipe("tiny", [override])


@pytest.mark.parametrize(
    "override",
    ["encoder.width=true", "train.seed=false", "loss.intermediate.layers=[true]"],
)
def test_a_boolean_is_not_accepted_as_a_number(override: str) -> None:
    with pytest.raises(UserError, match="expected a value, got true or false"):
        load_recipe("tiny", [override])


def test_a_key_of_another_kind_is_not_suggested_to_itself() -> None:
    with pytest.raises(UserError, match=r"different schedule\.kind"):
        load_recipe("tiny", ["schedule.kind=constant", "schedule.peak_lr=0.1", "schedule.min_lr=0.01"])


def test_a_dotted_path_in_a_file_is_answered_with_the_nested_form(tmp_path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: tiny\nencoder.width: 16\n")
    with pytest.raises(UserError, match=r"encoder: \{width: …\}"):
        load_recipe(str(path))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="b2t25-gru"):
        load_recipe("b2t25_gru")


@pytest.mark.parametrize("text", ["", "- a", "a: [", "\x00", "a: &a [*a]"])
def test_files_that_are_not_recipes_are_rejected(tmp_path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError):
        load_recipe(str(tmp_path / "r.yaml"))


def test_extends_states_only_differences(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: tiny\ntrain: {steps: 5, log_every: 1}\n")
    recipe, parent = load_recipe(str(tmp_path / "mine.yaml")), load_recipe("tiny")
    assert recipe.name == "mine"
    assert recipe.encoder == parent.encoder
    assert recipe.train.clip_norm == parent.train.clip_norm


def test_a_setting_given_twice_is_rejected(tmp_path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "extends: tiny\nschedule: {kind: constant, peak_lr: 1}\nschedule: {kind: linear, peak_lr: 1, min_lr: 0}\n"
    )
    with pytest.raises(UserError, match="'schedule' is given twice"):
        load_recipe(str(path))


def numbers(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, list[Any]]]:
    """Every setting that is a number: its path, its kind, and what limits it."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        for inner in inner_models(field.annotation):
            yield from numbers(inner, f"{path}.")
        for annotation, limits in leaves(field.annotation, list(field.metadata)):
            if annotation in (int, float):
                yield path, annotation, limits


def leaves(annotation: Any, limits: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        more = [m for extra in parts[1:] for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        yield from leaves(parts[0], [*limits, *more])
    elif origin in (typing.Union, types.UnionType, tuple, list):
        for part in parts:
            yield from leaves(part, limits)
    else:
        yield annotation, limits


def test_every_number_has_a_range() -> None:
    found = list(numbers(Recipe))
    assert len(found) > 80
    endless = [
        path
        for path, _, limits in found
        if not all(any(hasattr(limit, n) for limit in limits for n in names) for names in (("ge", "gt"), ("le", "lt")))
    ]
    assert not endless


def test_official_25_learning_rates_are_exact() -> None:
    """Warm-up from zero, peak after 1,000 steps, floor at 120,000 and beyond."""
    recipe = load_recipe("b2t25-gru")
    rates = [learning_rate(recipe.schedule, s, recipe.train.steps) for s in (0, 1, 500, 1000, 60500, 120000, 130000)]
    assert rates == pytest.approx([0.0, 5e-6, 2.5e-3, 5e-3, (5e-3 + 1e-4) / 2, 1e-4, 1e-4], rel=1e-12)


def test_official_settings() -> None:
    """The published numbers, typed a second time on purpose."""
    new, old = load_recipe("b2t25-gru"), load_recipe("b2t24-gru")
    assert (new.optimizer.kind, new.optimizer.eps, new.optimizer.betas) == ("adamw", 0.1, (0.9, 0.999))
    assert new.optimizer.weight_decay.model_dump() == {"weights": 1e-3, "biases": 0.0, "session_layers": 0.0}
    assert (new.augment.white_noise_sd, new.augment.offset_sd, new.augment.random_cut) == (1.0, 0.2, 3)
    assert (new.data.batching.n_sessions, new.data.batching.n_trials, new.train.clip_norm) == (4, 16, 10.0)
    assert new.loss.ctc.reduction == "sum_per_trial" and not new.loss.ctc.zero_infinity
    assert (old.optimizer.kind, old.optimizer.eps, old.schedule.peak_lr) == ("adam", 0.1, 0.02)
    assert old.optimizer.weight_decay.model_dump() == dict.fromkeys(("weights", "biases", "session_layers"), 1e-5)
    assert (old.augment.white_noise_sd, old.augment.offset_sd, old.train.clip_norm) == (0.8, 0.2, None)
    assert old.loss.ctc.reduction == "mean_per_token" and old.loss.ctc.zero_infinity
    assert isinstance(new, Recipe)


def test_recipes_are_listed_by_group() -> None:
    entries = list_recipes()
    groups = list(dict.fromkeys(entry.group for entry in entries))
    assert groups == list(RECIPE_GROUPS) and sorted(e.name for e in entries) == sorted(recipe_names())
    laptop = {entry.name for entry in entries if entry.group == groups[0]}
    assert laptop == {"tiny", "tiny-best", "tiny-transformer", "mode-ssm-small"}
    assert all("diary" not in e.name or e.group == DOCUMENTED_RUNS for e in entries)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("lrStart=0.001", "schedule.kind=constant schedule.peak_lr=0.001"),
        ("whiteNoiseSD=0.8", "augment.white_noise_sd=0.8"),
        ("use_amp=true", "train.precision.kind=bf16"),
        ("use_amp=false", "train.precision.kind=fp32"),
        ("l2_decay=1e-5", "weights: 1.0e-05"),
        ("augment.time_mask_width=15", "augment.time_masks.max_bins=15"),
        ("flow_bridge.enabled=true", "denoiser.enabled=true"),
        ("training.optimizer.lr=0.00005", "schedule.peak_lr=5.0e-05"),
        ("training.gradient_accumulation_steps=4", "train.accumulate=4"),
        ("data.data_root=data/raw", "arcuate prepare makes of data/raw"),
    ],
)
def test_settings_of_other_trainers_are_answered_with_ours(given: str, ours: str) -> None:
    with pytest.raises(UserError, match="here it is") as refusal:
        load_recipe("tiny", [given])
    assert ours in str(refusal.value)


def test_every_answer_is_a_setting() -> None:
    known = known_paths(Recipe)
    answers = [text for ours in OTHER_NAMES.values() for text in (ours if isinstance(ours, tuple) else (ours,))]
    named = {path for text in answers for path in re.findall(r"([a-z_]+(?:\.[a-z_]+)+)=", text)}
    assert len(named) > 40 and not named - known


def test_purpose_and_target_belong_to_one_recipe(tmp_path: Path) -> None:
    run = load_recipe("diary-run11")
    assert "plateau" in run.purpose and run.target.per == 0.3
    (tmp_path / "mine.yaml").write_text("extends: diary-run11\n")
    mine = load_recipe(tmp_path / "mine.yaml")
    assert (mine.purpose, mine.target.rates, mine.notes) == ("", {}, "")
    assert mine.schedule == run.schedule
