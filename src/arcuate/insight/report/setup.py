"""How the run was made: recipe, command, data and machine."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.insight.pages.formatting import MISSING, count, split_name
from arcuate.insight.pages.markup import Html, definition_list, join, muted, scroll_table, tag
from arcuate.insight.report.run_data import RunData, lookup
from arcuate.progress import counted

_TITLES = {
    "augment": "Augmentation",
    "ema": "EMA",
    "schedule": "Learning rate",
    "session_schedule": "Learning rate of session layers",
    "swa": "SWA",
    "track": "Tracking",
    "train": "Training",
    "validate": "Validation",
}
_MAX_SETTINGS = 400


def recipe_section(data: RunData) -> Html:
    """The settings by component, the differences from the packaged recipe, and the complete YAML."""
    if not data.recipe_text:
        return muted("This folder has no recipe.yaml.")
    recipe = data.recipe
    head = [
        tag("p", str(recipe[key])) for key in ("summary", "notes") if isinstance(recipe.get(key), str) and recipe[key]
    ]
    cards = [
        tag(
            "section",
            tag("h3", _TITLES.get(key, key.replace("_", " ").capitalize())),
            definition_list(_settings(value)),
            class_="card",
        )
        for key, value in list(recipe.items())[:40]
        if isinstance(value, Mapping)
    ]
    yaml_text = tag("details", tag("summary", "The complete recipe as YAML"), tag("pre", data.recipe_text))
    return join(*head, _differences(recipe), tag("div", *cards, class_="cards"), yaml_text)


def _settings(tree: Any) -> Iterator[tuple[str, str]]:
    for path, value in islice(_flatten(tree), _MAX_SETTINGS):
        yield path.replace(".", " · ").replace("_", " "), _value_text(value)


def _flatten(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted paths and their values."""
    if not isinstance(tree, Mapping) or depth > 8:
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def _value_text(value: Any, depth: int = 0) -> str:
    if value is None:
        return MISSING
    if depth > 2:
        return "…"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_value_text(v, depth + 1) for v in value[:12])
        return shown + (f", … ({len(value)})" if len(value) > 12 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_value_text(v, depth + 1)}" for k, v in islice(value.items(), 12))
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return str(value)[:300]


def _differences(recipe: Mapping[str, Any]) -> Html:
    """Settings that differ from the packaged recipe that this one is or extends."""
    base = next((str(recipe[k]) for k in ("name", "extends") if recipe.get(k) in recipe_names()), None)
    if base is None:
        return Html()
    try:
        packaged = dict(_flatten(to_tree(load_recipe(base))))
    except UserError:
        return Html()
    own = dict(islice(_flatten(recipe), _MAX_SETTINGS))
    rows = [
        (path, _value_text(packaged.get(path)), _value_text(own.get(path)))
        for path in sorted({*packaged, *own})
        if packaged.get(path) != own.get(path) and path not in ("name", "extends", "summary", "notes")
    ]
    if not rows:
        return tag("p", "All settings are those of the packaged recipe ", tag("code", base), ".")
    verb = "differs" if len(rows) == 1 else "differ"
    lead = tag("p", f"{counted(len(rows), 'setting')} {verb} from the packaged recipe ", tag("code", base), ":")
    return join(lead, scroll_table(("setting", "packaged", "this run"), rows[:_MAX_SETTINGS]))


def environment_section(data: RunData) -> Html:
    """Data, versions and machine, and the command that started the run."""
    environment = data.environment
    if not environment:
        return muted("This folder has no environment.json.")
    store = [
        ("path", _value_text(lookup(environment, "data.path"))),
        ("layout", _value_text(lookup(environment, "data.layout"))),
        ("channels", _value_text(lookup(environment, "data.n_channels"))),
        ("sessions", str(len(data.sessions)) if data.sessions else MISSING),
        ("manifest", _value_text(lookup(environment, "data.manifest_hash"))),
    ]
    model = [
        ("parameters", count(environment.get("n_parameters"))),
        ("checkpoint selected on", split_name(data.selected_on) if data.selected_on else MISSING),
        ("started", _value_text(environment.get("started"))),
    ]
    shown = {"data", "n_parameters", "started", "command", "selected_on"}
    machine = [(str(k).replace("_", " "), _value_text(v)) for k, v in environment.items() if k not in shown]
    cards = [
        tag("section", tag("h3", title), definition_list(rows), class_="card")
        for title, rows in (("Data", store), ("Run", model), ("Machine", machine[:30]))
    ]
    words = environment.get("command")
    command = " ".join(str(w) for w in words) if isinstance(words, list) else str(words or "")
    started = [tag("p", "Command"), tag("pre", command[:4000])] if command else []
    return join(tag("div", *cards, class_="cards"), *started)
