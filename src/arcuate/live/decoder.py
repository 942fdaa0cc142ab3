"""`StreamingDecoder`: neural bins in, words out, as the bins arrive, with a torch model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from arcuate.adaptation.state import SessionState
from arcuate.data.readers.source import is_safe_name
from arcuate.data.statistics import Statistics
from arcuate.data.store import Store
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.decoder import batch_statistics
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.stream import SentenceStream
from arcuate.errors import UserError
from arcuate.evaluation.causal import load_causal
from arcuate.evaluation.evaluate import choose_head, read_source
from arcuate.live.adaptation import AdaptationStatus, DecodedSentence, StreamAdapter, load_setup
from arcuate.live.engine import Engine, Rescorer, load_search, make_engine
from arcuate.models.interfaces import Outputs
from arcuate.models.io import load_model
from arcuate.models.layout import Frames
from arcuate.models.model import Model, StreamState
from arcuate.models.runtime import choose_device, configure_cuda
from arcuate.progress import Progress, logger
from arcuate.run import open_run


class StreamingDecoder(SentenceStream):
    """One stream: `push` bins as they arrive, `finish` the sentence, or `reset` to discard it.

    `stream()` creates further streams that share all weights and nothing else.
    """

    _model: Model

    def __init__(self, engine: Engine, session: str | None = None, statistics: Statistics | None = None) -> None:
        super().__init__(engine.layout, engine.search, engine.lock, session, engine.joint)
        self.engine = engine
        self.adapter: StreamAdapter | None = None
        if engine.adaptation is not None:
            self.check_session(self.session)
            self.adapter = StreamAdapter(engine.adaptation, self.session)
        self.reset(self.session, statistics)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        lm: str | None = "default",
        lexicon: str = "default",
        decoding: DecodingConfig | str | Path | None = None,
        beam: int | None = None,
        session: str | None = None,
        statistics: Statistics | None = None,
        llm: str | Path | None = None,
        head: str | None = None,
        adapt: bool = False,
        data: str | Path | Store | None = None,
        checkpoint: str = "best",
        device: str = "cpu",
        warm: bool = True,
        progress: Progress | None = None,
    ) -> "StreamingDecoder":
        """Load the model of a run with a language model and a lexicon; `lm=None` decodes phonemes.

        `decoding` are settings of the word search or a file of `arcuate tune`; `beam` overrides their beam. `session`
        selects the session layer (default: the last one). `statistics` are those of the block if known; without them a
        model that normalises uses running statistics of its stream. `llm` is a causal language model that rescores the
        n-best list at the end of every sentence. `head`: ctc, transducer or both; default: both if the model has a
        trained transducer. `warm` decodes zeros, so that compilation does not delay the first sentence.

        `adapt`: after each sentence the session layer may be updated, and `session` may be new to the model. `data` is
        a store with known sessions against which drift is measured (default: the run's own); their trials are decoded
        first, which `progress` reports.
        """
        source = read_source(open_run(path), checkpoint)
        target = choose_device(device, "device")
        configure_cuda(source.config.runtime, target)
        model = load_model(source.checkpoint).to(target)
        chosen = choose_head(source, head)
        search = None if lm is None else load_search(model, lm, lexicon, decoding, beam)
        if llm is not None and search is None:
            raise UserError("rescoring needs words; pass a language model, such as lm='default'")
        engine = make_engine(model, search, None if llm is None else Rescorer(load_causal(Path(llm))), chosen)
        if model.transducer is not None:
            used = {"ctc": "the CTC head", "transducer": "the transducer", "both": "both heads, CTC and transducer"}
            logger.info(f"decoding with {used[chosen]}")
        if adapt:
            engine = replace(engine, adaptation=load_setup(path, model, search is not None, data, progress))
        if warm:
            warm_up(engine)
        return cls(engine, session, statistics)

    def stream(self, session: str | None = None, statistics: Statistics | None = None) -> "StreamingDecoder":
        """Create another stream over the same weights."""
        return StreamingDecoder(self.engine, session or self.session, statistics)

    def reset(self, session: str | None = None, statistics: Statistics | None = None) -> None:
        """Discard the sentence and start a new one, in another session or with other statistics if given."""
        if session is not None:
            self.check_session(session)
            if self.adapter is not None and self.adapter.state.session != session:
                self.adapter.start(session)
        super().reset(session, statistics)

    def precompute(self) -> None:
        """Between bins: compute the part of the next frame that does not depend on the next bins."""
        with torch.inference_mode():
            self._now = replace(self._now, model=self._model.precompute(self._now.model))

    def check_session(self, session: str) -> None:
        """Raise `UserError` for a session that this stream cannot decode."""
        if self.engine.adaptation is not None and is_safe_name(session):
            return  # a new session starts with the layer of the nearest known one
        if session not in self.sessions and self.engine.adaptation is not None:
            known = ", ".join(self.sessions)
            raise UserError(f"session {session!r:.60} is unknown to this model; it was trained on {known}")
        super().check_session(session)

    # --- adaptation ---------------------------------------------------------------------------------------

    @property
    def adaptation(self) -> AdaptationStatus | None:
        """Status of adaptation; None if this stream does not adapt."""
        return None if self.adapter is None else self.adapter.status

    @property
    def session_state(self) -> SessionState | None:
        """Newest state of adaptation, an immutable value that `reset_adaptation` accepts."""
        return None if self.adapter is None else self.adapter.state

    def reset_adaptation(self, state: SessionState | None = None) -> None:
        """Return to the initial layer, or to an earlier `session_state`."""
        if self.adapter is None:
            super().reset_adaptation(state)
        else:
            self.adapter.reset(state)

    def wait_for_adaptation(self) -> None:
        """Block until all finished sentences were processed. Otherwise a stream never waits for updates."""
        if self.adapter is not None:
            self.adapter.wait()

    def _use_newest_state(self) -> None:
        """Before the first bins of a sentence: switch to the updates made since the last one ended."""
        is_new = not self.n_bins and not self.n_frames
        if self.adapter is not None and is_new and self._state is not self.adapter.state:
            self._start_sentence()

    def _submit_update(self, best: Hypothesis) -> None:
        if self.adapter is not None and self._now.bins:
            bins = torch.from_numpy(np.concatenate(self._now.bins)).to(self._device)
            statistics = self._now.model.front_end.statistics
            self.adapter.submit(DecodedSentence(self._base, bins, statistics, best))

    # --- decoding -----------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self.engine.model.head.weight.device

    @property
    def _keeps_bins(self) -> bool:
        return self._uses_running_statistics or self.adapter is not None

    def _start_model(self, statistics: Statistics | None) -> StreamState:
        self._base = self.engine.rolling_model if self._uses_running_statistics else self.engine.model
        if self.adapter is not None:
            self._state = self.adapter.state
            self._model, session = self.adapter.model(self._base, self._state), 0
        else:
            self._model, session = self._base, self.sessions.index(self.session)
        return self._model.start(session, batch_statistics(statistics, self._device))

    def _step_model(self, chunk: np.ndarray) -> tuple[Frames, StreamState]:
        self._use_newest_state()
        with torch.inference_mode():
            outputs, state = self._model.step(self._now.model, torch.from_numpy(chunk)[None].to(self._device))
        return _new_frames(outputs), state

    def _finish_model(self) -> Frames:
        with torch.inference_mode():
            return _new_frames(self._model.finish(self._now.model))

    def _final_nbest(self, n: int) -> list[Hypothesis]:
        """The n-best list with confidences, rescored if there is a causal language model."""
        rescorer, search = self.engine.rescorer, self.engine.search
        if search is None or rescorer is None:
            return super()._final_nbest(n)
        hypotheses, lm_weight = self.nbest(max(n, rescorer.n_best)), search.settings.lm_weight
        if hypotheses[0].total is None:
            return hypotheses
        # The rescorer divides acoustic scores by the weight of the n-gram.
        return self._with_confidence(rescorer(hypotheses, lm_weight), scale=lm_weight)


def _new_frames(outputs: Outputs) -> Frames:
    """Outputs of a batch of one."""
    return Frames(outputs.log_probs["ctc"][0].float().cpu().numpy(), outputs.frames[0].float().cpu().numpy())


def warm_up(engine: Engine) -> None:
    """Compile kernels and fill caches, so that the first sentence is not delayed."""
    if engine.search is not None:
        engine.search.warm_up()
    stream = StreamingDecoder(engine)
    for _ in range(40):
        stream.push(np.zeros((1, stream.n_channels), np.float32))
        stream.precompute()
    stream.finish_nbest(2)
    stream.wait_for_adaptation()
