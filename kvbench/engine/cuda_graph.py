"""CUDA graphs of decoding steps: a step is recorded once and replayed for every token after it.

Everything that a step changes is in the memory of the device (`kvbench.cache.device_batch`), so that only the count of
tokens is left for the host. A step is called instead of replayed when a store has to grow or the sequences change; then
the steps are recorded again. Finished sequences stay in the batch until the rest fits a smaller `bucket`.

Shapes: B batch, V vocabulary.
"""

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.device_batch import DeviceBatch
from kvbench.engine.logits import next_logits

log = logging.getLogger(__name__)

WARM_UP = 2  # steps after which all kernels are compiled and all memory of a step is allocated


def bucket(sequences: int) -> int:
    """The batch size for this many sequences: the next one of 1, 2, 4, 8, 16, 24, 32 and so on."""
    return 1 << (sequences - 1).bit_length() if sequences <= 8 else -(-sequences // 8) * 8


def recorded(cache: KVCache) -> DeviceBatch | None:
    """The batch on the device, if it has all sequences of the cache and its steps can be recorded."""
    batch = cache.batch
    return batch if batch is not None and batch.replayable and len(batch.groups) == len(cache.groups) else None


class Recorder:
    """Runs decoding steps: first calls of the model, then replays of a recorded one.

    strict: raise ValueError if a step cannot be recorded; otherwise log one warning and call every step.
    """

    def __init__(self, model: PreTrainedModel, strict: bool = True) -> None:
        self._model, self._strict = model, strict
        self._batch: DeviceBatch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._called = 0  # steps of this batch
        self.failed = False

    def step(self, cache: KVCache, token: Tensor, places: Tensor) -> Tensor:
        """The logits [B,V] after one token [B,1] of every sequence at places [B,1]; valid until the next step."""
        cache.on_device()
        batch = recorded(cache)
        if batch is not self._batch:
            self._batch, self._graph, self._called = batch, None, 0
        if batch is not None and batch.room > 0 and not self.failed:
            if self._called >= WARM_UP and self._graph is None:
                self._graph = self._record(batch, cache, token)
            self._called += 1
        if self._graph is None or batch is None or batch.room == 0:
            return next_logits(self._model, token, places, cache)
        self._token.copy_(token)
        self._graph.replay()
        batch.count(1)
        return self._logits

    def _record(self, batch: DeviceBatch, cache: KVCache, token: Tensor) -> torch.cuda.CUDAGraph | None:
        """Record a step, which computes nothing; None after a warning if that failed."""
        self._token, graph, seen = token.clone(), torch.cuda.CUDAGraph(), cache.seen
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = next_logits(self._model, self._token, batch.slots.places, cache)
        except RuntimeError as error:
            why = f"a decoding step on {type(self._model).__name__} cannot be recorded ({str(error).splitlines()[0]})"
            if self._strict:
                raise ValueError(f"{why}: use engine.cuda_graph=false") from error
            log.warning("%s: steps are not recorded", why)
            self.failed = True
        finally:
            batch.count(seen - cache.seen)
        return None if self.failed else graph
