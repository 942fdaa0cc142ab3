"""The table of readers: which layouts are known, and which reader reads a folder."""

from collections.abc import Callable
from pathlib import Path

from arcuate.data.readers.b2t24 import B2T24
from arcuate.data.readers.b2t25 import B2T25
from arcuate.data.readers.nwb import NwbReader, falcon_h2, read_mapping
from arcuate.data.readers.release import find_release
from arcuate.data.readers.source import Reader, Source
from arcuate.data.trial import Layout
from arcuate.errors import UserError
from arcuate.plugins import load_component, trust_code

READERS: dict[Layout, Callable[[], Reader]] = {"b2t25": B2T25, "b2t24": B2T24, "nwb": NwbReader, "falcon-h2": falcon_h2}
_MAPPING_SUFFIXES = (".yaml", ".yml")


def open_source(path: Path, layout: Layout | None = None) -> tuple[Reader, Source]:
    """The reader of a layout and the recordings that it finds at `path`.

    A layout is a name of `READERS`, a mapping file (NWB with own names), or the name or import path of a user's reader;
    by default, it is that of the Brain-to-Text release found.
    """
    if layout is None:
        source = find_release(path)
        return READERS[source.layout](), source
    if layout.endswith(_MAPPING_SUFFIXES):
        reader: Reader = NwbReader(read_mapping(Path(layout)))
    elif layout in READERS:
        reader = READERS[layout]()
    else:
        with trust_code():  # named by the user
            reader = _make_own(layout)
    return reader, reader.find_source(path)


def _make_own(layout: Layout) -> Reader:
    try:
        made: Reader = load_component("readers", layout)()
    except TypeError as error:
        raise UserError(f"the reader {layout!r} does not work without arguments: {error}") from error
    missing = [name for name in ("layout", "find_source", "read_trials") if not hasattr(made, name)]
    if missing:
        raise UserError(f"the reader {layout!r} has no {missing[0]}; see docs/your-data.md")
    return made
