"""Decoding with an exported model (`.arcx`) without torch; docs/export.md describes the file.

decoder = Decoder.load("model.arcx")
for bins in stream:                    # (t, C), as they arrive
    print(decoder.push(bins).text)
print(decoder.finish().text)
"""

from arcuate.data.statistics import Statistics as Statistics
from arcuate.decoding.decoder import Decoder as Decoder
from arcuate.decoding.hypothesis import Partial as Partial
from arcuate.decoding.options import SearchOptions as SearchOptions
from arcuate.errors import UserError as UserError
from arcuate.models.layout import ModelDelay as ModelDelay
