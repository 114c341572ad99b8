"""CUDA graphs of decoding steps: a step is recorded once and replayed for every token after it.

Everything that a step changes is in the memory of the device (`kvbench.cache.device_batch`), so that only the count of
tokens is left for the host. Steps are recorded anew if the batch changes its `version`; the first step after that is
called, so that all kernels are compiled and all constants are on the device.

Shapes: P rows of a step, V vocabulary.
"""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.device_batch import DeviceBatch
from kvbench.engine.logits import next_logits

log = logging.getLogger(__name__)


class Recorder:
    """Runs decoding steps: first calls of the model, then replays of a recorded one.

    strict: raise ValueError if a step cannot be recorded; otherwise log one warning and call every step.
    """

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        self._model, self._strict = model, strict
        self._called: tuple[object, ...] = ()  # the batch of the last step, and its version
        self._graph: torch.cuda.CUDAGraph | None = None
        self.failed = False

    def __call__(self, tokens: Tensor, places: Tensor, batch: KVCache) -> Tensor:
        """The logits [P,V] after tokens [P,1] at places [P,1]; valid until the next step."""
        assert isinstance(batch, DeviceBatch)
        if self._called != (batch, batch.version):
            self._called, self._graph = (batch, batch.version), None
        elif self._graph is None and not self.failed:
            self._graph = self._record(batch, tokens)
        if self._graph is None:
            return next_logits(self._model, tokens, places, batch)
        self._tokens.copy_(tokens)
        self._graph.replay()
        batch.count(1)
        return self._logits

    def _record(self, batch: DeviceBatch, tokens: Tensor) -> torch.cuda.CUDAGraph | None:
        """Record a step, which computes nothing; None after a warning if that failed."""
        self._tokens, graph, seen = tokens.clone(), torch.cuda.CUDAGraph(), batch.seen
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = next_logits(self._model, self._tokens, batch.positions, batch)
        except RuntimeError as error:
            why = f"a decoding step on {type(self._model).__name__} cannot be recorded ({str(error).splitlines()[0]})"
            if self._strict:
                raise ValueError(f"{why}: use engine.cuda_graph=false") from error
            log.warning("%s: steps are not recorded", why)
            self.failed = True
        finally:
            batch.count(seen - batch.seen)
        return None if self.failed else graph
