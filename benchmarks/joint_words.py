"""Words by the CTC head and by both heads: WER with and without the internal language model, and time per sentence.

    python benchmarks/joint_words.py runs/mode --truth data/demo/source/simulation_truth.jsonl [--speed-only]

RUN has a trained transducer, on the recordings of `arcuate demo`. Tuned weights are those of the other split (`val` or
`test`); the texts of `test` come from the simulation. The time of the
exact scores is compared with that of the two losses on the same candidates.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.joint import JointWordSearch
from arcuate.decoding.options import SearchOptions
from arcuate.decoding.transducer import score_sequences
from arcuate.evaluation.decode import DecodingTask, TrialSource, open_task
from arcuate.evaluation.significance import score_difference
from arcuate.evaluation.transcribe import Transcript, transcribe
from arcuate.evaluation.tune import tune
from arcuate.files import DECODINGS
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.losses.rnnt import chunked_rnnt_loss
from arcuate.models.layout import check_head
from arcuate.models.transducer import ArrayHead

N_TIMED = 30
SPLITS = ("val", "test")


def write_references(truth: Path, out: Path) -> Path:
    """Texts of the test trials by id."""
    rows = [json.loads(line) for line in truth.read_text("utf-8").splitlines()]
    lines = [
        {"id": f"{r['session']}/test/{r['number']:04d}", "text": r["text"], "session": r["session"]}
        for r in rows
        if r["split"] == "test"
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def open_split(run: Path, split: str, references: Path | None, head: str) -> DecodingTask:
    trials = TrialSource(run, references if split == "test" else None, split, None)
    return open_task(trials, SearchOptions(head=check_head(head)), None, DECODINGS, None)


def decode(task: DecodingTask, settings: DecodingConfig) -> list[Transcript]:
    return transcribe(task.search.with_settings(settings), task.trials, task.references, 10)


def scores(transcripts: list[Transcript]) -> list:
    return [t.word_errors for t in transcripts if t.word_errors is not None]


def report(name: str, by_split: dict[str, list[Transcript]], reference: dict[str, list[Transcript]] | None) -> None:
    errors = {split: scores(found) for split, found in by_split.items()}
    rates = [100 * sum(s.errors for s in e) / sum(s.length for s in e) for e in errors.values()]
    pooled = [s for e in errors.values() for s in e]
    overall = 100 * sum(s.errors for s in pooled) / sum(s.length for s in pooled)
    ms = 1000 * np.mean([t.seconds for found in by_split.values() for t in found])
    line = f"{name:44} val {rates[0]:5.2f}  test {rates[1]:5.2f}  both {overall:5.2f} %  {ms:6.1f} ms"
    if reference is not None:
        for where, splits in (("test", SPLITS[1:]), ("both", SPLITS)):
            first, second = ([s for split in splits for s in scores(found[split])] for found in (by_split, reference))
            found = score_difference(first, second)
            assert found is not None
            interval = f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
            line += f"  against CTC, {where}: {100 * found.rate:+.2f} ({interval}), p = {found.p:.4f}"
    print(line, flush=True)


def time_scoring(task: DecodingTask) -> None:
    """Exact scores of the candidates by the prefix tree, and by the losses of training."""
    search = task.search
    assert isinstance(search, JointWordSearch) and isinstance(search.transducer, ArrayHead)
    head, by_tree, by_loss, n = search.transducer.transducer, 0.0, 0.0, 0
    for trial in task.trials[:N_TIMED]:
        candidates = search.candidates(search.step(search.start(), trial), 10)
        sequences = list(dict.fromkeys(t for words in candidates for t in search.pronunciations(words)))
        n += len(sequences)
        started = time.process_time()
        found = score_sequences(search.transducer, trial, sequences)
        by_tree += time.process_time() - started
        started = time.process_time()
        with torch.inference_mode():
            n_tokens = torch.tensor([len(s) for s in sequences])
            rows = [torch.tensor(s, dtype=torch.int64) for s in sequences]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            n_frames = torch.full((len(rows),), len(trial))
            joint = head(torch.from_numpy(trial.for_transducer)[None], tokens)
            frames = joint.frames.expand(len(rows), -1, -1)
            losses = chunked_rnnt_loss(joint.logits, frames, joint.predicted, tokens, n_frames, n_tokens, 0)
            log_probs = torch.from_numpy(trial.log_probs)[None].expand(len(rows), -1, -1)
            ctc_loss(log_probs, n_frames, tokens, n_tokens, CTCSettings())
        by_loss += time.process_time() - started
        assert np.allclose(found.transducer, -losses.numpy(), atol=1e-2)
    count = min(N_TIMED, len(task.trials))
    print(
        f"exact scores of {n / count:.0f} pronunciations: {1000 * by_tree / count:.1f} ms by prefix tree,"
        f" {1000 * by_loss / count:.1f} ms by the losses (ratio {by_loss / by_tree:.1f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tuning per split and row")
    parser.add_argument("--speed-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    references = write_references(args.truth, args.run / "results" / "test-texts.jsonl")
    tasks = {
        head: {split: open_split(args.run, split, references, head) for split in SPLITS} for head in ("ctc", "both")
    }
    time_scoring(tasks["both"]["val"])
    plain = DecodingConfig()
    without = plain.model_copy(update={"ilm_weight": 0.0})
    reference = {split: decode(tasks["ctc"][split], plain) for split in SPLITS}
    report("CTC, default weights", reference, None)
    old = without.model_copy(update={"ctc_weight": 0.3})
    for name, settings in (("CTC weight 0.3, ILM 0", old), ("ILM 0", without), ("default weights", plain)):
        report(f"both heads, {name}", {s: decode(tasks["both"][s], settings) for s in SPLITS}, reference)
    if args.speed_only:
        return
    tuned: dict[str, dict[str, list[Transcript]]] = {}
    for head, found in tasks.items():
        tuned[head] = {}
        for split, other in (SPLITS, SPLITS[::-1]):
            labels = references if other == "test" else None
            result = tune(args.run, split=other, head=head, references=labels, budget=args.budget)
            print(head, "tuned on", other, result.settings.model_dump(exclude_defaults=True), flush=True)
            tuned[head][split] = decode(found[split], result.settings)
        report(f"{head}, tuned on the other split", tuned[head], None if head == "ctc" else tuned["ctc"])


if __name__ == "__main__":
    main()
