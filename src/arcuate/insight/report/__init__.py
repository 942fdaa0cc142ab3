"""One self-contained HTML page per run, made from the files of its folder alone."""

from arcuate.insight.report.page import write_report

__all__ = ["write_report"]
