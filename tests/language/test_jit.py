"""Caches of compiled functions."""

import os
from pathlib import Path

from arcuate.language.jit import drop_stale_caches


def test_functions_compiled_before_a_called_module_changed_are_compiled_again(tmp_path: Path) -> None:
    """Such a cache still contains the code of the called function as it was."""
    for time, name in enumerate(("caller.py", "plain.py", "__pycache__/caller.run-3.py311.nbi", "called.py"), start=1):
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time, time))
    stale, fresh = (tmp_path / "package" / "__pycache__" / f"{n}.py311.nbi" for n in ("caller.run-3", "called.add-1"))
    fresh.touch()
    drop_stale_caches(tmp_path)
    assert fresh.exists() and not stale.exists()
    os.utime(tmp_path / "package" / "plain.py")  # nothing in it is compiled
    drop_stale_caches(tmp_path)
    assert fresh.exists()
