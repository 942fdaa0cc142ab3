"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import complete_from, complete_recipe

# --- Recipes and data ------------------------------------------------------------------------------------

RecipeName = Annotated[
    str,
    typer.Argument(
        help="Packaged recipe, YAML file or run folder; see: arcuate recipes list.",
        autocompletion=complete_recipe,
    ),
]
OverrideList = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as train.steps=200.")
]
StorePath = Annotated[Path, typer.Option("--data", help="Prepared store.")]

# --- Decoding --------------------------------------------------------------------------------------------

ScoresPath = Annotated[Path, typer.Argument(help="Frame scores (.npz), or a run folder.")]
LexiconFile = Annotated[str, typer.Option("--lexicon", help="Lexicon file, or `default` (English).")]
LmFile = Annotated[str, typer.Option("--lm", help="Model file, ARPA file, or `default` (English).")]
ReferencesFile = Annotated[Path | None, typer.Option("--references", help="JSON lines with `text`, one per trial.")]
WeightsFile = Annotated[Path | None, typer.Option("--config", help="Search weights written by `arcuate tune`.")]
Beam = Annotated[
    int | None, typer.Option("--beam", min=1, max=1_000_000, help="Maximum number of beam entries per frame.")
]
Threshold = Annotated[
    float | None, typer.Option("--threshold", help="Largest score difference from the best beam entry, in nats.")
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="With a run folder: ctc, transducer or both; default: both if the transducer was trained.",
        autocompletion=complete_from("ctc", "transducer", "both"),
    ),
]
SplitName = Annotated[str, typer.Option("--split", help="With a run folder: val, test, dev or train.")]
MovedStore = Annotated[
    Path | None, typer.Option("--data", help="With a run folder: path of the store, if moved after training.")
]
AddedWords = Annotated[
    list[str] | None, typer.Option("--word", help="Word to add: word, word=weight or word=weight=PHONEMES.")
]

# --- Live decoding ---------------------------------------------------------------------------------------

ModelPath = Annotated[Path, typer.Argument(help="Run folder, or model folder written by `arcuate import`.")]
NoWords = Annotated[bool, typer.Option("--no-words", help="Phonemes only: no lexicon, no language model.")]
ReplayedStore = Annotated[Path | None, typer.Option("--data", help="Store to replay; default: that of the run.")]
SessionName = Annotated[
    str | None, typer.Option("--session", help="Session to replay; with live input, session layer to decode with.")
]
Adapt = Annotated[
    str | None,
    typer.Option(
        "--adapt",
        help="Online adaptation, known or new session: none, statistics, one-step, replay or entropy.",
        autocompletion=complete_from("none", "statistics", "one-step", "replay", "entropy"),
    ),
]
AdaptSetting = Annotated[
    list[str] | None, typer.Option("--set", help="With --adapt: adaptation setting as key=value, such as lr=5e-4.")
]
