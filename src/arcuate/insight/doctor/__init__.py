"""The doctor: diagnoses training logs of any format, with a verdict, evidence, likely causes and a remedy."""

from arcuate.insight.doctor.data_check import DataCheck, DataFault, check_data
from arcuate.insight.doctor.diagnose import VERDICTS, Diagnosis, diagnose
from arcuate.insight.doctor.recipe_checks import Cause
from arcuate.insight.doctor.remedy import Remedy, SettingChange, TriedRemedy, try_remedy, write_remedy

__all__ = [
    "VERDICTS",
    "Cause",
    "DataCheck",
    "DataFault",
    "Diagnosis",
    "Remedy",
    "SettingChange",
    "TriedRemedy",
    "check_data",
    "diagnose",
    "try_remedy",
    "write_remedy",
]
