"""The environment of a run: versions, platform, command and code revision for repeating it."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "scipy", "h5py", "pydantic", "safetensors", "rapidfuzz")


def describe_environment(**facts: Any) -> dict[str, Any]:
    """Return the content of environment.json, with the given facts added."""
    return {
        "arcuate": installed_version("arcuate"),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "revision": _git_revision(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Return the git commit of the code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
