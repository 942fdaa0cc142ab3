"""Copies of stores with other content."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from arcuate.data.store import MANIFEST_FILE, Store
from arcuate.data.store_writer import create_store
from arcuate.data.trial import Trial


def rewrite(source: Path, out: Path, change: Callable[[Trial], Trial]) -> Store:
    """A valid store with changed trials and the flags of the original ones."""
    store = Store.open(source)
    with create_store(out, store.n_channels) as writer:
        for info in store.trials:
            writer.add(change(replace(store.read(info), bins=store.read_stored(info))), info.flags)
        writer.finish(store.layout, store.classes, features=store.features, simulated=store.simulated)
    return Store.open(out)


def edit_manifest(store: Path, before: str, after: str, *, sign: bool = True) -> None:
    """Replace text in a manifest; with `sign`, also the hash, as somebody who wants it to be accepted would."""
    first, rest = (store / MANIFEST_FILE).read_text("utf-8").split("\n", 1)
    assert before in rest, before
    rest = rest.replace(before, after, 1)
    if sign:
        known = first.split('"sha256": "')[1][:64]
        first = first.replace(known, sha256(rest.encode("utf-8", "surrogatepass")).hexdigest())
    (store / MANIFEST_FILE).write_text(f"{first}\n{rest}", "utf-8", "surrogatepass")
