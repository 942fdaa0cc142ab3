"""Exported models for tests: written from small models without a run folder, and changed in chosen ways."""

from pathlib import Path

from arcuate.experiments.export import write_export
from arcuate.exported.file import open_archive, write_archive
from arcuate.models.layout import Head
from arcuate.models.model import Model
from support.live_parts import small_search

# packages of the complete installation that the small runtime must do without
ABSENT = ("torch", "scipy", "h5py", "rapidfuzz", "filelock", "pocketsphinx", "safetensors", "cyclopts")


def without(*modules: str) -> str:
    """Source code after which `import` of these modules fails, as in an environment that lacks them."""
    return f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"


def export_model(
    path: Path,
    model: Model,
    words: bool = True,
    session: str | None = None,
    int8: bool = False,
    head: Head = "ctc",
) -> Path:
    write_export(path, model, small_search() if words else None, session, int8, head)
    return path


def repack(path: Path, target: Path, changes: dict[str, bytes | None]) -> Path:
    """Write the archive with other members and a valid checksum; None removes a member."""
    archive = open_archive(path)
    members = {name: archive.bytes(name) for name in archive.members}
    for name, content in changes.items():
        members.pop(name, None)
        if content is not None:
            members[name] = content
    write_archive(target, members)
    return target
