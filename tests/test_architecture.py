"""Every arrow points down: a module imports what stands above it in docs/architecture.md, never below."""

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "arcuate"
LAYERS = [
    {"errors", "settings", "tokens", "text", "trial", "seeds", "frames", "letter_sounds", "moments", "days"},
    {"overrides", "outputs", "recipe_mistakes"},
    {"pronounce", "lm"},
    {"g2p"},
    {"lexicon"},
    {"readers", "simulate"},
    {"quality", "splits"},
    {"store"},
    {"store_writer"},
    {"prepare"},
    {"batches"},
    {"augment"},
    {"models"},
    {"losses", "decode", "unpickle"},
    {"foreign", "metrics", "paired"},
    {"word_scores"},
    {"tracking.settings", "training.settings", "training.guard_settings"},
    {"training.stage_settings", "training.stage_checks"},
    {"recipe"},
    {"recipe_diff", "recipe_settings", "run", "seeded"},
    {"combine"},
    {"rescore", "submit"},
    {"coupling", "runtime", "environment", "search_space"},
    {"training", "evaluate", "transcribe"},
    {"tune", "adapt", "calibrate"},
    {"tracking"},
    {"api", "report", "sweep"},
    {"doctor", "drift"},
    {"ledger"},
    {"ablate"},
    {"live"},
    {"cli"},
]


def layer(module: str) -> int:
    """The place of arcuate.<module> in the flow; the longest listed name counts."""
    parts = module.split(".")
    for n in (2, 1):
        for i, names in enumerate(LAYERS):
            if ".".join(parts[:n]) in names:
                return i
    raise AssertionError(
        f"arcuate.{module} has no place in the flow: add it to LAYERS and docs/architecture.md"
    )


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("arcuate."):
            found.add(node.module.removeprefix("arcuate."))
    return found


def test_modules_import_only_what_stands_above_them() -> None:
    wrong = []
    for path in SRC.rglob("*.py"):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        if name in ("__init__", "__main__"):
            continue
        wrong += [f"{name} imports {other}" for other in imports(path) if layer(other) > layer(name)]
    assert not wrong, wrong


def test_training_and_decoding_do_not_know_each_other() -> None:
    for folder, stranger in (("training", "decode"), ("decode", "training"), ("losses", "decode")):
        for path in (SRC / folder).glob("*.py"):
            assert not any(other.split(".")[0] == stranger for other in imports(path)), path
