"""`arcuate report`."""

from pathlib import Path

from arcuate.cli.console import emit_json, out
from arcuate.insight.report import write_report
from arcuate.run import open_run


def report_command(path: Path, split: str | None, as_json: bool) -> None:
    written = write_report(open_run(path), split)
    if as_json:
        emit_json({"report": str(written)})
    else:
        out.print(f"{written}", soft_wrap=True, markup=False)
