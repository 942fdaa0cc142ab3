"""What a run was made with, for whoever wants to repeat it."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "scipy", "h5py", "pydantic", "safetensors", "rapidfuzz")


def describe(**facts: Any) -> dict[str, Any]:
    """Versions, platform, command and code revision, with the given facts added."""
    return {
        "arcuate": installed("arcuate"),
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "platform": platform.platform(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "revision": revision(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def revision() -> str | None:
    """The git commit of the code, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        asked = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
