"""Do the tests notice faults? Seeded mutations of functions that two trees share, each judged by its package's tests.

    python benchmarks/mutations.py --tree OLD --tree NEW [--n 60] [--seed 0] [--minutes 6]

A mutation changes one comparison, operator, constant or condition of a function whose code is the same in all trees.
It counts as caught if `pytest -x` on the tests of the package fails in a copy of the tree; a run that exceeds its time
limit counts as not caught. With one --tree, the functions of that tree are mutated.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}


@dataclass(frozen=True)
class Mutation:
    package: str
    function: str
    code: str  # the function before the mutation, as ast.unparse writes it
    number: int  # which of its mutable places

    def __str__(self) -> str:
        return f"{self.package}.{self.function}, place {self.number}"


def functions(tree: Path) -> Iterator[tuple[str, str, str, Path]]:
    """Package, name and code of every function and method below src/arcuate."""
    root = tree / "src" / "arcuate"
    for path in sorted(root.rglob("*.py")):
        package = path.relative_to(root).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield package, node.name, ast.unparse(node), path


def places(node: ast.AST) -> list[tuple[ast.AST, str, int | None]]:
    """Fields that can be mutated: (owner, field, index in a list of operators)."""
    found: list[tuple[ast.AST, str, int | None]] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Compare):
            found += [(inner, "ops", i) for i, op in enumerate(inner.ops) if type(op) in SWAPS]
        elif isinstance(inner, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(inner.op) in SWAPS:
            found.append((inner, "op", None))
        elif isinstance(inner, ast.Constant) and type(inner.value) in (bool, int, float):
            found.append((inner, "value", None))
    return found


def mutate(code: str, number: int) -> str:
    tree = ast.parse(code)
    owner, field, index = places(tree)[number]
    old = getattr(owner, field)
    if field == "value":
        setattr(owner, field, not old if isinstance(old, bool) else old + 1)
    elif index is None:
        setattr(owner, field, SWAPS[type(old)]())
    else:
        old[index] = SWAPS[type(old[index])]()
    return ast.unparse(tree)


def choose(trees: Sequence[Path], n: int, seed: int) -> list[Mutation]:
    """Mutations of functions that all trees contain with the same code, spread over the packages of the last tree."""
    names = [{(name, code) for _, name, code, _ in functions(tree)} for tree in trees]
    shared = set.intersection(*names)
    by_package: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for package, name, code, _ in functions(trees[-1]):
        if (name, code) in shared and places(ast.parse(code)):
            by_package[package].append((name, code))
    generator = random.Random(seed)
    chosen: list[Mutation] = []
    while len(chosen) < n and by_package:
        for package in sorted(by_package):
            name, code = by_package[package].pop(generator.randrange(len(by_package[package])))
            chosen.append(Mutation(package, name, code, generator.randrange(len(places(ast.parse(code))))))
            if not by_package[package]:
                del by_package[package]
    return chosen[:n]


class Replace(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.unparse(node) == self.mutation.code:
            return ast.parse(mutate(self.mutation.code, self.mutation.number)).body[0]
        return self.generic_visit(node)


def is_caught(tree: Path, mutation: Mutation, minutes: float) -> bool:
    """Whether the tests of the package that has the function fail with the mutation, in a copy of the tree."""
    package, path = next((p, f) for p, n, c, f in functions(tree) if (n, c) == (mutation.function, mutation.code))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "data", "node_modules"))
        target = copy / path.relative_to(tree)
        module = ast.parse(target.read_text("utf-8"))
        target.write_text(ast.unparse(Replace(mutation).visit(module)), "utf-8")
        tests = [p for p in (f"tests/{package}", f"tests/test_{package}.py") if (copy / p).exists()]
        command = [str(tree / ".venv/bin/python"), "-m", "pytest", "-x", "-q", *(tests or ["tests"])]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", required=True)
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=6, help="time limit of one test run")
    given = parser.parse_args()
    trees = [tree.resolve() for tree in given.tree]
    rows = []
    for mutation in choose(trees, given.n, given.seed):
        caught = [is_caught(tree, mutation, given.minutes) for tree in trees]
        rows.append({"mutation": str(mutation), "caught": caught})
        print(*("caught" if c else "NOT   " for c in caught), mutation, flush=True)
    for tree, results in zip(trees, zip(*(row["caught"] for row in rows), strict=True), strict=True):
        print(f"{tree}: {sum(results)} of {len(results)} caught")


if __name__ == "__main__":
    main()
