"""Facts about the public data sets: what a complete download holds, how to cite it, and results published on it.

Error rates in percent as printed by their sources. PER is greedy and micro-averaged; a WER depends on the language
model, which is therefore part of the system's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from arcuate.data.trial import session_date

if TYPE_CHECKING:
    from arcuate.data.prepare import PrepareReport


@dataclass(frozen=True)
class Release:
    """A public data set."""

    layout: str
    identifier: str  # on the Hugging Face Hub
    name: str
    participant: str
    doi: str
    citation: str
    n_channels: int
    n_sessions: int
    trials: Mapping[str, int]  # by split
    first: date  # session
    last: date
    arrays: tuple[str, ...] = ()  # in the order of the electrodes
    targets: Literal["phonemes", "characters"] = "phonemes"
    without: Mapping[str, int] = field(default_factory=dict)  # split -> number of sessions without trials in it

    @property
    def reference(self) -> str:
        """What to cite."""
        return f"{self.citation} Data: doi:{self.doi}"


RELEASES: dict[str, Release] = {
    release.layout: release
    for release in (
        Release(
            layout="b2t25",
            identifier="brain-to-text-25",
            name="Brain-to-Text '25 (participant T15)",
            participant="t15",
            doi="10.5061/dryad.dncjsxm85",
            citation="Card NS, Wairagkar M, Iacobacci C, et al. An accurate and rapidly calibrating speech"
            " neuroprosthesis. N Engl J Med 391:609–618 (2024).",
            n_channels=512,
            n_sessions=45,
            trials={"train": 8072, "val": 1426, "test": 1450},
            first=date(2023, 8, 11),
            last=date(2025, 4, 13),
            arrays=("ventral 6v", "area 4", "55b", "dorsal 6v"),
            without={"val": 4, "test": 4},
        ),
        Release(
            layout="b2t24",
            identifier="brain-to-text-24",
            name="Brain-to-Text '24 (participant T12)",
            participant="t12",
            doi="10.5061/dryad.x69p8czpq",
            citation="Willett FR, Kunz EM, Fan C, et al. A high-performance speech neuroprosthesis. Nature"
            " 620:1031–1036 (2023).",
            n_channels=256,
            n_sessions=24,
            trials={"train": 8800, "val": 880, "test": 1200},
            first=date(2022, 4, 28),
            last=date(2022, 8, 25),
            arrays=("6v array 1", "6v array 2"),  # only the order is known
            without={"test": 9},
        ),
        Release(
            layout="falcon-h2",
            identifier="falcon-h2",
            name="FALCON H2 (handwriting, participant T5)",
            participant="t5",
            doi="10.48324/dandi.000950",
            citation="Karpowicz BM, Ye J, Fan C, et al. Few-shot Algorithms for Consistent Neural Decoding (FALCON)"
            " Benchmark. NeurIPS Datasets and Benchmarks (2024).",
            n_channels=192,
            n_sessions=26,
            trials={},
            first=date(2022, 5, 18),
            last=date(2023, 10, 9),
            targets="characters",
        ),
    )
}


@dataclass(frozen=True)
class Check:
    """One property of a download; without an expected value it could not be compared."""

    what: str
    found: str
    expected: str

    @property
    def differs(self) -> bool:
        return self.found != self.expected

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "status": "differs" if self.differs else "ok"}


def check_release(report: "PrepareReport") -> tuple[Check, ...]:
    """Compare what was read with the published numbers; empty for simulated data and other layouts.

    No checksums are published.
    """
    release = RELEASES.get(report.layout)
    if release is None or report.simulated:
        return ()
    dates = sorted(str(recorded) for session in report.sessions if (recorded := session_date(session)))
    checks: list[tuple[str, int | str, int | str]] = [
        ("sessions", len(report.sessions), release.n_sessions),
        ("channels", report.n_channels, release.n_channels),
        ("first session", dates[0] if dates else "none", str(release.first)),
        ("last session", dates[-1] if dates else "none", str(release.last)),
        *((f"{split} trials", report.splits[split]["trials"], n) for split, n in release.trials.items()),
    ]
    for split, n in release.without.items():
        found = sum(not report.files.get(f"{session}/{split}") for session in report.sessions)
        checks.append((f"sessions without {split} trials", found, n))
    checks.append(("unreadable files and trials", len(report.unreadable), 0))
    text = lambda value: f"{value:,}" if isinstance(value, int) else value
    return tuple(Check(what, text(found), text(expected)) for what, found, expected in checks)


@dataclass(frozen=True)
class PublishedResult:
    """One published error rate."""

    system: str
    dataset: str  # b2t24 or b2t25
    split: str
    metric: str  # PER or WER
    percent: float
    streaming: bool  # whether the system decodes while speech is attempted
    source: str


_HOLDOUT, _VAL, _PRIVATE = "competition hold-out, 1,200 trials", "validation, 1,426 trials", "private test, Kaggle"
_TEST, _PART_OF_TEST = "test folder, 880 trials", "test folder, 600 trials of 15 sessions"
_PAPER = "Feghhi et al. 2025, arXiv 2507.02800"
_FILES = "result files of github.com/ebrahimfeghhi/transformers_with_dietcorp and /brainaudio"
_LIGHTBEAM = "result files of github.com/ebrahimfeghhi/brainaudio, arXiv 2603.14002"
_WILLETT = "Willett et al. 2023, notebook of github.com/fwillett/speechBCI"
_CARD = "Card et al. 2024, README of nejm-brain-to-text"

RESULTS = (
    PublishedResult("unidirectional GRU", "b2t24", _TEST, "PER", 21.75, True, _FILES),
    PublishedResult("bidirectional GRU", "b2t24", _TEST, "PER", 20.5, False, _FILES),
    PublishedResult("causal time-masked Transformer", "b2t24", _TEST, "PER", 15.91, True, _FILES),
    PublishedResult("unidirectional GRU, 3-gram", "b2t24", _PART_OF_TEST, "WER", 18.9, True, _WILLETT),
    PublishedResult("unidirectional GRU, 5-gram and OPT-6.7B", "b2t24", _PART_OF_TEST, "WER", 13.7, True, _WILLETT),
    PublishedResult("unidirectional GRU, 3-gram", "b2t24", _HOLDOUT, "WER", 15.25, True, _PAPER),
    PublishedResult("unidirectional GRU, 5-gram and OPT-6.7B", "b2t24", _HOLDOUT, "WER", 11.12, True, _PAPER),
    PublishedResult("causal Transformer, 3-gram", "b2t24", _HOLDOUT, "WER", 12.17, True, _PAPER),
    PublishedResult("causal Transformer, 5-gram and OPT-6.7B", "b2t24", _HOLDOUT, "WER", 8.18, True, _PAPER),
    PublishedResult("DCoND-LIFT, 10 models and GPT-3.5", "b2t24", _HOLDOUT, "WER", 5.77, False, _PAPER),
    PublishedResult(
        "10 bidirectional Transformers, LightBeam, Llama", "b2t24", _HOLDOUT, "WER", 5.01, False, _LIGHTBEAM
    ),
    PublishedResult("official GRU", "b2t25", _VAL, "PER", 10.1, True, _CARD),
    PublishedResult("causal time-masked Transformer", "b2t25", _VAL, "PER", 8.17, True, _LIGHTBEAM),
    PublishedResult("official GRU, 5-gram and OPT-6.7B", "b2t25", _PRIVATE, "WER", 7.00, True, _LIGHTBEAM),
    PublishedResult("official GRU, LightBeam", "b2t25", _PRIVATE, "WER", 6.47, True, _LIGHTBEAM),
    PublishedResult("causal Transformer, LightBeam", "b2t25", _PRIVATE, "WER", 4.59, True, _LIGHTBEAM),
    PublishedResult(
        "10 bidirectional Transformers, LightBeam, Llama", "b2t25", _PRIVATE, "WER", 2.36, False, _LIGHTBEAM
    ),
)


def published_results(layout: object, simulated: bool) -> tuple[PublishedResult, ...]:
    """Published results on a data set; none for simulated data, which resemble a release only in their files."""
    return () if simulated else tuple(r for r in RESULTS if r.dataset == layout)
