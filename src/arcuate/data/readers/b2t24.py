"""Brain-to-Text '24: `{train,test,competitionHoldOut}/<session>.mat`, one cell per trial.

As in the literature, `test` is the validation split and `competitionHoldOut` the test split, whose sentences are
placeholders and are dropped. Labels are derived from the text by `arcuate.data.text`.
"""

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.io
from scipy.io.matlab import MatReadError

from arcuate.data.alphabet import SILENCE
from arcuate.data.readers.source import (
    FILE_ERRORS,
    MAX_VALUES,
    NO_LABEL,
    REPLACEMENT,
    FileSummary,
    Problem,
    ReadResult,
    SourceFile,
    UnreadableFile,
    is_safe_name,
    replace_surrogates,
    summarise_error,
    unreadable,
)
from arcuate.data.spelling import spell_out
from arcuate.data.text import text_to_tokens
from arcuate.data.trial import Split, Trial, trial_id
from arcuate.errors import UserError, check_resources
from arcuate.files import check_expansion

PARTITIONS: dict[str, Split] = {"train": "train", "test": "val", "competitionHoldOut": "test"}
DEFAULT_FEATURES = "tx1+spikePow:6v"
_KNOWN_FEATURES = ("tx1", "tx2", "tx3", "tx4", "spikePow")
_AREAS = ("6v", "44", "all")
_MAX_TRIALS = 100_000
_MAT_ERRORS = (*FILE_ERRORS, AttributeError, IndexError, NameError, struct.error, zlib.error, MatReadError)


@dataclass(frozen=True)
class Features:
    """Variables that form the channels, and the half of their columns to use (area 6v first, area 44 second)."""

    names: tuple[str, ...]
    area: str

    def columns(self, n_columns: int) -> slice:
        half = n_columns // 2
        return {"6v": slice(0, half), "44": slice(half, None), "all": slice(None)}[self.area]


def parse_features(text: str) -> Features:
    """Parse a selection such as "tx1+spikePow:6v"; raises UserError with the known features."""
    names, _, area = text.partition(":")
    chosen = tuple(name.strip() for name in names.split("+"))
    area = area.strip() or "6v"
    unknown = [name for name in chosen if name not in _KNOWN_FEATURES]
    if unknown or area not in _AREAS or len(set(chosen)) != len(chosen):
        raise UserError(
            f"unknown features {text!r}: join some of {', '.join(_KNOWN_FEATURES)} with + and append"
            f" :{', :'.join(_AREAS)}, as in {DEFAULT_FEATURES}"
        )
    return Features(chosen, area)


def recognise(folder: Path, name: str) -> SourceFile | str:
    """The recording with this name in the folder of a partition, or the reason why it is not one."""
    if (split := PARTITIONS.get(folder.name)) is None:
        return f"not in one of the folders {', '.join(PARTITIONS)}"
    if not name.endswith(".mat"):
        return "not <session>.mat"
    return SourceFile(replace_surrogates(Path(name).stem), split, folder / name)


def summarise_file(file: SourceFile) -> FileSummary:
    """Number of trials from the size of the cell array; the number of channels would require reading the file."""
    sizes = _count_cells(file)
    if "tx1" not in sizes and "spikePow" not in sizes:
        raise UnreadableFile("it has neither tx1 nor spikePow")
    return FileSummary(sizes.get("tx1", sizes.get("spikePow", 0)), {})


def read_trials(file: SourceFile, features: str = DEFAULT_FEATURES) -> Iterator[ReadResult]:
    """The trials of one file in order; the complete file is held in memory."""
    chosen = parse_features(features)
    data = _load(file, chosen)
    arrays = [data[name] for name in chosen.names]
    texts, blocks = data["sentenceText"], data["blockIdx"]
    for number in range(len(arrays[0])):
        identity = trial_id(file.session, file.split, number)
        try:
            bins = _read_bins([array[number] for array in arrays], chosen)
        except FILE_ERRORS as error:
            yield unreadable(identity, summarise_error(error))
            continue
        for array in arrays:
            array[number] = None  # release the memory
        yield _make_trial(file, number, bins, texts[number] if texts else None, blocks[number] if blocks else None)


def _make_trial(file: SourceFile, number: int, bins: np.ndarray, text: str | None, block: int | None) -> ReadResult:
    problems: list[Problem] = []
    if block is None:
        problems.append(Problem("no block number", None, "blockIdx is missing; block 0 is assumed", "note"))
    tokens: np.ndarray | None = None
    if file.split == "test":
        text = None  # placeholder in the release
    elif not text:
        problems.append(Problem(NO_LABEL, None, "the trial has no sentence"))
        text = None
    else:
        if n_replaced := text.count(REPLACEMENT):
            detail = f"{n_replaced} characters could not be decoded, so the label may be wrong: {text[:60]!r}"
            problems.append(Problem("text encoding", n_replaced, detail))
        label, unknown = text_to_tokens(text)
        tokens = np.asarray(label, dtype=np.int32)
        problems.extend(_spelling_problems(text, label))
        if unknown:
            detail = f"pronounced by letter-to-sound rules: {', '.join(unknown)}"
            problems.append(Problem("unknown words", len(unknown), detail, "note"))
    trial = Trial(file.session, file.split, number, block or 0, bins, tokens, text)
    return ReadResult(trial.id, trial, tuple(problems))


def _spelling_problems(text: str, label: list[int]) -> Iterator[Problem]:
    """Problems of a label whose text contains digits or symbols."""
    spelling = spell_out(text)
    if spelling.changed:
        yield Problem("spelled out", None, f"labelled as {spelling.text[:80]!r}", "note")
    if unspoken := spelling.unspoken.replace(REPLACEMENT, ""):
        detail = f"no pronunciation for {unspoken[:20]!r}, so the label may be wrong: {text[:60]!r}"
        yield Problem("unspoken text", len(unspoken), detail)
    if set(label) <= {SILENCE}:
        yield Problem("empty label", 0, f"the sentence {text[:60]!r} has no phonemes")


def _read_bins(cells: list[Any], features: Features) -> np.ndarray:
    """Bins (T, C) float32: the selected columns of all features."""
    parts: list[np.ndarray] = []
    for name, cell in zip(features.names, cells, strict=True):
        if not isinstance(cell, np.ndarray) or cell.ndim != 2 or cell.dtype.kind not in "fiu":
            raise ValueError(f"{name} is not a numeric array (bins, channels)")
        if cell.size > MAX_VALUES or (features.area != "all" and cell.shape[1] % 2):
            raise ValueError(
                f"{name} has {cell.shape[0]} bins of {cell.shape[1]} channels: too large or not divisible by 2"
            )
        parts.append(cell[:, features.columns(cell.shape[1])])
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"{' and '.join(features.names)} differ in length: {[len(part) for part in parts]}")
    with np.errstate(over="ignore"):
        bins = np.concatenate([part.astype(np.float32) for part in parts], axis=1)
    if not bins.shape[1]:
        raise ValueError("the trial has no channels")
    return np.ascontiguousarray(bins)


# --- loading the file -------------------------------------------------------------------------------------


def _load(file: SourceFile, features: Features) -> dict[str, list[Any]]:
    """Cells, sentences and block numbers, one entry per trial."""
    wanted = (*features.names, "sentenceText", "blockIdx")
    sizes = _count_cells(file, wanted)
    for name in features.names:
        if name not in sizes:
            raise UnreadableFile(f"it has no variable {name}; its variables are {', '.join(sorted(sizes)) or 'none'}")
    try:
        stored = scipy.io.loadmat(file.path, variable_names=wanted)
    except _MAT_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error
    data: dict[str, list[Any]] = {}
    for name in features.names:
        cells = stored.get(name)  # scipy omits a variable that is damaged after its header
        if not isinstance(cells, np.ndarray) or cells.dtype != object:
            raise UnreadableFile(f"{name} is not a cell array with one cell per trial")
        data[name] = list(cells.ravel())
    data["sentenceText"] = _parse_sentences(stored.get("sentenceText"))
    data["blockIdx"] = _parse_blocks(stored.get("blockIdx"))
    n_trials = len(data[features.names[0]])
    for name, values in data.items():
        if len(values) != n_trials and (values or name in features.names):
            raise UnreadableFile(f"{features.names[0]} has {n_trials} trials but {name} has {len(values)}")
    return data


def _check_header(file: SourceFile) -> None:
    if not is_safe_name(file.session):
        raise UnreadableFile(f"the session name {file.session!r} is not a valid file name; rename the file")
    _check_version(file.path)


def _check_version(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            head = stream.read(520)
    except OSError as error:
        check_resources(error, path)
        raise UnreadableFile(error.strerror or str(error)) from error
    if head[:8] == b"\x89HDF\r\n\x1a\n" or head[512:520] == b"\x89HDF\r\n\x1a\n" or head.startswith(b"MATLAB 7.3"):
        raise UnreadableFile("it is a MATLAB 7.3 file; save it again in MATLAB with save(..., '-v7')")


def _count_cells(file: SourceFile, wanted: Collection[str] = ()) -> dict[str, int]:
    """Number of cells of each variable; the `wanted` ones are checked completely and are safe to load."""
    _check_header(file)
    try:
        sizes = {name: found.size for name, found in _list_variables(file.path, wanted).items()}
    except _MAT_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error
    for name in _KNOWN_FEATURES:
        if sizes.get(name, 0) > _MAX_TRIALS:
            raise UnreadableFile(f"{name} has {sizes[name]} trials, expected at most {_MAX_TRIALS}")
    return sizes


def load_mat(path: Path, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """Variables of any MATLAB 5 file, checked before scipy reads them; raises `UnreadableFile`."""
    _check_version(path)
    try:
        _list_variables(path, wanted)
        stored = scipy.io.loadmat(path, variable_names=tuple(wanted))
    except _MAT_ERRORS as error:
        check_resources(error, path)
        raise UnreadableFile(summarise_error(error)) from error
    return {name: stored[name] for name in wanted if isinstance(stored.get(name), np.ndarray)}


def list_mat(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the variables of a MATLAB 5 file; raises `UnreadableFile`."""
    _check_version(path)
    try:
        return {name: found.shape for name, found in _list_variables(path, ()).items()}
    except _MAT_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error


def _parse_sentences(stored: Any) -> list[Any]:
    """Sentences from a padded character array or a cell array; an empty list if there are none."""
    if not isinstance(stored, np.ndarray):
        return []
    flat = [np.asarray(cell).ravel() for cell in stored.ravel()]
    return [replace_surrogates(str(cell[0])).replace("\0", "").strip() if len(cell) else "" for cell in flat]


def _parse_blocks(stored: Any) -> list[Any]:
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "fiu":
        return []
    return [int(value) if np.isfinite(value) else None for value in stored.ravel()]


# --- validation of the tags of a MATLAB 5 file before scipy's compiled reader relies on them --------------------
#
# That reader trusts every type code and size; a damaged file can crash the process. The validation reads tags only,
# inflating compressed variables chunk by chunk, and raises ValueError at the first invalid one.

_MATRIX, _COMPRESSED, _UINT32, _INT32 = 14, 15, 6, 5
_NUMBERS = frozenset((1, 2, 3, 4, 5, 6, 7, 9, 12, 13))
_CHARACTERS = frozenset((1, 2, 3, 4, 16, 17, 18))
_CELL, _CHAR, _OPAQUE = 1, 4, 17
_NUMERIC = range(6, 16)
_COMPLEX = 0x800
_KNOWN_CLASSES = range(1, 17)
_CHUNK_BYTES = 2**20
_MAX_CELLS = 1_000_000


@dataclass(frozen=True)
class _Variable:
    """Header of a MATLAB variable."""

    shape: tuple[int, ...]
    is_complex: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _list_variables(path: Path, wanted: Collection[str]) -> dict[str, _Variable]:
    """The variables of a file; the `wanted` ones are validated down to the last cell."""
    size = path.stat().st_size
    found: dict[str, _Variable] = {}
    with path.open("rb") as stream:
        order = _byte_order(stream.read(128))
        end = 128
        while end < size:
            stream.seek(end)
            kind, n_bytes = struct.unpack(f"{order}II", _read_exactly(stream, 8))
            start, end = end + 8, end + 8 + n_bytes
            if end > size or kind not in (_MATRIX, _COMPRESSED):
                raise ValueError(f"the file is damaged or truncated at byte {start - 8}")
            source: _Plain | _Inflated = _Plain(stream, end)
            if kind == _COMPRESSED:
                source = _Inflated(stream, n_bytes)
                kind, n_bytes = struct.unpack(f"{order}II", source.read(8))
                if kind != _MATRIX:
                    raise ValueError(f"the compressed part at byte {start} is not a variable")
            reader = _TagReader(source, order)
            name, variable, kind = reader.header()
            if name in wanted:
                reader.check_body(variable, kind, depth=0)
            found[name] = variable
    return found


def _byte_order(header: bytes) -> str:
    if len(header) == 128 and header[126:128] == b"IM" and header[125] == 1:
        return "<"
    if len(header) == 128 and header[126:128] == b"MI" and header[124] == 1:
        return ">"
    raise ValueError("it is not a MATLAB 5 file")


def _read_exactly(stream: BinaryIO, n: int) -> bytes:
    content = stream.read(n)
    if len(content) != n:
        raise ValueError("the file is truncated")
    return content


class _Plain:
    """Bytes of an uncompressed variable, up to its end."""

    def __init__(self, stream: BinaryIO, end: int) -> None:
        self.stream, self.end = stream, end

    def read(self, n: int) -> bytes:
        self._check(n)
        return _read_exactly(self.stream, n)

    def skip(self, n: int) -> None:
        self._check(n)
        self.stream.seek(n, 1)

    def _check(self, n: int) -> None:
        if self.stream.tell() + n > self.end:
            raise ValueError("a variable ends before its values do")


class _Inflated:
    """Bytes of a compressed variable, inflated chunk by chunk."""

    def __init__(self, stream: BinaryIO, n_bytes: int) -> None:
        self.stream, self.left, self.n_bytes, self.n_inflated = stream, n_bytes, n_bytes, 0
        self.inflate = zlib.decompressobj()
        self.ready = b""

    def read(self, n: int) -> bytes:
        while len(self.ready) < n:
            self.ready += self._next_chunk()
        content, self.ready = self.ready[:n], self.ready[n:]
        return content

    def skip(self, n: int) -> None:
        while len(self.ready) < n:
            n -= len(self.ready)
            self.ready = self._next_chunk()
        self.ready = self.ready[n:]

    def _next_chunk(self) -> bytes:
        packed = self.inflate.unconsumed_tail
        if not packed and self.left:
            packed = _read_exactly(self.stream, min(self.left, _CHUNK_BYTES))
            self.left -= len(packed)
        chunk = self.inflate.decompress(packed, _CHUNK_BYTES)
        self.n_inflated += len(chunk)
        check_expansion(self.n_inflated, self.n_bytes)
        if not chunk and (self.inflate.eof or not (self.left or self.inflate.unconsumed_tail)):
            raise ValueError("a compressed variable ends before its values do")
        return chunk


class _TagReader:
    """Reads the tags of one variable."""

    def __init__(self, source: _Plain | _Inflated, order: str) -> None:
        self.source, self.order = source, order

    def header(self) -> tuple[str, _Variable, int]:
        """Name, shape and class."""
        kind, flags = self.element()
        if kind != _UINT32 or len(flags) != 8:
            raise ValueError("a variable has no flags")
        (flag_bits,) = struct.unpack(f"{self.order}I", flags[:4])
        matlab_class, is_complex = flag_bits & 0xFF, bool(flag_bits & _COMPLEX)
        if matlab_class == _OPAQUE:  # a MATLAB object, without shape and name
            return "", _Variable(()), _OPAQUE
        kind, dims = self.element()
        if kind != _INT32 or len(dims) % 4 or not 8 <= len(dims) <= 128 or matlab_class not in _KNOWN_CLASSES:
            raise ValueError("a variable has no shape or an unknown class")
        shape = struct.unpack(f"{self.order}{len(dims) // 4}i", dims)
        kind, name = self.element()
        if min(shape) < 0 or kind not in _CHARACTERS:
            raise ValueError("a variable has an invalid shape or name")
        return name.decode("latin-1"), _Variable(shape, is_complex), matlab_class

    def check_body(self, variable: _Variable, matlab_class: int, depth: int) -> None:
        if variable.is_complex:
            raise ValueError("values are complex numbers")
        if matlab_class == _CELL and depth < 2:
            if variable.size > _MAX_CELLS:
                raise ValueError(f"a cell array has {variable.size} cells, expected at most {_MAX_CELLS}")
            for _ in range(variable.size):
                self._check_cell(depth)
        elif matlab_class == _CHAR:
            self._check_values(_CHARACTERS)
        elif matlab_class in _NUMERIC:
            self._check_values(_NUMBERS)
        else:
            raise ValueError(f"a variable has class {matlab_class}, expected numbers or text")

    def _check_cell(self, depth: int) -> None:
        kind, n_bytes = struct.unpack(f"{self.order}II", self.source.read(8))
        if kind != _MATRIX:
            raise ValueError("a cell is not an array")
        if n_bytes:
            _, variable, matlab_class = self.header()
            self.check_body(variable, matlab_class, depth + 1)

    def _check_values(self, allowed: Collection[int]) -> None:
        kind, n_bytes, small = self.tag()
        if kind not in allowed:
            raise ValueError(f"values have the unknown type {kind}")
        self.source.skip(4 if small else n_bytes + -n_bytes % 8)

    def element(self) -> tuple[int, bytes]:
        """Type and content of a small element."""
        kind, n_bytes, small = self.tag()
        if n_bytes > 4096:
            raise ValueError("a name or shape is too long")
        padded = self.source.read(4 if small else n_bytes + -n_bytes % 8)
        return kind, padded[:n_bytes]

    def tag(self) -> tuple[int, int, bool]:
        """Type, size, and whether the content is stored inside the tag itself."""
        (first,) = struct.unpack(f"{self.order}I", self.source.read(4))
        if first >> 16:
            if first >> 16 > 4:
                raise ValueError("a small element is longer than 4 bytes")
            return first & 0xFFFF, first >> 16, True
        (n_bytes,) = struct.unpack(f"{self.order}I", self.source.read(4))
        return first, n_bytes, False
