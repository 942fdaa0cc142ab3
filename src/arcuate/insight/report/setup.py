"""How the run was made: recipe, command, data and machine."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.insight.report.evidence import Evidence, lookup
from arcuate.insight.report.markup import MISSING, Html, count, counted, join, pairs, split_name, table, tag

TITLES = {
    "data": "Data",
    "front_end": "Front end",
    "encoder": "Encoder",
    "transducer": "Transducer",
    "augment": "Augmentation",
    "loss": "Loss",
    "optimizer": "Optimizer",
    "schedule": "Learning rate",
    "session_schedule": "Learning rate of session layers",
    "train": "Training",
    "validate": "Validation",
    "runtime": "Runtime",
}
MAX_SETTINGS = 400


def recipe_section(evidence: Evidence) -> Html:
    """The recipe by component, what differs from the packaged one, and the whole of it as text."""
    if not evidence.recipe_text:
        return tag("p", "This folder has no recipe.yaml.", class_="absent")
    recipe = evidence.recipe
    head = [
        tag("p", str(recipe[key]))
        for key in ("summary", "notes")
        if isinstance(recipe.get(key), str) and recipe[key]
    ]
    cards = [
        tag("section", tag("h3", TITLES.get(key, key)), pairs(list(settings(value))), class_="card")
        for key, value in list(recipe.items())[:40]
        if isinstance(value, Mapping)
    ]
    yaml_text = tag(
        "details", tag("summary", "The complete recipe as YAML"), tag("pre", evidence.recipe_text)
    )
    return join([*head, differences(recipe), tag("div", *cards, class_="cards"), yaml_text])


def settings(tree: Any) -> Iterator[tuple[str, str]]:
    for path, value in islice(flat(tree), MAX_SETTINGS):
        yield path.replace(".", " · ").replace("_", " "), worded(value)


def flat(tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted paths and their values."""
    if not isinstance(tree, Mapping) or depth > 8:
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def worded(value: Any, depth: int = 0) -> str:
    if value is None:
        return MISSING
    if depth > 2:
        return "…"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(worded(v, depth + 1) for v in value[:12])
        return shown + (f", … ({len(value)})" if len(value) > 12 else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {worded(v, depth + 1)}" for k, v in islice(value.items(), 12))
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return str(value)[:300]


def differences(recipe: Mapping[str, Any]) -> Html:
    """Settings that differ from the packaged recipe this one is, or extends."""
    base = next((str(recipe[k]) for k in ("name", "extends") if recipe.get(k) in recipe_names()), None)
    if base is None:
        return Html()
    try:
        packaged = dict(flat(to_tree(load_recipe(base))))
    except UserError:
        return Html()
    mine = dict(islice(flat(recipe), MAX_SETTINGS))
    rows: list[tuple[object, ...]] = [
        (path, worded(packaged.get(path)), worded(mine.get(path)))
        for path in sorted({*packaged, *mine})
        if packaged.get(path) != mine.get(path) and path not in ("name", "extends", "summary", "notes")
    ]
    if not rows:
        return tag("p", "Every setting is as in the packaged recipe ", tag("code", base), ".")
    return join(
        [
            tag("p", f"{counted(len(rows), 'setting')} unlike the packaged recipe ", tag("code", base), ":"),
            tag("div", table(("setting", "packaged", "this run"), rows[:MAX_SETTINGS]), class_="scroll"),
        ]
    )


def environment_section(evidence: Evidence) -> Html:
    """Data, program versions and machine, and the command that started the run."""
    env = evidence.environment
    if not env:
        return tag("p", "This folder has no environment.json.", class_="absent")
    data = [
        ("path", worded(lookup(env, "data.path"))),
        ("layout", worded(lookup(env, "data.layout"))),
        ("channels", worded(lookup(env, "data.n_channels"))),
        ("sessions", str(len(evidence.sessions)) if evidence.sessions else MISSING),
        ("manifest", worded(lookup(env, "data.manifest_hash"))),
    ]
    model = [
        ("parameters", count(env.get("n_parameters"))),
        ("checkpoint chosen on", split_name(evidence.selected_on) if evidence.selected_on else MISSING),
        ("started", worded(env.get("started"))),
    ]
    known = {"data", "n_parameters", "started", "command", "selected_on"}
    machine = [(str(k).replace("_", " "), worded(v)) for k, v in env.items() if k not in known][:30]
    cards = [
        tag("section", tag("h3", title), pairs([(k, v) for k, v in rows]), class_="card")
        for title, rows in (("Data", data), ("Run", model), ("Machine", machine))
    ]
    command = env.get("command")
    words = " ".join(str(w) for w in command) if isinstance(command, list) else str(command or "")
    started = [tag("p", "Started with"), tag("pre", words[:4000])] if words else []
    return join([tag("div", *cards, class_="cards"), *started])
