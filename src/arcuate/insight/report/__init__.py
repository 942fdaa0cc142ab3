"""The report: one self-contained HTML page per run, built from the files of its folder."""

from arcuate.insight.report.page import write_report

__all__ = ["write_report"]
