"""Settings of the word search. docs/decoding.md gives the order in which to tune them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from arcuate.config import Settings, parse_settings, read_yaml
from arcuate.errors import UserError


class Logistic(Settings):
    """A logistic model: log-odds = intercept + weights · features."""

    intercept: float = Field(0.0, ge=-1e6, le=1e6, description="Log-odds where all features are zero.")
    weights: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] = Field(
        max_length=100, description="One weight per feature."
    )

    def log_odds(self, features: np.ndarray) -> np.ndarray:
        """(n, features) -> (n,)"""
        result: np.ndarray = self.intercept + features @ np.array(self.weights)
        return result


# Fitted on simulated trials (docs/findings.md, "Confidence of words"); the order is that of decoding/confidence.py.
_WORD = Logistic(
    intercept=-0.95657,
    weights=(0.60206, -0.03231, 0.08963, 0.00855, -0.00628, -0.04013, -0.72116, 1.19574, 1.07654, 0.33148),
)
_SENTENCE = Logistic(intercept=2.47709, weights=(0.31187, 1.06835, 0.51961, -0.03931))


class ConfidenceConfig(Settings):
    """Calibration of word confidences and sentence probabilities (`decoding/confidence.py` defines the features)."""

    word: Logistic = Field(_WORD, description="Maps the features of a word to its log-odds.")
    sentence: Logistic = Field(_SENTENCE, description="Maps the features of a sentence to its log-odds.")
    accuracy: float = Field(0.95, gt=0.0, lt=1.0, description="Target fraction of accepted words that are correct.")
    accept_above: float = Field(
        0.737,
        ge=0.0,
        le=1.0,
        description="Lowest confidence of an accepted word in trials without a session, to reach `accuracy`.",
    )
    log_odds: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...] = Field(
        (),
        max_length=1000,
        description="Quantiles of the log-odds of calibration words; empty: all sessions use `accept_above`.",
    )
    calibrated_on: str = Field(
        "simulated trials", max_length=200, description="Trials that the weights were fitted on."
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> "ConfidenceConfig":
        for name, model, default in (("word", self.word, _WORD), ("sentence", self.sentence, _SENTENCE)):
            if len(model.weights) != len(default.weights):
                raise ValueError(f"{name}.weights: expected {len(default.weights)} numbers, got {len(model.weights)}")
        return self


class DecodingConfig(Settings):
    """Weights and limits of the word search, in nats.

    score = acoustic + lm_weight · n-gram + word_bonus · words. The acoustic score includes
    `silence_bonus`, `missing_silence_bonus` and `blank_penalty`. `ctc_weight` and `ilm_weight` apply if the transducer
    is used too.
    """

    beam: int = Field(200, ge=1, le=1_000_000, description="Maximum number of beam entries per frame.")
    threshold: float = Field(
        12.0, gt=0.0, le=1e9, description="Largest score difference from the best beam entry, in nats."
    )
    lm_weight: float = Field(0.8, ge=0.0, le=100.0, description="Factor on the n-gram log-probability.")
    word_bonus: float = Field(0.8, ge=-100.0, le=100.0, description="Score added per word, in nats.")
    silence_bonus: float = Field(
        -2.5, ge=-100.0, le=100.0, description="Score added per silence between words, in nats."
    )
    missing_silence_bonus: float = Field(
        -10.0,
        ge=-100.0,
        le=100.0,
        description="Score added per word that follows another word without a silence, in nats.",
    )
    blank_penalty: float = Field(0.5, ge=-100.0, le=100.0, description="Score subtracted per blank frame, in nats.")
    ctc_weight: float = Field(
        1.0, ge=0.0, le=100.0, description="Weight of the CTC head if the transducer, with weight 1, is used too."
    )
    ilm_weight: float = Field(
        0.6,
        ge=0.0,
        le=100.0,
        description="Weight of the internal language model subtracted from the transducer's word scores.",
    )
    confidence: ConfidenceConfig = Field(
        ConfidenceConfig(), description="Calibration of confidences, as fitted by `arcuate tune`."
    )


def read_decoding_config(path: Path) -> tuple[DecodingConfig, dict[str, Any]]:
    """Read search settings from a YAML file, with the record of `arcuate tune` if there is one."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path} must be a mapping of settings, such as 'lm_weight: 0.8'")
    tuned = tree.pop("tuned", None)
    return parse_decoding_config(tree, str(path)), tuned if isinstance(tuned, dict) else {}


def parse_decoding_config(tree: Mapping[str, Any], where: str) -> DecodingConfig:
    """Validate search settings; `where` names their origin in error messages."""
    return parse_settings(DecodingConfig, tree, where, noun="search settings of")
