"""A decoding step recorded once as a CUDA graph and replayed for every token after it.

What a step changes lies on the device (`kvbench.cache.device_batch`): a replay leaves the host to count tokens. Where a
store has to grow, or sequences come or go, a step is taken as it is called, and the next ones are recorded anew. A
batch is recorded for as many sequences as it has; those that end stay in its steps until the others are few enough for
a smaller `bucket`.

Shapes: B batch, V vocabulary.
"""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.device_batch import DeviceBatch
from kvbench.engine.prompt_pass import next_logits

log = logging.getLogger(__name__)

SETTLING = 2  # steps after which all kernels are compiled and all memory of a step is made


def bucket(sequences: int) -> int:
    """The smallest of 1, 2, 4, 8, 16, 24, 32 and so on that is no less."""
    return 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8


def recorded(cache: KVCache) -> DeviceBatch | None:
    """The batch in which steps of all sequences are taken now, if one is and nothing keeps it from being recorded."""
    batch = cache.batch
    return batch if batch is not None and batch.replayable and len(batch.groups) == len(cache.groups) else None


class Recorder:
    """Takes in one token of every sequence at a time: calls of the model, then replays of one that was recorded.

    strict: a step that cannot be recorded is a ValueError; else a warning is logged once and all steps are called.
    """

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        self._model, self._strict = model, strict
        self._batch: DeviceBatch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._called = 0  # steps of this batch
        self.failed = False

    def step(self, cache: KVCache, token: Tensor, places: Tensor) -> Tensor:
        """Logits [B,V] after one more token [B,1] of every sequence at places [B,1]; valid until the next step."""
        cache.on_device()
        batch = recorded(cache)
        if batch is not self._batch:
            self._batch, self._graph, self._called = batch, None, 0
        if batch is not None and batch.room > 0 and not self.failed:
            if self._called >= SETTLING and self._graph is None:
                self._graph = self._record(batch, cache, token)
            self._called += 1
        if self._graph is None or batch is None or batch.room == 0:
            return next_logits(self._model, token, None, places, cache)
        self._token.copy_(token)
        self._graph.replay()
        batch.count(1)
        return self._logits

    def _record(self, batch: DeviceBatch, cache: KVCache, token: Tensor) -> torch.cuda.CUDAGraph | None:
        """A step as a graph; recording computes nothing. None, and a warning, where it failed and that is allowed."""
        self._token, graph, seen = token.clone(), torch.cuda.CUDAGraph(), cache.seen
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = next_logits(self._model, self._token, None, batch.slots.places, cache)
        except RuntimeError as error:
            why = f"a decoding step on {type(self._model).__name__} cannot be recorded ({str(error).splitlines()[0]})"
            if self._strict:
                raise ValueError(f"{why}: use engine.cuda_graph=false") from error
            log.warning("%s: steps are called one by one", why)
            self.failed = True
        finally:
            batch.count(seen - cache.seen)
        return None if self.failed else graph
