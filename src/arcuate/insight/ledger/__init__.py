"""The ledger: the list of runs in a folder with their verdicts and changes, and the run diary."""

from arcuate.insight.ledger.diary import write_ledger
from arcuate.insight.ledger.runs import RunEntry, RunList, list_runs

__all__ = ["RunEntry", "RunList", "list_runs", "write_ledger"]
