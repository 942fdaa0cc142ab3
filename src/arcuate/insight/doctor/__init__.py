"""The doctor: reads any training log of this field and says what happened, since when, and on which evidence."""

from arcuate.insight.doctor.diagnose import diagnose
from arcuate.insight.doctor.diagnosis import VERDICTS, Cause, Diagnosis

__all__ = ["VERDICTS", "Cause", "Diagnosis", "diagnose"]
