"""Measures one generation with a policy or with transformers' own cache: seconds, bytes, and peak memory.

Shapes: B batch, T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvbench.cache.hook import attention
from kvbench.config.presets import make_policy
from kvbench.engine.batch import DecodeBatch
from kvbench.engine.generate import generate_tokens
from kvbench.engine.sequence import Request, script_of
from kvbench.errors import UsageError
from kvbench.models.cache_shapes import from_config
from kvbench.models.devices import free, process_peak, records_steps, reset_process_peak, seconds
from kvbench.models.given import borrowed
from kvbench.models.replay import records
from kvbench.policies.policy import Policy
from kvbench.policies.press import INSTALL
from kvbench.tools.bench.settings import Settings
from kvbench.tools.cache_bytes import predict

WARM = 6
"""Decoding steps that are not timed, fewer of few tokens."""
PRESSES: dict[str, Callable[[Any], Any]] = {
    "snapkv": lambda kvpress: kvpress.SnapKVPress(window_size=32, kernel_size=7),
    "knorm": lambda kvpress: kvpress.KnormPress(),
    "tova": lambda kvpress: kvpress.TOVAPress(),
    "streamingllm": lambda kvpress: kvpress.StreamingLLMPress(),
    "ada_snapkv": lambda kvpress: kvpress.AdaKVPress(PRESSES["snapkv"](kvpress)),
}
"""Policies that kvpress also has. A press compresses the prompt once; then the cache grows."""


@dataclass(frozen=True)
class Timing:
    """One measured generation. decode_ms: mean of the steps after the first ones (`WARM`). peak_bytes: None if unknown.

    held_bytes: of the cache after the last token. peak_bytes: on CUDA the most bytes allocated, weights included; on a
    CPU the largest resident size of the process.
    """

    prefill_ms: float
    decode_ms: float
    held_bytes: int
    peak_bytes: int | None
    tokens: list[list[int]]


@dataclass(frozen=True, eq=False)
class Contender:
    """One row of the benchmark: a policy at a budget, or transformers' own cache (policy None)."""

    name: str
    budget: int | float | None = None
    policy: Policy | None = None


def contenders(settings: Settings) -> tuple[list[Contender], list[str]]:
    """The contenders in the order of the rows, and a remark for each baseline that is not installed."""
    found, remarks = list[Contender](), list[str]()
    if "transformers" in settings.baselines:
        found.append(Contender("transformers"))
    pressed = [slug for slug in settings.policies if slug in PRESSES and "kvpress" in settings.baselines]
    if pressed and find_spec("kvpress") is None:
        remarks.append(f"kvpress is not installed, so it is not measured: {INSTALL}")
        pressed = []
    for slug in settings.policies:
        for budget in settings.budgets:
            policy = timed_policy(slug, budget, settings)
            limited = policy.evicts or policy.reader is not None
            found.append(Contender(slug, budget if limited else None, policy))
            if not limited:
                break  # the budget has no effect
            if slug in pressed:
                import kvpress  # imported here, because it patches transformers' attention

                press = make_policy("kvpress", budget, press=PRESSES[slug](kvpress))
                found.append(Contender(f"kvpress {slug}", budget, press))
    return found, remarks


def timed_policy(slug: str, budget: int | float, settings: Settings) -> Policy:
    """The policy of a slug. UsageError for a policy that needs a text or a question, which random tokens are not."""
    try:
        policy = make_policy(slug, budget, schedule=settings.schedule, decode=settings.decode)
    except ValueError as error:
        raise UsageError(f"policies={slug}: {error}") from error
    if policy.pre_pass is not None or policy.needs.question:
        raise UsageError(f"policies={slug} cannot be timed on random tokens: it needs a text or a question")
    return policy


def random_prompt(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """A prompt of random tokens [B,T], the same for every contender."""
    generator = torch.Generator(device=model.device).manual_seed(length)
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    return torch.randint(vocabulary, (batch, length), generator=generator, device=model.device)


def weights_read(model: PreTrainedModel) -> int | None:
    """Bytes of the weights that every decoding step reads: all but those of input embeddings that are no output too.

    None for a model with experts, of which a step reads those that its tokens choose.
    """
    if any("experts" in name for name, _ in model.named_parameters()):
        return None
    whole = {id(x): x.nbytes for x in model.parameters()}
    looked_up, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    if output is None or output.weight is not looked_up:
        del whole[id(looked_up)]
    return sum(whole.values())


def fits(model: PreTrainedModel, contender: Contender, batch: int, length: int) -> bool:
    """Whether the cache after prompts [B,T] fits into memory, as far as its bytes can be predicted.

    Linux grants more memory than there is, and ends a process that uses it; on a GPU, the time of the prompts is saved.
    """
    config = {**model.config.get_text_config(decoder=True).to_dict(), "dtype": "float32"}
    policy = make_policy("full") if contender.policy is None else contender.policy
    try:
        held = predict(policy, replace(from_config(config), dtype=model.dtype), length, batch)
        return held.nbytes <= free(model.device)
    except ValueError:  # its bytes depend on the content of the prompt
        return True


def measure(model: PreTrainedModel, contender: Contender, ids: Tensor, new_tokens: int) -> Timing:
    """Generate `new_tokens` after ids [B,T], greedily. Out-of-memory errors are raised."""
    reset_process_peak(model.device)
    policy = contender.policy
    if policy is None:
        return _transformers(model, ids, new_tokens)
    requests = [Request(script_of(row), new_tokens, min_new_tokens=new_tokens) for row in ids.split(1)]
    batch = DecodeBatch(model, records_steps(model.device), strict=False)
    if policy.generator is None and batch.can_admit(*requests):
        with borrowed(model):
            return _steps(batch, requests, policy)
    prefill, decode, steps, held, tokens = alone(model, policy, ids, new_tokens)
    return Timing(1e3 * prefill, 1e3 * decode / steps, held, process_peak(model.device), tokens)


@torch.inference_mode()
def _steps(batch: DecodeBatch, requests: Sequence[Request], policy: Policy) -> Timing:
    """Prompts under one policy, and their steps; the first ones, which a GPU records, are not timed."""
    device = requests[0].prompt.device
    times, steps, warm = [seconds(device)], 0, min(WARM, (requests[0].max_new_tokens - 1) // 2)
    sequences = list(chain(*batch.admit(requests, [policy])))
    times.append(seconds(device))
    while batch.in_flight:
        if steps == warm:
            times.append(seconds(device))
        batch.step()
        steps += 1
    times.append(seconds(device))
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    start, prefilled, *_, begun, end = times
    held = sum(sequence.cache.nbytes for sequence in sequences if sequence.cache is not None)
    tokens = [sequence.tokens for sequence in sequences]
    return Timing(1e3 * (prefilled - start), 1e3 * (end - begun) / (steps - warm), held, process_peak(device), tokens)


def alone(
    model: PreTrainedModel, policy: Policy, ids: Tensor, new_tokens: int
) -> tuple[float, float, int, int, list[list[int]]]:
    """Generate with one policy: seconds of prefill and of decoding, decoding steps, bytes held, tokens."""
    graph = records(policy, model.device)
    with borrowed(model):
        done = generate_tokens(
            model, ids, policy, max_new_tokens=new_tokens, min_new_tokens=new_tokens, cuda_graph=graph
        )
    return done.prefill_seconds, done.decode_seconds, done.decode_steps, done.cache.nbytes, done.tokens


@torch.inference_mode()
def _transformers(model: PreTrainedModel, ids: Tensor, new_tokens: int) -> Timing:
    """The same generation with transformers' sdpa attention and DynamicCache."""
    with attention(model, "sdpa"):
        cache, written, times = DynamicCache(config=model.config), list[Tensor](), [seconds(model.device)]
        step = ids
        for _ in range(new_tokens):
            logits = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1:].argmax(-1)
            written.append(step)
            if len(times) == 1:
                times.append(seconds(model.device))
        times.append(seconds(model.device))
    layers: Any = cache.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    start, prefilled, end = times
    per_step = 1e3 * (end - prefilled) / (new_tokens - 1)
    tokens = torch.cat(written, dim=1).tolist()
    return Timing(1e3 * (prefilled - start), per_step, held, process_peak(model.device), tokens)


def out_of_memory(error: RuntimeError) -> bool:
    """True if the device had no memory left; on a CPU torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
