"""`write_report`: the sections of the report in reading order."""

from collections.abc import Iterator
from pathlib import Path

from arcuate.files import read_jsonl, write_text
from arcuate.insight.pages.markup import Html, Section, join, page, tag
from arcuate.insight.report.calibration import calibration_section, read_calibration
from arcuate.insight.report.confusions import confusions_section
from arcuate.insight.report.decodings import decodings_section
from arcuate.insight.report.headline import evaluation_hint, headline, other_results
from arcuate.insight.report.learning_curves import learning_curves
from arcuate.insight.report.run_data import RunData, read_run_data
from arcuate.insight.report.sessions import sessions_section
from arcuate.insight.report.setup import environment_section, recipe_section
from arcuate.insight.report.trial import trial_section
from arcuate.run import Run, open_run


def write_report(run: Run | str | Path, split: str | None = None) -> Path:
    """Write report.html into a run folder and return its path.

    `split` selects results/<split>.jsonl; by default the first scored one of val, test, dev and train is shown.
    """
    if not isinstance(run, Run):
        run = open_run(Path(run))
    write_text(run.report_file, report_page(read_run_data(run, split)))
    return run.report_file


def report_page(data: RunData) -> str:
    version = data.environment.get("arcuate")
    trained_with = f" (trained with version {version})" if version else ""
    footer = f"Written by arcuate from the files of the run folder{trained_with}."
    return page(f"{data.run.name} · arcuate report", headline(data), list(_sections(data)), footer)


def _sections(data: RunData) -> Iterator[Section]:
    if (calibration := read_calibration(data.run)) is not None:
        yield "calibration", "Calibration", calibration_section(calibration)
    yield "learning", "Learning curves", join([learning_curves(data), _incidents(data)])
    if data.results is None:
        yield "results", "Results", join([evaluation_hint(data), other_results(data)])
    else:
        yield "sessions", "Error rate by session", join([sessions_section(data), other_results(data)])
        yield "confusions", "Phoneme confusions", confusions_section(data)
        yield "trial", "Example trial", trial_section(data)
        yield "decodings", "Example decodings", decodings_section(data)
    yield "recipe", "Recipe", recipe_section(data)
    yield "environment", "Data and machine", environment_section(data)


def _incidents(data: RunData, n_shown: int = 12) -> Html:
    """Interventions of the guard during training, if there were any."""
    file = data.run.incidents_file
    rows = read_jsonl(file, growing=True) if file.exists() else []
    if not rows:
        return Html()
    items = [tag("li", ", ".join(f"{k} {v}" for k, v in row.items())[:300]) for row in rows[:n_shown]]
    if len(rows) > n_shown:
        items.append(tag("li", f"… and {len(rows) - n_shown} more in {file.name}"))
    return tag("div", tag("h3", "Incidents"), tag("ul", *items), class_="notice")
