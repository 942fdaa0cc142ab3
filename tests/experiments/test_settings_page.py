"""docs/settings.md agrees with the settings classes."""

from pathlib import Path

from arcuate.config import known_paths
from arcuate.experiments.recipe import Recipe, list_components, load_recipe, recipe_names, to_markdown
from support.cli import one_object
from support.forking import arcuate

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_committed_page_is_the_generated_one() -> None:
    result = "docs/settings.md is out of date: arcuate recipes settings > docs/settings.md"
    assert PAGE.read_text("utf-8") == to_markdown(), result


def test_the_command_prints_the_page_and_the_same_as_json() -> None:
    assert arcuate("recipes", "settings").stdout == to_markdown()
    rows = one_object(arcuate("recipes", "settings", "--json").stdout)["settings"]
    (steps,) = [row for row in rows if row["path"] == "train.steps"]
    assert (steps["type"], steps["default"]) == ("integer", "`1000`")
    assert (
        "≥ 1" in steps["range"]
        and steps["meaning"] == type(load_recipe("tiny").train).model_fields["steps"].description
    )


def test_every_setting_is_listed_with_a_description() -> None:
    settings = [setting for part in list_components() for setting in part.settings]
    listed = {setting.path for setting in settings}
    leaves = {p for p in known_paths(Recipe) if not any(q.startswith(f"{p}.") for q in known_paths(Recipe))}
    assert listed == leaves
    assert [setting.path for setting in settings if not setting.meaning] == []


def test_settings_that_recipes_use_are_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    for name in recipe_names():
        for section in load_recipe(name).model_fields_set - {"extends"}:
            assert f"`{section.rstrip('_')}" in page, section
