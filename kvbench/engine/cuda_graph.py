"""CUDA graphs of decoding steps: a step is recorded once and replayed for every token after it.

Everything that a step changes is in the memory of the device (`kvbench.cache.table`), so that only the count of
tokens is left for the host. Steps are recorded anew if the cache changes its `version`; the first step after that is
called, so that all kernels are compiled and all constants are on the device.

Shapes: P rows of a step, V vocabulary.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.engine.logits import next_logits
from kvbench.errors import first_line

log = logging.getLogger(__name__)


class GraphRecorder:
    """Records calls of a model.

    strict: raise ValueError if a call cannot be recorded; otherwise log one warning, and `failed` is true. An error
    inside a recording may be one of the call: the call that follows raises it.
    """

    names = "a decoding step", "steps"  # of a call and of calls, in messages

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        self._model, self._strict = model, strict
        self.failed = False
        self._error: Exception | None = None  # of the last recording

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, cache: KVCache) -> Iterator[None]:
        """Record what is launched inside, which computes nothing."""
        inside: Exception | None = None
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                try:
                    yield
                except Exception as error:  # the end of a recording that failed raises another one
                    inside = error
        except RuntimeError as error:
            inside = inside or error
        for sequence in cache.sequences:
            inside, sequence.error = inside or sequence.error, None
        self._error = inside

    def call(self, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """The logits [B,V] of a call that is not recorded. If a recording failed and the call does not, it says so."""
        logits = next_logits(self._model, ids, positions, cache)
        error, self._error = self._error, None
        if error is not None and all(sequence.error is None for sequence in cache.sequences):
            why = f"{self.names[0]} on {type(self._model).__name__} cannot be recorded ({first_line(error)})"
            if self._strict:
                raise ValueError(f"{why}: use engine.cuda_graph=false") from error
            log.warning("%s: %s are not recorded", why, self.names[1])
            self.failed = True
        return logits


class Recorder(GraphRecorder):
    """Runs decoding steps: first calls of the model, then replays of a recorded one."""

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        super().__init__(model, strict)
        self._called: tuple[object, ...] = ()  # the cache of the last step, and its version
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor, places: Tensor, cache: KVCache) -> Tensor:
        """The logits [P,V] after tokens [P,1] at places [P,1]; valid until the next step."""
        if self._called != (cache, cache.tables.version):
            self._called, self._graph = (cache, cache.tables.version), None
        elif self._graph is None and not self.failed:
            self._graph = self._record(cache, tokens)
        if self._graph is None:
            return self.call(tokens, places, cache)
        self._tokens.copy_(tokens)
        self._graph.replay()
        cache.tables.count(1)
        return self._logits

    def _record(self, cache: KVCache, tokens: Tensor) -> torch.cuda.CUDAGraph | None:
        """Record a step, which computes nothing; None if that failed."""
        self._tokens, graph, seen = tokens.clone(), torch.cuda.CUDAGraph(), cache.seen
        try:
            with self.capture(graph, cache):
                self._logits = next_logits(self._model, self._tokens, cache.tables.positions, cache)
        finally:
            cache.tables.count(seen - cache.seen)
        return graph if self._error is None else None
