"""The page: sections in the order a reader asks for them, one file, no scripts, nothing loaded."""

from collections.abc import Iterator
from pathlib import Path

from arcuate.files import read_jsonl, write_text
from arcuate.insight.report.confusion import confusion
from arcuate.insight.report.curves import curves
from arcuate.insight.report.decodings import decodings
from arcuate.insight.report.evidence import Evidence, gather
from arcuate.insight.report.headline import commands, headline, others_table
from arcuate.insight.report.markup import POLICY as POLICY
from arcuate.insight.report.markup import Html, document, join, tag
from arcuate.insight.report.raster import raster
from arcuate.insight.report.sessions import calibration, calibration_of, sessions
from arcuate.insight.report.setup import environment_section, recipe_section
from arcuate.run import Run


def write_report(run: Run, split: str | None = None) -> Path:
    """Write the report of a run beside its files; `split` None shows the most telling results there are."""
    write_text(run.report_file, page(gather(run, split)))
    return run.report_file


def page(evidence: Evidence) -> str:
    parts = list(sections(evidence))
    links = [tag("a", title, href=f"#{key}") for key, title, _ in parts]
    bodies = [tag("section", tag("h2", title), body, id=key) for key, title, body in parts]
    version = evidence.environment.get("arcuate")
    made = "Written by arcuate from the files of the run folder" + (
        f" (run with version {version})" if version else ""
    )
    body = join(
        [
            headline(evidence),
            tag("nav", *links, aria_label="Sections"),
            tag("main", *bodies),
            tag("footer", made, "."),
        ]
    )
    return document(f"{evidence.run.name} · arcuate report", body)


def sections(evidence: Evidence) -> Iterator[tuple[str, str, Html]]:
    """Anchor, title and content."""
    if (told := calibration_of(evidence.run)) is not None:
        yield "calibration", "Calibration", calibration(told)
    yield "learning", "Learning curves", join([curves(evidence), incidents(evidence)])
    if evidence.results is None:
        yield "results", "Results", join([commands(evidence), others_table(evidence)])
    else:
        yield "sessions", "Error rate by session", join([sessions(evidence), others_table(evidence)])
        yield "confusions", "Phoneme confusions", confusion(evidence)
        yield "trial", "One trial", raster(evidence)
        yield "decodings", "Example decodings", decodings(evidence)
    yield "recipe", "Recipe", recipe_section(evidence)
    yield "environment", "Data and machine", environment_section(evidence)


def incidents(evidence: Evidence, n_shown: int = 12) -> Html:
    """What went wrong in training, if anything did."""
    path = evidence.run.incidents_file
    rows = read_jsonl(path, growing=True) if path.exists() else []
    if not rows:
        return Html()
    lines = [tag("li", ", ".join(f"{k} {v}" for k, v in row.items())[:300]) for row in rows[:n_shown]]
    more = tag("li", f"… and {len(rows) - n_shown} more in {path.name}") if len(rows) > n_shown else None
    return tag("div", tag("h3", "Incidents"), tag("ul", *lines, more), class_="notice")
