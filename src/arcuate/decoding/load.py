"""Open runs, model folders and exported models as decoders, and build their searches.

Importing this needs neither torch nor numba; both are imported for the models and searches that use them.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arcuate.decoding.class_order import word_order
from arcuate.decoding.config import DecodingConfig, parse_decoding_config
from arcuate.decoding.decoder import AcousticModel, Decoder
from arcuate.decoding.hypothesis import GreedySearch, Search
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.exported.file import ExportedFile, is_export, open_export, read_language_model, read_lexicon
from arcuate.exported.model import load_model as load_exported
from arcuate.hub import local_path
from arcuate.models.layout import Head, check_head
from arcuate.progress import Progress, logger
from arcuate.run import find_checkpoint, split_parent

if TYPE_CHECKING:
    from arcuate.decoding.word_search.search import WordSearch
    from arcuate.language.lexicon import Lexicon
    from arcuate.language.ngram.model import LanguageModel

_MAX_WORD_WEIGHT = 1000.0  # nats, of a word added at run time; more would outweigh any acoustic score
STATE_FILE = "state.json"  # of a training checkpoint; it records the heads that were trained


@dataclass(frozen=True, eq=False)
class StoredWords:
    """Lexicon, n-gram and search weights in an exported model."""

    lexicon: "Lexicon"
    model: "LanguageModel"
    settings: DecodingConfig


def load(
    path: str | os.PathLike[str],
    search: SearchOptions | None = None,
    session: str | None = None,
    device: str = "cpu",
) -> Decoder:
    """Load a decoder; `decoder.decode(bins, session, statistics)` decodes a trial.

    Args:
        path: Run[@checkpoint], model folder, hf:ORG/NAME or .arcx.
        search: Word search and heads; default: the greedy search for phonemes.
        session: Session layer; default: the last one.
        device: Device of a torch model.
    """
    local = local_path(path)
    if is_export(local):
        return _load_export(local, search, session)
    from arcuate.models.acoustic import TorchModel
    from arcuate.models.config import RuntimeSettings
    from arcuate.models.io import load_model
    from arcuate.models.runtime import choose_device, configure_cuda

    target = choose_device(device, "device")
    configure_cuda(RuntimeSettings(), target)
    checkpoint = find_checkpoint(*split_parent(os.fspath(local)))
    model = TorchModel(load_model(checkpoint).to(target))
    if search is None:
        return Decoder(model, None, session)
    head = choose_head(checkpoint, model.transducer is not None, search.head)
    if model.transducer is not None:
        used = {"ctc": "the CTC head", "transducer": "the transducer", "both": "both heads, CTC and transducer"}
        logger.info(f"decoding with {used[head]}")
    return Decoder(model, make_search(model, search, head), session)


def _load_export(path: Path, search: SearchOptions | None, session: str | None) -> Decoder:
    file = open_export(path)
    model = load_exported(file)
    if search is None:
        return Decoder(model, None, session)
    if search.lm == "default" and not file.has_words:
        logger.info(f"{path} has no language model; decoding phonemes")
        search = search.model_copy(update={"lm": "none"})
    head = choose_head(file, model.transducer is not None, search.head)
    return Decoder(model, make_search(model, search, head, stored_words(file)), session)


def make_search(
    model: AcousticModel, options: SearchOptions, head: Head = "ctc", stored: StoredWords | None = None
) -> Search:
    """The search over the outputs of a model: for words, or for phonemes with `lm="none"`."""
    words = None if options.lm == "none" else load_search(model.layout.classes, options, stored=stored)
    if head == "ctc":
        return words or GreedySearch(model.layout.classes)
    from arcuate.decoding.joint import joint_search  # its Numba kernels take half a second to load
    from arcuate.decoding.transducer import require_transducer

    return joint_search(require_transducer(model.transducer, "this model"), head, words, model.layout.classes)


def load_search(
    classes: Sequence[str],
    options: SearchOptions,
    stored: StoredWords | None = None,
    progress: Progress | None = None,
) -> "WordSearch":
    """Build the word search over frames with these classes.

    With `stored`, `default` names the lexicon and the language model of an exported model.
    """
    from arcuate.decoding.word_search.search import build_word_search
    from arcuate.language.lexicon import open_lexicon
    from arcuate.language.ngram.open import open_model

    order = word_order(classes)
    lexicon = stored.lexicon if stored and options.lexicon == "default" else None
    lexicon = lexicon or open_lexicon(options.lexicon, order.classes)
    if tuple(lexicon.classes) != order.classes:
        raise UserError(
            f"the classes of the lexicon {options.lexicon} differ from those of the frames; give a lexicon over"
            f" {' '.join(order.classes[:4])} …"
        )
    model = stored.model if stored and options.lm == "default" else None
    model = model or open_model(options.lm, progress)
    lexicon, weights = _add_words(lexicon, options.words)
    settings, _ = options.weights(None if stored is None else stored.settings)
    return build_word_search(lexicon, model, settings, order=order, weights=weights)


def stored_words(file: ExportedFile) -> StoredWords | None:
    """Lexicon, n-gram and weights of an exported model, validated; None if it has none."""
    if not file.has_words:
        return None
    settings = parse_decoding_config(file.metadata.decoding, str(file.path))
    return StoredWords(read_lexicon(file, word_order(file.layout.classes).classes), read_language_model(file), settings)


def choose_head(source: Path | ExportedFile, has_transducer: bool, head: str | None) -> Head:
    """The given head; by default both if a checkpoint or file records that its transducer was trained, else CTC."""
    if head is None:
        if isinstance(source, ExportedFile):
            return source.metadata.head
        return trained_head(source) if has_transducer else "ctc"
    chosen = check_head(head)
    if chosen != "ctc" and not has_transducer:
        path = source.path if isinstance(source, ExportedFile) else source
        raise UserError(f"{path} has no transducer; use the head ctc, or train with transducer.enabled=true")
    return chosen


def trained_head(checkpoint: Path) -> Head:
    """The heads of a checkpoint whose losses had a weight in training; CTC for a model without a training state."""
    path = checkpoint / STATE_FILE
    if not path.is_file():
        return "ctc"
    state: Mapping[str, Any] = json.loads(path.read_bytes())
    return check_head(str(state.get("head", "ctc")))


def _add_words(lexicon: "Lexicon", words: Sequence[str]) -> tuple["Lexicon", dict[str, float]]:
    """Add words given as `word`, `word=weight` or `word=weight=PH ON EMES`; returns their weights too."""
    weights: dict[str, float] = {}
    for given in words:
        word, weight, phones = _parse_word(given, lexicon)
        weights[word] = weight
        if phones is not None:
            unknown = [p for p in phones if p not in lexicon.classes]
            if unknown or not phones:
                wrong = f"{unknown[0]!r} is not a class of the frame scores" if unknown else "no phonemes given"
                raise UserError(f"--words {given!r}: {wrong}")
            lexicon = lexicon.with_entries([(word, phones)])
    return lexicon.with_words(word for word in weights if word not in lexicon), weights


def _parse_word(given: str, lexicon: "Lexicon") -> tuple[str, float, list[str] | None]:
    """Word, weight and pronunciation of one of `words`; a word that is not in the lexicon is normalised."""
    from arcuate.data.text import normalise_text

    typed, *rest = given.split("=")
    word = typed if typed in lexicon else normalise_text(typed)
    expected = "should be word, word=weight or word=weight=PHONEMES"
    if len(rest) > 2 or len(word.split()) != 1:
        raise UserError(f"--words {given!r} {expected}")
    try:
        weight = float(rest[0]) if rest and rest[0] else 0.0
    except ValueError:
        raise UserError(f"--words {given!r} {expected}") from None
    if not -_MAX_WORD_WEIGHT <= weight <= _MAX_WORD_WEIGHT:
        raise UserError(
            f"--words {given!r}: expected a weight between -{_MAX_WORD_WEIGHT:g} and {_MAX_WORD_WEIGHT:g} nats"
        )
    return word, weight, rest[1].split() if len(rest) > 1 else None
