"""Pages of the site that are generated: commands from `--help`, settings, the Python names, the changelog.

MkDocs calls these functions while it builds (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    for path, make in {
        "reference/commands.md": _commands,
        "reference/settings.md": _settings,
        "reference/python.md": _python,
        "reference/changelog.md": lambda: _relink((ROOT / "CHANGELOG.md").read_text("utf-8")),
    }.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The offline plugin loads a script from a network; the copy in assets/ is used instead."""
    return _local_script(output, page.url.count("/"))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    return _local_script(output_content, template_name.count("/"))


def _local_script(html: str, depth: int) -> str:
    return html.replace("https://unpkg.com/iframe-worker/shim", "../" * depth + "assets/iframe-worker.js")


def _relink(text: str) -> str:
    return re.sub(r"\]\(docs/", "](../", text)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _commands() -> str:
    from arcuate.cli.commands import GROUPS, make_app

    app = make_app()
    lines = ["# Commands", "", "Every command with its options, as printed by `arcuate COMMAND --help`.", "", app.help]
    for title, commands in GROUPS.items():
        lines += [f"## {title}", ""]
        for command in commands:
            found = app
            for word in command.name.split():
                found = found[word]
            lines += [f"### `arcuate {command.name}`", "", command.summary, "", "```sh"]
            lines += [f"arcuate {command.name} [OPTIONS] {command.positional.upper()}".strip(), "```", ""]
            if rows := [
                _option(argument)
                for argument in found.assemble_argument_collection(
                    default_parameter=app.default_parameter, parse_docstring=True
                )
                if argument.show
            ]:
                lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _option(argument: Any) -> str:
    """A row of the table for an option or argument."""
    default = argument.field_info.default
    shown = "" if default in (None, False, (), argument.field_info.empty) else f"`{default}`"
    return f"| `{' '.join(argument.names)}` | {_escape(argument.parameter.help or '')} | {shown} |"


def _settings() -> str:
    from arcuate.experiments.settings_page import to_markdown

    return to_markdown()


def _python() -> str:
    import arcuate

    lines = [
        "# Python",
        "",
        "The public names of `arcuate`, in the order of the workflow, and the types of their results. Names are",
        "imported on first use; none of the functions prints.",
        "",
    ]
    left = list(arcuate.__all__)
    results: dict[str, str] = {}
    for title, names in _PYTHON.items():
        lines += [f"## {title}", ""]
        for name in names or tuple(left):
            left.remove(name)
            found = getattr(arcuate, name)
            lines += [f"::: {found.__module__}.{name}", ""]
            results |= _result_types(found)
    lines += ["## Results", ""]
    for name, home in sorted(results.items()):
        if name not in arcuate.__all__:
            lines += [f"::: {home}.{name}", ""]
    return "\n".join(lines)


# Sections of the page; the last one lists all other names.
_PYTHON: dict[str, tuple[str, ...]] = {
    "Data": ("simulate", "prepare", "Store"),
    "Training": ("train", "Run", "load_recipe", "Recipe", "calibrate", "ProgressBar"),
    "Evaluation and decoding": ("evaluate", "decode", "load", "StreamingDecoder", "tune", "rescore", "combine"),
    "Diagnosis, comparison and charts": (
        "diagnose",
        "compare",
        "list_runs",
        "plot_curves",
        "write_report",
        "write_ledger",
    ),
    "Everything else": (),
}


def _result_types(function: Any) -> dict[str, str]:
    """The classes of this package that a function returns: name -> module."""
    if inspect.isclass(function):
        return {}
    annotation = get_type_hints(function).get("return")
    parts = [annotation, *get_args(annotation)]
    found = [p for p in parts if inspect.isclass(p) and p.__module__.startswith("arcuate.")]
    return {p.__name__: p.__module__ for p in found}
