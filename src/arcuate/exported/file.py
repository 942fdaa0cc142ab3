"""The `.arcx` file: metadata, graphs, session layers, lexicon and n-gram of one model in an uncompressed zip archive.

Any zip tool lists and extracts it. Members are aligned, so that they can be mapped into memory. The archive comment
holds the BLAKE2b digest of all bytes before it, so a file that was changed anywhere is rejected before a member is
read. The digest protects against damage, not against malicious files: metadata and tables are validated here, graphs
in `check.py`.
"""

import hashlib
import io
import mmap
import re
import shutil
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from arcuate.errors import UserError
from arcuate.files import atomic_write, explain_write_error
from arcuate.models.layout import Head, Layout, ModelDelay, Normalisation

if TYPE_CHECKING:
    from arcuate.language.lexicon import Lexicon
    from arcuate.language.ngram.model import LanguageModel

VERSION = 1
Content = bytes | Path  # content of a member: in memory, or a file to copy
METADATA = "metadata.json"
CARD = "MODEL_CARD.md"
LANGUAGE_MODEL = "ngram.alm"
SILENT_FRAME = "silent_frame.f32"  # projected encoder frame of zeros: input of the internal LM
SESSION_WEIGHTS, SESSION_BIASES = "session_weights.f32", "session_biases.f32"
STARTS_AS_EXPORT = re.compile(rb"PK\x03\x04.{26}" + re.escape(METADATA).encode(), re.DOTALL)
_LEXICON_WORDS = "lexicon.words.txt"
_LEXICON_ARRAYS = {  # name of the member by that of the array, and type
    "word_of": ("lexicon.word_of.i32", "<i4"),
    "tokens": ("lexicon.tokens.i32", "<i4"),
    "offsets": ("lexicon.offsets.i64", "<i8"),
}
_ALIGNMENT = 64
_ALIGN_ID = 0xA5C0  # extra field of a member that aligns its data
_ZIP64_BYTES = 20  # extra field that zipfile adds to large members
_LOCAL_BYTES = 30  # local header of a member, before its name and extra fields
_CHUNK = 2**22
_NAME = re.compile(rf"[a-z][a-z0-9_.]{{0,59}}|{re.escape(CARD)}")
_COMMENT = b"arcuate-export blake2b "
_DIGEST_BYTES = 20
_COMMENT_BYTES = len(_COMMENT) + 2 * _DIGEST_BYTES
_MAX_METADATA = 2**24
_MAX_STATE_BYTES = 2**28


def damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged or not an exported model: {problem}; export it again with `arcuate export`")


def is_export(path: str | Path) -> bool:
    """Whether a path names an exported model, by its suffix or first bytes; it is validated when it is opened."""
    path = Path(path)
    if path.suffix == ".arcx":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return STARTS_AS_EXPORT.match(file.read(64)) is not None


# --- the archive ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Archive:
    """A verified file, mapped read-only."""

    path: Path
    members: Mapping[str, tuple[int, int]]  # offset and size in the file
    data: mmap.mmap

    @property
    def digest(self) -> str:
        """Digest that identifies the contents."""
        return self.data[-2 * _DIGEST_BYTES :].decode("ascii", "replace")

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def member(self, name: str) -> tuple[int, int]:
        """Offset and size of a member in the file."""
        if name not in self.members:
            raise damaged(self.path, f"it lacks {name}")
        return self.members[name]

    def bytes(self, name: str, max_bytes: int | None = None) -> bytes:
        """Copy of a member."""
        offset, size = self.member(name)
        if max_bytes is not None and size > max_bytes:
            raise damaged(self.path, f"{name} has {size:,} bytes, at most {max_bytes:,} are expected")
        return self.data[offset : offset + size]

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """A mapped member as an array of this type and shape, in which -1 may stand for one dimension."""
        offset, size = self.member(name)
        try:
            return np.frombuffer(self.data, np.uint8, size, offset).view(dtype).reshape(shape)
        except ValueError:
            raise damaged(self.path, f"{name} has {size:,} bytes, which do not match its shape") from None


def write_archive(path: Path, members: Mapping[str, Content]) -> int:
    """Write the members in order; equal contents give equal bytes. Returns the size of the file."""
    try:
        with atomic_write(path) as stream:
            with zipfile.ZipFile(stream, "w") as archive:
                for name, content in members.items():
                    _write_member(archive, stream, name, content)
                archive.comment = bytes(_COMMENT_BYTES)
            stream.seek(-_COMMENT_BYTES, io.SEEK_END)
            stream.flush()
            with Path(stream.name).open("rb") as written:
                comment = _COMMENT + _digest(written, stream.tell())
            stream.write(comment)
            return stream.tell()
    except OSError as error:
        raise explain_write_error(error, path) from error


def _write_member(archive: zipfile.ZipFile, stream: BinaryIO, name: str, content: Content) -> None:
    assert _NAME.fullmatch(name), name
    info = zipfile.ZipInfo(name)  # dated 1980-01-01
    info.create_system = 3  # the same on every system
    info.file_size = len(content) if isinstance(content, bytes) else content.stat().st_size
    n_zip64 = _ZIP64_BYTES if info.file_size * 1.05 > zipfile.ZIP64_LIMIT else 0  # the rule of zipfile
    n_padding = -(stream.tell() + _LOCAL_BYTES + len(name) + 4 + n_zip64) % _ALIGNMENT
    info.extra = struct.pack("<HH", _ALIGN_ID, n_padding) + bytes(n_padding)
    with (
        archive.open(info, "w") as member,
        io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source,
    ):
        shutil.copyfileobj(source, member, _CHUNK)


def open_archive(path: str | Path) -> Archive:
    """Verify the digest of a file and map it."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no exported model {path}; write one with `arcuate export RUN {path.name}`")
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04" or not _digest_matches(file):
                raise damaged(path, "its checksum does not match")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        members = {info.filename: _find_member(data, info) for info in infos}
        if len(members) != len(infos):
            raise ValueError("a name is repeated")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError, LookupError, struct.error) as error:
        raise damaged(path, f"its table of contents is invalid ({error})") from None
    return Archive(path, members, data)


def _digest_matches(file: BinaryIO) -> bool:
    """Verify the digest; the file is read, not mapped, so that its pages do not count as resident memory."""
    n_bytes = file.seek(0, io.SEEK_END) - _COMMENT_BYTES
    return n_bytes > 0 and _COMMENT + _digest(file, n_bytes) == file.read()


def _digest(file: BinaryIO, n_bytes: int) -> bytes:
    """Digest of the first bytes of a file, which is left after them."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    while n_bytes > 0 and (block := file.read(min(_CHUNK, n_bytes))):
        digest.update(block)
        n_bytes -= len(block)
    return digest.hexdigest().encode()


def _find_member(data: mmap.mmap, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Offset and size of the data of a member; ValueError unless it is stored as `write_archive` does."""
    n_name, n_extra = struct.unpack_from("<HH", data, info.header_offset + _LOCAL_BYTES - 4)
    offset = info.header_offset + _LOCAL_BYTES + n_name + n_extra
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits and not offset % _ALIGNMENT
    if not is_plain or not _NAME.fullmatch(info.filename) or offset + info.file_size > len(data) - _COMMENT_BYTES:
        raise ValueError(f"{info.filename!r:.60} is not stored as expected")
    return offset, info.file_size


# --- metadata ---------------------------------------------------------------------------------------------

_Names = Annotated[
    tuple[Annotated[str, StringConstraints(max_length=200)], ...], Field(min_length=1, max_length=10_000)
]


class _Described(BaseModel):
    """Part of the metadata; unknown keys are ignored, because later versions may add some."""

    model_config = ConfigDict(strict=True, frozen=True)


class StoredLayout(_Described):
    """The fields of `Layout`, with their limits."""

    classes: _Names
    sessions: _Names
    n_channels: int = Field(ge=1, le=65_536)
    patch_bins: int = Field(ge=1, le=200)
    stride: int = Field(ge=1, le=200)
    look_ahead: int = Field(ge=0, le=200)
    normalise: Normalisation
    log1p: bool
    rolling_bins: int = Field(ge=1, le=10**6)
    delay: ModelDelay


class StateTensor(_Described):
    """A tensor that a graph takes and returns."""

    name: str
    dtype: Literal["float32", "float64", "int64"]
    shape: tuple[Annotated[int, Field(ge=1, lt=2**24)], ...] = Field(max_length=8)


class TransducerSizes(_Described):
    """Sizes of the prediction network."""

    width: int = Field(ge=1, le=8192)
    depth: int = Field(ge=1, le=16)
    context: int | None = Field(ge=1, le=8)  # None: an LSTM


class Metadata(_Described):
    """Contents of metadata.json."""

    format: Literal["arcuate-export"] = "arcuate-export"
    version: int = VERSION
    arcuate: str = ""  # version of the program that wrote it
    model: StoredLayout
    precision: Literal["fp32", "int8"]
    n_session_layers: int  # 0 if the layer is part of the graph or the model has none
    states: dict[Literal["bin", "frame"], Annotated[tuple[StateTensor, ...], Field(max_length=1000)]]
    head: Head = "ctc"  # to decode with: CTC, or both with the transducer
    transducer: TransducerSizes | None = None
    lm: str | None = None
    lexicon: str | None = None
    decoding: dict[str, Any] = {}  # settings of the word search
    source: dict[str, Any] = {}  # run, checkpoint, recipe hash, layout and features of the training data


@dataclass(frozen=True, eq=False)
class ExportedFile:
    """A verified file with its metadata parsed."""

    archive: Archive
    metadata: Metadata
    layout: Layout

    @property
    def path(self) -> Path:
        return self.archive.path

    @property
    def has_words(self) -> bool:
        return LANGUAGE_MODEL in self.archive

    @property
    def trained_on(self) -> Mapping[str, Any]:
        """Layout and features of the training data: the input of `Store.check_trained_on`."""
        data = self.metadata.source.get("data")
        return data if isinstance(data, dict) else {}

    def initial_states(self) -> dict[str, np.ndarray]:
        """Values of all state tensors before the first bin."""
        found: dict[str, np.ndarray] = {}
        for state in (state for states in self.metadata.states.values() for state in states):
            if float(np.prod(state.shape, dtype=float)) * np.dtype(state.dtype).itemsize > _MAX_STATE_BYTES:
                raise damaged(self.path, "its state tensors are too large")
            member = f"initial.{state.name}"
            stored = member in self.archive
            found[state.name] = (
                self.archive.array(member, state.dtype, state.shape) if stored else np.zeros(state.shape, state.dtype)
            )
        return found


def open_export(path: str | Path) -> ExportedFile:
    """Open and verify an exported model without loading its graphs."""
    archive = open_archive(path)
    try:
        metadata = Metadata.model_validate_json(archive.bytes(METADATA, _MAX_METADATA))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged(archive.path, f"{METADATA}, {where:.60}: {first['msg']:.100}") from None
    if metadata.version != VERSION:
        raise UserError(f"{archive.path} has format version {metadata.version}; expected {VERSION}")
    layout = Layout(**dict(metadata.model))
    if any(len(set(names)) != len(names) for names in (layout.classes, layout.sessions)):
        raise damaged(archive.path, "its classes or sessions are not distinct")
    if metadata.n_session_layers not in (0, len(layout.sessions)):
        raise damaged(archive.path, "the number of its session layers is invalid")
    return ExportedFile(archive, metadata, layout)


# --- words ------------------------------------------------------------------------------------------------


def read_language_model(file: ExportedFile) -> "LanguageModel":
    """The n-gram of a file, mapped, with every link and number checked."""
    from arcuate.language.ngram.model import LanguageModel, check_values

    model = LanguageModel.open(file.path, *file.archive.member(LANGUAGE_MODEL))
    check_values(model)
    base: Any = model.arrays.log_probs
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)  # releases the pages that the check has read; they are read again when used
    return replace(model, name=file.metadata.lm or model.name)


def lexicon_members(lexicon: "Lexicon") -> dict[str, Content]:
    """Members of an archive that hold a lexicon."""
    words: Content = "\n".join(lexicon.words).encode()
    arrays = {name: getattr(lexicon, key).astype(dtype).tobytes() for key, (name, dtype) in _LEXICON_ARRAYS.items()}
    return {_LEXICON_WORDS: words, **arrays}


def read_lexicon(file: ExportedFile, classes: tuple[str, ...]) -> "Lexicon":
    """The lexicon of a file over these classes, with every index checked."""
    from arcuate.language.lexicon import Lexicon

    archive = file.archive
    try:
        words = tuple(archive.bytes(_LEXICON_WORDS).decode().split("\n"))
    except UnicodeDecodeError:
        raise damaged(archive.path, "its words are not UTF-8 text") from None
    word_of, tokens, offsets = (archive.array(name, dtype, (-1,)) for name, dtype in _LEXICON_ARRAYS.values())
    is_valid = (
        len(set(words)) == len(words)
        and len(offsets) == len(word_of) + 1 > 1
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and bool((np.diff(offsets) > 0).all())
        and 0 <= int(word_of.min()) <= int(word_of.max()) < len(words)
        and 0 < int(tokens.min()) <= int(tokens.max()) < len(classes)
    )
    if not is_valid:
        raise damaged(archive.path, "its lexicon is inconsistent")
    return Lexicon(words, word_of, tokens, offsets, classes, file.metadata.lexicon or "")
