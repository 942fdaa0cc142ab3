"""Likely causes of a verdict, and the setting to change: in the words of arcuate's recipes."""

from arcuate.doctor.diagnosis import Cause
from arcuate.doctor.facts import Facts
from arcuate.doctor.reading import Reading
from arcuate.doctor.rules import Finding


def causes_of(lead: Finding, facts: Facts, reading: Reading) -> tuple[Cause, ...]:
    return ()


def suggestion_of(lead: Finding, causes: tuple[Cause, ...], facts: Facts) -> str:
    return ""
