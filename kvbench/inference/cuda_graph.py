"""A decoding step recorded once as a CUDA graph and replayed for every token after it.

A layer at its budget overwrites the slot it gave up, so that a step works on the same tensors as the one before and
leaves every number the host holds as it found it. That is checked when a step is recorded, nothing is assumed: what a
step put into new tensors is copied back to where it was read, and a step that moves a number of the host is refused.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.policies.policy import Policy

SETTLING = 3  # decoded tokens until every layer overwrites the slot it gave up, and all kernels are compiled


def check_graph(policy: Policy, device: torch.device) -> None:
    """ValueError unless decoding steps of this policy on this device can be recorded."""
    if device.type != "cuda":
        raise ValueError(f"engine.cuda_graph=true needs a CUDA device, got device={device.type}")
    if policy.scorer is None or policy.schedule.decode != "evict":
        raise ValueError(
            f"engine.cuda_graph=true replays one step on tensors of one size, but {policy.name} grows while decoding: "
            "use a policy that evicts then (decode=evict), or engine.cuda_graph=false"
        )
    if not policy.store.replayable or policy.needs.surprisal or policy.filter is not None:
        raise ValueError(
            f"engine.cuda_graph=true replays steps of dense stores that need nothing but the token, and {policy.name} "
            "has no such steps: use engine.cuda_graph=false"
        )


class Recorder:
    """Takes in one token of every sequence at a time: calls of the model until every layer is at its budget, then
    replays of the one that was recorded.

    All sequences go on at the same position. ValueError if a step is not the same from token to token.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._settled = 0  # steps in a row that began and ended at the budget
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, token: Tensor) -> Tensor:
        """Logits [B,V] after one more token [B,1]; valid until the next step."""
        if self._graph is None:
            self._settled = self._settled + 1 if self._cache.group.at_budget else 0
            if self._settled <= SETTLING:
                return self._call(token)
            self._record(token)
        assert self._graph is not None
        self._token.copy_(token)
        self._graph.replay()
        self._cache.group.progress.tick()
        return self._logits

    def _call(self, token: Tensor) -> Tensor:
        """The same without a recording, told its place in the same way: kernels and constants are then ready for it."""
        progress = self._cache.group.progress
        progress.clock = torch.full_like(token, progress.columns)
        try:
            return _step(self._model, self._cache, token, progress.clock)
        finally:
            progress.clock = None

    def _record(self, token: Tensor) -> None:
        cache, progress = self._cache, self._cache.group.progress
        self._token = token.clone()
        progress.clock = torch.full_like(token, progress.columns)
        seen, columns, before = list(progress.seen), progress.columns, dict(_held(cache))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = _step(self._model, cache, self._token, progress.clock)
                _restore(before, dict(_held(cache)), cache.policy.name)
                progress.clock.add_(1)
        except RuntimeError as error:
            raise ValueError(
                f"the step of {cache.policy.name} on {type(self._model).__name__} cannot be recorded "
                f"({str(error).splitlines()[0]}): use engine.cuda_graph=false"
            ) from error
        finally:
            progress.clock = None
            progress.seen, progress.columns = seen, columns  # recording computes nothing
        self._graph = graph


def _step(model: PreTrainedModel, cache: KVCache, token: Tensor, clock: Tensor) -> Tensor:
    """Logits [B,V] of one decoded token [B,1] at positions [B,1]."""
    out = model(input_ids=token, position_ids=clock, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1]
    return logits


Place = tuple[Any, Any]
"""Who holds a value, and under which name or key."""


def _held(cache: KVCache) -> Iterator[tuple[str, tuple[Place, Any]]]:
    """Everything the layers of a cache hold, by its path: where it is, and the value."""
    for layer in cache.group.layers:
        yield from _inside(layer, f"layer {layer.index}")
    yield from _inside(cache.group.shared, "shared")


def _inside(owner: Any, path: str) -> Iterator[tuple[str, tuple[Place, Any]]]:  # noqa: ANN401 - anything may hold
    items = owner.items() if isinstance(owner, dict) else vars(owner).items()
    for name, value in list(items):
        here = f"{path}.{name}"
        if isinstance(value, KVCache):
            continue
        if isinstance(value, dict) or type(value).__module__.startswith("kvbench."):
            yield from _inside(value, here)
        else:
            yield here, ((owner, name), list(value) if isinstance(value, list) else value)


def _restore(before: dict[str, tuple[Place, Any]], after: dict[str, tuple[Place, Any]], policy: str) -> None:
    """Bring what a step holds back into the tensors it read, so that the next one finds it there."""
    if before.keys() != after.keys():
        moved = sorted(before.keys() ^ after.keys())[0]
        raise ValueError(f"{policy} holds other things after a step than before ({moved}), so it cannot be recorded")
    for path, (place, old) in before.items():
        new = after[path][1]
        if old is new:
            continue
        if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype:
            _put(place, old.copy_(new))
        elif isinstance(old, Tensor) or isinstance(new, Tensor) or old != new:
            raise ValueError(f"{policy} changes {path} from step to step, so its step cannot be recorded")


def _put(place: Place, value: Tensor) -> None:
    owner, name = place
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
