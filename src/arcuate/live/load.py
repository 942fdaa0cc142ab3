"""`load_decoder`: a stream from a run folder or from an exported model. An exported model is loaded without torch."""

from pathlib import Path
from typing import Any, Unpack

from arcuate.decoding.stream import SentenceStream
from arcuate.errors import UserError
from arcuate.exported.archive import is_export
from arcuate.hub import local_path
from arcuate.live.config import DecoderOptions
from arcuate.progress import logger
from arcuate.run import open_run

_NOT_EXPORTED = {
    "adapt": "--adapt needs gradients",
    "llm": "--llm needs a causal language model",
    "lexicon": "--lexicon is fixed when the model is exported",
    "lm": "--lm is fixed when the model is exported",
    "decoding": "--config is fixed when the model is exported",
}


def load_decoder(path: str | Path, **options: Unpack[DecoderOptions]) -> SentenceStream:
    """Load what `arcuate live` decodes with; `options` are those of `StreamingDecoder.load`."""
    path = local_path(path)
    if is_export(path):
        return _load_exported(Path(path), options)
    import torch

    from arcuate.live.decoder import StreamingDecoder

    torch.set_num_threads(1)  # one stream is bound by memory bandwidth; other cores serve the page
    return StreamingDecoder.load(path, **options)


def find_model(path: str | Path) -> Path:
    """The folder of a run, or the exported file."""
    path = local_path(path)
    return path if is_export(path) else open_run(path).path


def _load_exported(path: Path, options: DecoderOptions) -> SentenceStream:
    from arcuate.runtime import Decoder

    defaults: dict[str, Any] = {"lexicon": "default", "lm": "default"}
    for name, problem in _NOT_EXPORTED.items():
        if options.get(name) not in (None, False, defaults.get(name)):
            raise UserError(f"{path} is an exported model, and {problem}; pass the run folder instead")
    words = options.get("lm", "default") is not None
    decoder = Decoder.load(
        path, words=words, beam=options.get("beam"), head=options.get("head"), session=options.get("session")
    )
    if words and not decoder.decodes_words:
        logger.info(f"{path} has no language model; decoding phonemes")
    return decoder
