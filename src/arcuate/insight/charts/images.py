"""Arrays as images in a chart: one colour of the theme, with the value as opacity."""

import base64
import struct
import zlib

import numpy as np

from arcuate.insight.charts.theme import LIGHT

_N_SHADES = 16  # four bits per value


def png(values: np.ndarray) -> str:
    """An array (rows, columns) of values in [0, 1] as a PNG data URL, from transparent to full colour.

    The page inverts the image in dark mode, so one image is enough for both.
    """
    shades = np.clip(np.rint(np.nan_to_num(values) * (_N_SHADES - 1)), 0, _N_SHADES - 1).astype(np.uint8)
    n_rows, n_columns = shades.shape
    padded = np.pad(shades, ((0, 0), (0, n_columns % 2)))
    packed = (padded[:, 0::2] << 4) | padded[:, 1::2]
    lines = np.pad(packed, ((0, 0), (1, 0))).tobytes()  # each line starts with its filter type, 0 = none
    header = struct.pack(">IIBBBBB", n_columns, n_rows, 4, 3, 0, 0, 0)
    palette = bytes.fromhex(LIGHT["heat"].removeprefix("#")) * _N_SHADES
    opacity = bytes(round(255 * shade / (_N_SHADES - 1)) for shade in range(_N_SHADES))
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"tRNS", opacity),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    content = b"".join(_chunk(*chunk) for chunk in chunks)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def pool(values: np.ndarray, n_rows: int, n_columns: int) -> np.ndarray:
    """Average neighbouring values along an axis that is longer than the image needs."""
    for axis, limit in ((0, n_rows), (1, n_columns)):
        size = -(-values.shape[axis] // limit)
        if size > 1:
            starts = np.arange(0, values.shape[axis], size)
            lengths = np.diff(np.append(starts, values.shape[axis]))
            sums = np.add.reduceat(values, starts, axis=axis)
            values = sums / (lengths[:, None] if axis == 0 else lengths[None, :])
    return values
