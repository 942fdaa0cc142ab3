"""`arcuate import`."""

from pathlib import Path

from arcuate.cli.console import counted, emit_json, out, say
from arcuate.files import read_json
from arcuate.models.import_checkpoint import import_checkpoint
from arcuate.models.io import load_model


def import_command(checkpoint: Path, out_path: Path, kind: str, sessions: str | None, as_json: bool) -> None:
    names = [name.strip() for name in sessions.split(",")] if sessions else None
    folder = import_checkpoint(checkpoint, out_path, kind, names)
    model = load_model(folder)
    config = model.config
    facts = {
        **read_json(folder / "import.json"),
        "model": str(folder),
        "kind": kind,
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "n_channels": config.n_channels,
        "sessions": list(config.sessions),
    }
    if as_json:
        emit_json(facts)
        return
    if facts.get("ignored"):
        say(
            f"{counted(len(facts['ignored']), 'tensor')} that no computation uses left out,"
            f" such as {facts['ignored'][0]}"
        )
    parts = (
        (facts["n_parameters"], "parameter"),
        (config.n_channels, "channel"),
        (len(config.sessions), "session"),
    )
    size = ", ".join(counted(n, noun) for n, noun in parts)
    out.print(f"{folder}: {size}", soft_wrap=True, markup=False)
