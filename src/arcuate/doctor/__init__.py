"""The doctor: diagnoses training logs of any format, with a verdict, evidence, likely causes and a remedy."""

from arcuate.doctor.causes import Cause, Change
from arcuate.doctor.data_check import DataCheck, DataFault, check_data
from arcuate.doctor.diagnose import VERDICTS, Diagnosis, diagnose
from arcuate.doctor.remedy import Remedy, SettingChange, TriedRemedy, try_remedy, write_remedy

__all__ = [
    "VERDICTS",
    "Cause",
    "Change",
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
