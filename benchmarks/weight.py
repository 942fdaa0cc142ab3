"""Size of the project: source, settings, options, commands, public names, tests, documentation, benchmarks.

    python benchmarks/weight.py [--root FOLDER] [--details] [--json]

Everything is counted from the files, the recipes and the commands; --root counts the files of another
work tree (settings and commands are those of the package that this Python imports).
"""

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radon.complexity import cc_visit
from radon.visitors import Class

LIMITS = {
    "source lines": 39_000,
    "source characters": 1_760_000,
    "source files": 225,
    "longest file": 600,
    "page assets, lines": 2_836,
    "settings": 130,
    "options": 150,
    "commands": 24,
    "public names": 32,
    "functions with more than 8 parameters": 0,
    "functions over complexity 20": 10,
    "test lines": 21_500,
    "words of documentation": 30_000,
    "benchmark lines": 4_200,
}
AT_LEAST = {"comments and docstrings, %": 12}


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def n_lines(paths: list[Path]) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in paths)


def commented_lines(text: str) -> int:
    """Lines that hold a comment or belong to a docstring."""
    lines = {t.start[0] for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def complex_functions(paths: list[Path], limit: int = 20) -> list[str]:
    """Functions and methods whose cyclomatic complexity, as radon counts it, exceeds `limit`."""
    found = set()
    for path in paths:
        for block in cc_visit(path.read_text("utf-8")):
            functions = block.methods if isinstance(block, Class) else [block]
            found |= {f"{path}:{f.lineno} {f.name} {f.complexity}" for f in functions if f.complexity > limit}
    return sorted(found)


def setting_names() -> set[str]:
    """Dotted names of all settings in the packaged recipes, inherited values and defaults included."""
    from arcuate.experiments.recipe import load_recipe, recipe_names

    return {leaf for name in recipe_names() for leaf in _leaves(load_recipe(name).model_dump(by_alias=True), "")}


def _leaves(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name


def commands_and_options() -> tuple[list[str], list[str]]:
    """Commands, a group counting as one, and the options of all of them without --help, --json and --version."""
    from arcuate.cli.commands import COMMANDS, make_app

    app, options = make_app(), ["--allow-code", "--slurm"]
    for name in COMMANDS:
        command = app
        for word in name.split():
            command = command[word]
        names = [
            argument.name
            for argument in command.assemble_argument_collection(
                default_parameter=app.default_parameter, parse_docstring=True
            )
        ]
        options += [f"{name} {option}" for option in names if option.startswith("--")]
    return sorted({name.split()[0] for name in COMMANDS}), options


def long_signatures(paths: list[Path], limit: int = 8) -> list[str]:
    """Public functions with more than `limit` parameters; `callbacks`, `progress`, `on_...`, `stop` do not count."""
    found = []
    for path in paths:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                counted = [
                    n for n in names if n not in ("callbacks", "progress", "stop", "self") and not n.startswith("on_")
                ]
                if len(counted) > limit:
                    found.append(f"{path}:{node.lineno} {node.name} {len(counted)}")
    return found


def documentation(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def measure(root: Path) -> dict[str, float]:
    import arcuate

    package = root / "src" / "arcuate"
    source = python_files(package)
    texts = [path.read_text("utf-8") for path in source]
    commands, options = commands_and_options()
    assets = [p for ending in ("html", "css", "js", "txt") for p in package.rglob(f"*.{ending}")]
    words = sum(len(path.read_text("utf-8").split()) for path in documentation(root))
    return {
        "source lines": n_lines(source),
        "source characters": sum(map(len, texts)),
        "source files": len(source),
        "comments and docstrings, %": round(100 * sum(map(commented_lines, texts)) / n_lines(source), 1),
        "longest file": max(text.count("\n") for text in texts),
        "page assets, lines": n_lines(assets),
        "settings": len(setting_names()),
        "options": len(options),
        "commands": len(commands),
        "public names": len(arcuate.__all__),
        "functions with more than 8 parameters": len(long_signatures(source)),
        "functions over complexity 20": len(complex_functions(source)),
        "test lines": n_lines(python_files(root / "tests")),
        "words of documentation": words,
        "benchmark lines": n_lines(python_files(root / "benchmarks")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--details", action="store_true", help="also name what is counted one by one, and package sizes"
    )
    given = parser.parse_args()
    measured = measure(given.root)
    if given.json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        limit = LIMITS.get(name)
        target = f"at least {AT_LEAST[name]}" if name in AT_LEAST else f"at most {limit:,}"
        kept = value >= AT_LEAST[name] if name in AT_LEAST else limit is not None and value <= limit
        print(f"{name:40}{value:>12,}   {target:22}{'' if kept else 'missed'}")
    if given.details:
        package = given.root / "src" / "arcuate"
        for folder in sorted(p for p in package.iterdir() if p.is_dir() and python_files(p)):
            print(f"{folder.name:20}{n_lines(python_files(folder)):>8,} lines{len(python_files(folder)):>5} files")
        print(*complex_functions(python_files(package)), *long_signatures(python_files(package)), sep="\n")


if __name__ == "__main__":
    main()
