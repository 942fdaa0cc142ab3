"""What the commands for data, recipes, language models and components print."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from arcuate.cli.console import Given, counted, out, percent, print_table, say

if TYPE_CHECKING:
    from arcuate.data.prepare import PrepareReport
    from arcuate.data.quality import Leakage
    from arcuate.data.simulation.cohort import Simulation
    from arcuate.data.store import Store
    from arcuate.experiments.recipe import RecipeComparison, RecipeDescription
    from arcuate.exported.check_encoder import EncoderCheck
    from arcuate.language.ngram.perplexity import TextScore
    from arcuate.models.import_checkpoint import ImportResult

_MAX_LISTED = 5  # skipped files listed one by one; quality.csv lists all
_ACTIONS = {
    "rejected": "excluded from training",
    "flagged": "validation or test: flagged and kept",
    "kept": "note; kept",
    "ignored": "not recognised; ignored",
    "missing": "could not be read",
}
_SMALL_VOCABULARY = 20_000  # the packaged model has 73,000 words


@dataclass(frozen=True)
class Listing:
    """Text to print, and the values that --json prints."""

    text: str
    values: dict[str, Any]

    def summary(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return self.values


# --- Data ----------------------------------------------------------------------------------------------------


def simulate(result: "Simulation", given: Given) -> None:
    n_trials = counted(sum(result.trials.values()), "trial")
    sessions = counted(len(result.sessions), "session")
    say(f"{n_trials} in {sessions}, {result.n_electrodes} electrodes, difficulty {result.difficulty}: {result.path}")


def report_of(store: "Store", given: Given) -> "PrepareReport":
    return store.report


def prepare(report: "PrepareReport", given: Given) -> None:
    if not report.written:
        _print_files(report)
    _print_splits(report)
    _print_leakage(report.leakage)
    if cases := Counter((row.reason, row.action) for row in report.quality):
        rows = [(reason, str(n), _ACTIONS[action]) for (reason, action), n in cases.most_common()]
        print_table(("case", "trials", "action"), rows, title="quality", right=("trials",))
    if not report.written:
        if report.release:
            checks = [(c.what, c.found, c.expected, "differs" if c.differs else "ok") for c in report.release]
            print_table(("property", "found", "published", "status"), checks, title="release")
        if report.mapping is not None:
            _print_mapping(report.mapping)
    store = given.get("store")
    print_summary(report, None if store is None else Path(store))


def print_summary(report: "PrepareReport", store: Path | None) -> None:
    """Size of the store in one line, after notes and skipped files."""
    from arcuate.data.store import QUALITY_FILE

    for note in report.notes:
        say(note)
    for rows, verb in ((report.rows("ignored"), "ignored"), (report.unreadable, "could not read")):
        for row in rows[:_MAX_LISTED]:
            say(f"{verb} {row.trial}: {row.detail}")
        if len(rows) > _MAX_LISTED:
            say(f"{verb} {len(rows) - _MAX_LISTED} more")
    channels = counted(report.n_channels, "channel")
    size = f"{counted(report.trials, 'trial')} in {counted(len(report.sessions), 'session')}, {channels}"
    if not report.written or store is None:
        out.print(f"{report.layout}: {size}; nothing was written", soft_wrap=True)
        return
    cases = f"; {counted(len(report.quality), 'case')} in {store / QUALITY_FILE}" if report.quality else ""
    out.print(f"{report.layout}: {size} → {store}{cases}", soft_wrap=True, markup=False)


def _print_mapping(mapping: Mapping[str, Any]) -> None:
    """The mapping of NWB files as YAML, to save, edit and pass as --layout FILE.yaml."""
    import yaml

    lines = yaml.safe_dump(dict(mapping), sort_keys=False, allow_unicode=True).splitlines()
    out.print("\n".join(["mapping (save it as a .yaml file, edit it, and pass it as --layout)", *lines]), markup=False)


def leakage_line(leakage: "Leakage") -> str:
    """Leakage between the splits in one line."""
    recordings = counted(sum(leakage["trials"].values()), "recording")
    texts = ", ".join(
        f"{overlap['n']} of {overlap['of']} {pair.replace(' in ', ' sentences in ')}"
        for pair, overlap in leakage["texts"].items()
        if overlap["share"] is not None
    )
    return f"leakage: {recordings} in two splits; {texts or 'no sentences to compare'}"


def _print_files(report: "PrepareReport") -> None:
    from arcuate.data.trial import SPLITS

    rows = []
    for session in report.sessions:
        counts = (report.files.get(f"{session}/{split}") for split in SPLITS)
        rows.append((session, *("–" if n is None else str(n) for n in counts)))
    print_table(("session", *SPLITS), rows, right=SPLITS)


def _print_splits(report: "PrepareReport") -> None:
    from arcuate.data.trial import BIN_SECONDS

    rows = []
    for split, counts in report.splits.items():
        hours = f"{counts['n_bins'] * BIN_SECONDS / 3600:.2f}" if "n_bins" in counts else "–"
        usable = str(counts.get("usable", "–"))
        rows.append((split, str(counts["trials"]), usable, hours, report.hashes.get(split, "–")[:12]))
    print_table(("split", "trials", "usable", "hours", "hash"), rows, right=("trials", "usable", "hours"))


def _print_leakage(leakage: "Leakage") -> None:
    rows = [(f"same recording in {pair.replace('-', ' and ')}", str(n), "") for pair, n in leakage["trials"].items()]
    for pair, overlap in leakage["texts"].items():
        share = percent(overlap["share"]) if overlap["share"] is not None else "no texts"
        rows.append((f"sentences of {pair}", str(overlap["n"]), share))
    print_table(("leakage", "n", "share"), rows, right=("n", "share"))


# --- Recipes -------------------------------------------------------------------------------------------------


def list_recipes(*, all_: bool = False) -> Listing:
    """List the packaged recipes by group.

    Args:
        all_: Also list recipes that reproduce documented runs.
    """
    from arcuate.experiments.recipe import list_recipes

    return Listing("", {"recipes": list_recipes()})


def recipes(listing: Listing, given: Given) -> None:
    from arcuate.experiments.recipe import DOCUMENTED_RUNS, RECIPE_GROUPS

    for group in RECIPE_GROUPS:
        members = [entry for entry in listing.values["recipes"] if entry.group == group]
        if group == DOCUMENTED_RUNS and not given.get("all_"):
            say(f"{len(members)} recipes of {group} are not listed; add --all")
            continue
        rows = [(entry.name, entry.extends or "", entry.summary or "") for entry in members]
        print_table(("recipe", "extends", "summary"), rows, title=group)


def recipe(described: "RecipeDescription", given: Given) -> None:
    from rich.syntax import Syntax

    from arcuate.config import to_yaml

    size = f"{described.n_sessions} sessions × {described.n_channels} channels"
    text = to_yaml(described.recipe) + f"# {described.n_parameters:,} parameters at {size}"
    if out.is_terminal:
        out.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:  # unwrapped, so that the output can be used as a recipe
        out.print(text, markup=False, soft_wrap=True)


def recipe_changes(comparison: "RecipeComparison", given: Given) -> None:
    from arcuate.config import value_text

    rows = [(c.path, value_text(c.before), value_text(c.after)) for c in comparison.changes]
    if rows:
        print_table(("setting", comparison.a, comparison.b), rows, fold=True)
    else:
        out.print(f"no setting differs between {comparison.a} and {comparison.b}", markup=False)
    for warning in comparison.warnings:
        out.print(f"\nwarning: {warning}", markup=False)


def list_settings() -> Listing:
    from arcuate.experiments import settings_page

    return Listing(settings_page.to_markdown().removesuffix("\n"), {"settings": settings_page.list_settings()})


# --- Language models -----------------------------------------------------------------------------------------


def model(result: Any, given: Given) -> None:
    """Print names and values, and a hint if the model is small."""
    table = Table(box=None, show_header=False)
    for key, value in result.to_dict().items():
        parts = {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
        for name, item in parts.items():
            if item is not None:
                table.add_row(Text(name), Text(_format(item)))
    out.print(table)
    if "texts" in given and result.info.n_words < _SMALL_VOCABULARY:
        say(
            f"with {result.info.n_words:,} words this is a poor model of English alone; interpolate it with the"
            f" packaged one: arcuate lm mix {given['path']} default MIXED --tune HELD_OUT.txt"
        )


def perplexity(result: "TextScore", given: Given) -> None:
    out.print(f"perplexity {_format(result.perplexity)}, with unknown words {_format(result.perplexity_with_oov)}")
    words = f"{result.n_words:,} words in {result.n_sentences:,} sentences"
    out.print(f"{words}, {result.n_oov:,} unknown ({percent(result.oov_rate)})")
    if result.oov_words:
        out.print("unknown: " + " ".join(result.oov_words), markup=False, soft_wrap=True)
    if result.n_in_training_text:
        out.print(
            f"{result.n_in_training_text:,} of the sentences are in the model's training text; perplexity of the"
            f" others {_format(result.perplexity_unseen)}"
        )


def _format(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_format(item) for item in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- Components ----------------------------------------------------------------------------------------------


def imported(result: "ImportResult", given: Given) -> None:
    if result.ignored:
        say(f"ignored {counted(len(result.ignored), 'unused tensor')}, such as {result.ignored[0]}")
    sizes = {"parameter": result.n_parameters, "channel": result.n_channels, "session": len(result.sessions)}
    size = ", ".join(counted(n, noun) for noun, n in sizes.items())
    out.print(f"{result.model}: {size}", soft_wrap=True, markup=False)


def new(kind: Literal["encoder", "reader", "recipe"], name: str, *, folder: Path = Path()) -> Listing:
    """Write a working skeleton.

    Args:
        kind: encoder, reader or recipe.
        name: Name of the package or recipe, such as my_encoder.
        folder: Folder to write it to.
    """
    from arcuate.experiments.new import new

    written = [str(path) for path in new(kind, name, folder)]
    component = name.replace("_", "-")
    following = {
        "encoder": f"pip install -e {folder / name} && arcuate new check {component}",
        "reader": f"pip install -e {folder / name} && arcuate prepare SOURCE STORE --layout {component}",
        "recipe": f"arcuate train {folder / name}.yaml --data STORE --run RUN",
    }
    return Listing("\n".join([*(f"wrote {path}" for path in written), f"next: {following[kind]}"]), {"files": written})


def encoder_check(result: "EncoderCheck", given: Given) -> None:
    words = {True: "passed", False: "FAILED", None: "–"}
    print_table(("property", "result", "detail"), [(c.name, words[c.passed], c.detail) for c in result.checks])
    verdict = "all checks passed" if result.passed else "some checks failed; see the table"
    say(f"{result.kind}, {counted(result.n_parameters, 'parameter')} in the test model: {verdict}")
