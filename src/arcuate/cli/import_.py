"""`arcuate import`."""

from pathlib import Path

from arcuate.cli.console import emit_json, out
from arcuate.foreign import import_checkpoint
from arcuate.models.files import load_model


def import_command(checkpoint: Path, out_path: Path, kind: str, as_json: bool) -> None:
    folder = import_checkpoint(checkpoint, out_path, kind)
    card = load_model(folder).card
    facts = {
        "model": str(folder),
        "kind": kind,
        "n_parameters": sum(p.numel() for p in load_model(folder).parameters()),
        "n_channels": card.n_channels,
        "sessions": list(card.sessions),
    }
    if as_json:
        emit_json(facts)
    else:
        out.print(
            f"{folder}: {facts['n_parameters']:,} parameters, {card.n_channels} channels, {len(card.sessions)} sessions"
        )
