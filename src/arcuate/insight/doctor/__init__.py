"""The doctor: diagnoses training logs of any format, with a verdict, evidence and likely causes."""

from arcuate.insight.doctor.causes import Cause
from arcuate.insight.doctor.diagnose import VERDICTS, Diagnosis, diagnose

__all__ = ["VERDICTS", "Cause", "Diagnosis", "diagnose"]
