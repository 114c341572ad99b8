"""One provider on its way through a prompt and the tokens after it, with the seconds and bytes of both.

Shapes: B batch, T prompt tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.cache.cache import KVCache
from kvbench.inference.cuda_graph import Recorder
from kvbench.tools.bench.clock import Clock, kernels_loaded
from kvbench.tools.bench.machine import release
from kvbench.tools.bench.providers import Provider, held_bytes, random_ids

WARM_UP = 1024  # prompt tokens of the run before the first timed one
RECORDED = 8  # first steps of a run whose steps are recorded or compiled, which are not timed
AT_ONCE = 2**17  # tokens of all sequences in one call of an untimed prefill
COMPILING = 3  # prefills after which one counts even if it compiled something

Step = Callable[[Tensor, Tensor], Tensor]


class Run:
    """A provider and one prompt [B,T]. `prefill` takes the prompt in anew; `decode` goes on from there.

    token [B,1]: the newest token of every sequence. new: how many tokens follow the prompt; our caches make no room for
    more, as in every run.
    """

    token: Tensor

    def __init__(self, model: PreTrainedModel, provider: Provider, ids: Tensor, new: int = 64) -> None:
        self.provider = provider
        self.cache: Cache | None = None
        self._step: Step | None = None
        self._model, self._ids, self._length = model, ids, ids.shape[1]
        self._untimed = RECORDED if provider.graphed or provider.compiled else 0
        self._new = new + self._untimed

    @torch.inference_mode()
    def prefill(self, in_parts: bool = False) -> float:
        """Milliseconds until the first new token is known. in_parts: in calls that need less memory."""
        self._model.set_attn_implementation(self.provider.attention)
        self.forget()
        clock = Clock(self._model.device)
        clock.mark()
        self.cache = self.provider.cache(self._model, self._length, self._new)
        with self.provider.prefilling(self._model):
            logits = None
            for columns in self._calls(in_parts):
                logits = self._call(columns)
        assert logits is not None
        self.token = logits[:, -1:].argmax(-1)
        clock.mark()
        if isinstance(self.cache, KVCache):
            self.cache.expect(self._new)
        self._step = self._stepper()
        self._seen = self._length
        self._left = self._untimed
        return clock.laps()[0]

    def forget(self) -> None:
        """Let go of the cache and of its memory."""
        if self.cache is not None:
            self.cache = self._step = None
            release(self._model.device)

    def _stepper(self) -> Step:
        """What decodes one token: (token [B,1], its position [1,1]) -> the likeliest next token [B,1].

        It asks nothing back from the device; what a policy asks is part of its cost.
        """
        model, cache = self._model, self.cache
        if self.provider.graphed:
            assert isinstance(cache, KVCache)
            replay = partial(Recorder(model).step, cache)
            return lambda token, position: replay(token, position.expand(len(token), -1)).argmax(-1, keepdim=True)
        forward: Callable[..., Any] = model
        if self.provider.compiled:
            torch.compiler.reset()  # for this cache's size alone: PyTorch gives up compiling after eight of them
            forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
        call = partial(forward, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return lambda token, position: call(token, position_ids=position).logits[:, -1:].argmax(-1)

    def _call(self, columns: slice) -> Tensor:
        positions = torch.arange(columns.start, columns.stop, device=self._ids.device)
        told = {"cache_position": positions} if self.provider.told_positions else {}
        logits: Tensor = self._model(
            self._ids[:, columns],
            past_key_values=self.cache,
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=1,
            **told,
        ).logits
        return logits

    def _calls(self, in_parts: bool) -> list[slice]:
        """The columns of each call of the model: those of the policy's schedule."""
        batch, total = self._ids.shape
        policy = self.provider.policy
        size = total if policy is None else policy.schedule.call_size(total)
        if in_parts and policy is not None and self.provider.grows:
            size = min(size, max(1, AT_ONCE // batch))
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]

    @torch.inference_mode()
    def decode(self, tokens: int) -> list[float]:
        """Milliseconds of each of so many decoding steps, without those that compiled a kernel if others are left."""
        assert self._step is not None, "a prompt comes before what follows it"
        untimed, self._left = self._left, 0
        if untimed:
            self.decode(untimed)
        device = self._model.device
        self._model.set_attn_implementation(self.provider.attention)
        positions = torch.arange(self._seen, self._seen + tokens, device=device)[:, None, None]
        clock, loaded = Clock(device), [kernels_loaded()]
        clock.mark()
        for position in positions:
            self.token = self._step(self.token, position)
            clock.mark()
            loaded.append(kernels_loaded())
        self._seen += tokens
        laps = clock.laps()
        return [ms for ms, a, b in zip(laps, loaded, loaded[1:], strict=False) if a == b] or laps

    def profiled(self, tokens: int) -> dict[str, float]:
        """What a GPU did in some decoding steps, per step: milliseconds it was busy, and its launches; else nothing."""
        if self._model.device.type != "cuda":
            return {}
        self.decode(1)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.decode(tokens)
        work = [event for event in found.events() or () if event.device_type.name == "CUDA"]
        busy = sum(event.time_range.elapsed_us() for event in work) / 1e3
        return {"busy_ms": busy / tokens, "launches": len(work) / tokens} if work else {}

    @property
    def held_bytes(self) -> int:
        """Bytes the cache holds now."""
        assert self.cache is not None
        return held_bytes(self.cache)

    @property
    @torch.inference_mode()
    def spare_bytes(self) -> int:
        """Those of them in which no token lies: room for tokens to come. 0 for a cache that does not tell."""
        return self.cache.spare_nbytes if isinstance(self.cache, KVCache) else 0


def steps_in_turns(runs: Sequence[Run], rounds: int, tokens: int) -> list[list[float]]:
    """Milliseconds of a decoding step, `tokens` at a time, for every run and round; a round before them warms up."""
    every = [[statistics.mean(run.decode(tokens)) for run in runs] for _ in range(rounds + 1)]
    return [list(times) for times in zip(*every[1:], strict=True)]


@dataclass(frozen=True)
class Job:
    """What one cell of a table measures: a batch of prompts, and so many of the new tokens that follow.

    new: tokens the table is about; timed: how many of them are decoded; middle: decode from the middle of the answer,
    so that a step costs what it costs on average (a cache that grows is first filled up to there). profiled: what the
    device does in a step is looked at too.
    """

    prompt: int
    new: int
    timed: int
    batch: int = 1
    repeats: int = 1
    middle: bool = False
    profiled: bool = False

    @property
    def skipped(self) -> int:
        """New tokens before the timed ones."""
        return (self.new - self.timed) // 2 if self.middle else 0


PROFILED = 4  # steps


def warm_up(model: PreTrainedModel, provider: Provider, length: int, batch: int = 1) -> None:
    """A short run before the timed one: it loads kernels and finds its way.

    Without steps of a compiled model: they are of one cache's size, whose own first steps compile them.
    """
    run = Run(model, provider, random_ids(model, batch, length))
    run.prefill(in_parts=True)
    if not provider.compiled:
        run.decode(2)
    run.forget()


def measure(model: PreTrainedModel, provider: Provider, job: Job) -> dict[str, object]:
    """Everything one cell is: milliseconds of prefills and of decoding steps, bytes held, peaks of the device's memory.

    Raises torch.OutOfMemoryError (CUDA) or RuntimeError (CPU) where it does not fit.
    """
    warm_up(model, provider, min(WARM_UP, job.prompt), job.batch)
    new = job.new + (1 + PROFILED) * job.profiled
    run = Run(model, provider, random_ids(model, job.batch, job.prompt), new)
    prefills = [_prefill_ms(run, model.device) for _ in range(job.repeats)]
    peak_prefill = _peak(model.device)
    if job.skipped and provider.grows:
        run.forget()
        run = Run(model, provider, random_ids(model, job.batch, job.prompt + job.skipped), new - job.skipped)
        release(model.device)
        run.prefill(in_parts=True)
    release(model.device)
    _reset_peak(model.device)
    steps = run.decode(job.timed)
    _reserve(model, provider, job, run.held_bytes)
    looked = run.profiled(PROFILED) if job.profiled else {}
    return {
        "prefill_ms": prefills,
        "decode_ms": steps,
        "held_bytes": run.held_bytes,
        "spare_bytes": run.spare_bytes,
        "peak_prefill_bytes": peak_prefill,
        "peak_decode_bytes": _peak(model.device),
        **looked,
    }


def _prefill_ms(run: Run, device: torch.device) -> float:
    """Milliseconds of a prefill in which nothing was compiled: a short prompt before it may have taken other tiles."""
    for _ in range(COMPILING):
        loaded = kernels_loaded()
        run.forget()
        _reset_peak(device)
        ms = run.prefill()
        if kernels_loaded() == loaded:
            break
    return ms


def _reserve(model: PreTrainedModel, provider: Provider, job: Job, held: int) -> None:
    """Claim the bytes that the rest of the answer will take, so that a batch only fits if its last token does."""
    final = provider.final_bytes(model, job.prompt + job.new, job.batch)
    torch.empty(max(0, (final or 0) - held), dtype=torch.uint8, device=model.device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    """Most bytes allocated since the last reset; None where the device does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
