"""How much is tried: `make test` keeps to minutes, `make thorough` tries what random checks have time for."""

import os

THOROUGH = os.environ.get("ARCUATE_TESTS") == "thorough"


def count(usual: int, thorough: int) -> int:
    return thorough if THOROUGH else usual
