"""From a prompt to its sample: how it is asked, what came of it, its score, and what its cache held."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from kvbench.cache.cache import BudgetError, KVCache
from kvbench.cache.pressed import PressedCache, kept_by_layer
from kvbench.cache.read_counts import nbytes_read, tokens_read
from kvbench.engine import device_memory
from kvbench.engine.conversation import Conversation, limited
from kvbench.engine.generate import Generation, generate_tokens
from kvbench.engine.likelihood import rate
from kvbench.engine.prompts import blank
from kvbench.engine.rating import evicted, rated
from kvbench.engine.reading import is_read
from kvbench.engine.sampling import TokenSampler
from kvbench.engine.sequence import Request
from kvbench.models.loading import LoadedModel
from kvbench.models.prompts import Prompt, answer, end_tokens, stop_test
from kvbench.models.tokens import Encoder
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.scorers.random import with_example_seed
from kvbench.results.kept_heads import KeptHeads, kept_heads
from kvbench.results.sample import Sample
from kvbench.run.run import Run
from kvbench.run.sampling import Sampling
from kvbench.tasks.task import Example

NO_MEMORY = (torch.OutOfMemoryError, MemoryError)
OWN = (BudgetError, FloatingPointError)
"""What a row does to itself alone, whatever it is decoded with."""
FAILURES = (*OWN, *NO_MEMORY)
"""What fails one example of a run and not the run: a broken budget, logits or scores that are NaN, no memory left."""

SHOWN = 20
"""Examples of a run whose samples say which tokens were kept: a report shows a few, and the others stay small."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """What one example came to under one policy: new tokens, the cache as it ended, and how it ran.

    shared_prefill, rows_in_flight: see `Sample`. recomputed: tokens read again that an earlier question about the same
    context had read. Seconds and device_peak_bytes are None where it did not run alone.
    """

    tokens: Sequence[int]
    cache: KVCache | PressedCache
    decode_steps: int
    shared_prefill: int = 1
    rows_in_flight: int = 1
    recomputed: int = 0
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    device_peak_bytes: int | None = None


def units(prompt: Prompt) -> int:
    """What an example counts on the bar: one, or the tokens of one that is read, which may take an hour."""
    return len(prompt.ids) + (0 if prompt.target is None else len(prompt.target)) if is_read(prompt) else 1


def request(cell: Run, loaded: LoadedModel, prompt: Prompt) -> Request:
    """What all policies are asked for one example."""
    tokenizer, example = cell.checkpoint.tokenizer(), prompt.example
    task = cell.task.task_of(example)
    return Request(
        prompt.ids[None].to(cell.device, torch.long),
        max_new_tokens=prompt.most_new_tokens,
        min_new_tokens=task.min_new_tokens + len(prompt.dictated) * bool(task.min_new_tokens),
        eos_token_ids=tuple(end_tokens(loaded.model.generation_config, tokenizer, task.end_texts, task.stop)),
        stop=stop_test(tokenizer, task.stop),
        context_tokens=prompt.context_tokens,
        question=prompt.question,
        encoder=Encoder(tokenizer),
        draws=_draws(cell, prompt),
        turns=prompt.turns,
        dictated=prompt.dictated,
        example=(cell.seed, prompt.draw),
    )


def _draws(cell: Run, prompt: Prompt) -> Callable[[], TokenSampler] | None:
    """What makes the numbers that an answer draws its tokens by; None: it is greedy."""
    sampling, sample, asked = cell.sampling, prompt.sample or 0, prompt.example.sampling
    if sampling is None and asked is not None:
        sampling = Sampling(**asked)
    if sampling is None or sampling.greedy:
        return None
    return partial(TokenSampler, sampling, cell.seed, (prompt.example.index - sample) // cell.samples, sample)


def answered(cell: Run, prompt: Prompt, done: Completion) -> Sample:
    """The sample of an example whose answer was generated."""
    tokens = list(done.tokens[len(prompt.dictated) :])
    output = answer(cell.checkpoint.tokenizer(), tokens, cell.task.task_of(prompt.example).stop)
    return replace(
        blank(prompt),
        **_judged(cell, output, prompt.example),
        **_held(cell, done.cache, _fed(prompt, done)),
        recomputed_tokens=None if prompt.example.shared is None else done.recomputed,
        generated_tokens=len(tokens),
        decode_steps=done.decode_steps,
        shared_prefill=done.shared_prefill,
        rows_in_flight=done.rows_in_flight,
        prefill_seconds=_rounded(done.prefill_seconds),
        decode_seconds=_rounded(done.decode_seconds),
        device_peak_bytes=done.device_peak_bytes,
        kept_heads=_shown(cell, prompt, done.cache),
    )


def _fed(prompt: Prompt, done: Completion) -> int:
    """Tokens the model read: prompt and answer, and the model's own answers before it."""
    if prompt.own and isinstance(done.cache, KVCache):
        return done.cache.seen
    return len(prompt.ids) + done.decode_steps


def _shown(cell: Run, prompt: Prompt, cache: KVCache | PressedCache) -> KeptHeads | None:
    """By how many heads each token of the prompt is kept, for the first examples: a report colours their prompts.

    A policy that rewrites the prompt counts positions in what it made of it, so there is nothing to colour.
    """
    if prompt.example.index >= SHOWN or not cell.policy.evicts or isinstance(cell.policy.pre_pass, PromptChoice):
        return None
    if isinstance(cache, PressedCache):  # transformers' own remembers no positions
        return None
    return kept_heads((layer.positions[0] for layer in cache.attention_layers), len(prompt.ids))


def failed(cell: Run, prompt: Prompt, error: Exception) -> Sample:
    """The sample of an example that came to nothing."""
    log.error("%s: example %d failed: %s", cell.run_id, prompt.example.index, sentence(error))
    return replace(blank(prompt), error=sentence(error))


def told_apart(error: Exception) -> Exception:
    """The error, as a MemoryError where it is PyTorch's word that the host has none left, a mere RuntimeError."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return MemoryError(*error.args)
    return error


def sentence(error: Exception) -> str:
    """The kind of an error and the first line it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def conversation(cell: Run, loaded: LoadedModel, prompt: Prompt) -> Conversation | None:
    """What keeps the cache between the turns of an example's conversation; None where it is none."""
    if not prompt.turns:
        return None
    encoder = Encoder(cell.checkpoint.tokenizer())
    policy = with_example_seed(cell.policy, cell.seed, prompt.draw)
    return Conversation(loaded.model, policy, prompt.own, encoder, cell.cuda_graph)


def alone(
    cell: Run,
    loaded: LoadedModel,
    prompt: Prompt,
    report: Callable[[int], None],
    talk: Conversation | None = None,
) -> Sample:
    """The sample of an example that has the model to itself. report: called with the units done so far.

    talk: of a turn's conversation (`conversation`), in which turns that were not taken yet are made up for.
    """
    device_memory.forget_peak(cell.device)
    try:
        if prompt.pairs:
            done = _rate(cell, loaded, prompt)
        elif is_read(prompt):
            done = _read(cell, loaded, prompt, report)
        else:
            done = _generate(cell, loaded, prompt) if talk is None else _converse(cell, loaded, prompt, talk)
        done = replace(done, device_peak_bytes=device_memory.peak(cell.device))
    except Exception as caught:
        error = told_apart(caught)
        if not isinstance(error, FAILURES):
            raise
        done = failed(cell, prompt, error)
    report(units(prompt))
    return done


def _generate(cell: Run, loaded: LoadedModel, prompt: Prompt) -> Sample:
    asked = request(cell, loaded, prompt)
    done = generate_tokens(
        loaded.model,
        asked.input_ids,
        with_example_seed(cell.policy, cell.seed, prompt.draw),
        max_new_tokens=asked.max_new_tokens,
        min_new_tokens=asked.min_new_tokens,
        eos_token_ids=asked.eos_token_ids,
        stop=asked.stop,
        cuda_graph=cell.cuda_graph,
        context_tokens=asked.context_tokens,
        question=asked.question,
        encoder=asked.encoder,
        draws=() if asked.draws is None else [asked.draws()],
        dictated=asked.dictated,
    )
    return answered(cell, prompt, _completed(done, prompt.known))


def _completed(done: Generation, recomputed: int) -> Completion:
    seconds = done.prefill_seconds, done.decode_seconds
    return Completion(done.tokens[0], done.cache, done.decode_steps, 1, 1, recomputed, *seconds)


def _converse(cell: Run, loaded: LoadedModel, prompt: Prompt, talk: Conversation) -> Sample:
    """The sample of a turn that has the model to itself."""
    asked = request(cell, loaded, prompt)
    assert prompt.example.shared is not None
    limits = [turn.most for turn in prompt.example.shared.follow_ups or ()]
    missed = range(talk.turns, len(limits))
    for turn in missed:
        if prompt.own:
            talk.ask(limited(asked, limits[turn]), asked.prompts[turn])
        else:
            talk.skip(asked.prompts[turn])
    done = talk.ask(asked, asked.prompts[-1])
    return answered(cell, prompt, _completed(done, sum(prompt.turns[turn] for turn in missed)))


def _rate(cell: Run, loaded: LoadedModel, prompt: Prompt) -> Sample:
    """The sample of an example whose continuations are rated, each on a cache of its own."""
    answers, held, prefill_seconds, decode_seconds = [], [], 0.0, 0.0
    policy = with_example_seed(cell.policy, cell.seed, prompt.draw)
    for pair in prompt.pairs:
        rating = rated(loaded.model, pair, policy, Encoder(cell.checkpoint.tokenizer()))
        answers.append([rating.logprob, rating.greedy])
        held.append(_held(cell, rating.cache, pair.tokens - 1))
        prefill_seconds += rating.prefill_seconds
        decode_seconds += rating.decode_seconds
        del rating  # the next cache takes the place of this one
    longest = held[max(range(len(held)), key=lambda i: prompt.pairs[i].tokens)]
    all_of_them = {"peak_bytes": max(x["peak_bytes"] for x in held), "evicted": fmean(x["evicted"] for x in held)}
    if cell.policy.pre_pass is not None:
        all_of_them["pre_pass_tokens"] = sum(x["pre_pass_tokens"] for x in held)
    return replace(
        blank(prompt),
        **_judged(cell, json.dumps(answers), prompt.example),
        **{**longest, **all_of_them},
        generated_tokens=0,
        prefill_seconds=_rounded(prefill_seconds),
        decode_seconds=_rounded(decode_seconds),
    )


def _read(cell: Run, loaded: LoadedModel, prompt: Prompt, report: Callable[[int], None]) -> Sample:
    """The sample of an example whose tokens are given and scored."""
    encoder = Encoder(cell.checkpoint.tokenizer())
    policy = with_example_seed(cell.policy, cell.seed, prompt.draw)
    done = rate(loaded.model, prompt, policy, report=report, encoder=encoder)
    return replace(
        blank(prompt),
        **_held(cell, done.cache, done.fed),
        prefill_seconds=_rounded(done.prefill_seconds),
        decode_seconds=_rounded(done.decode_seconds),
        likelihood=done.likelihood,
    )


def _judged(cell: Run, output: str, example: Example) -> dict[str, Any]:
    """An output, its score, and what else its benchmark measures of it."""
    score, measures = cell.task.judge(cell.task.task_of(example).after_thinking(output), example)
    return {"output": output, "score": None if score is None else float(score), "measures": dict(measures) or None}


def _held(cell: Run, cache: KVCache | PressedCache, fed: int) -> dict[str, Any]:
    """What a cache held at the end, and at its peak. fed: tokens the model read; `full` would hold all of them."""
    return {
        "kept_tokens": [layer[0].tolist() for layer in kept_by_layer(cache)],
        "cache_bytes": cache.held_nbytes,
        "peak_bytes": cache.peak_nbytes,
        "spare_bytes": cache.spare_nbytes,
        "state_bytes": cache.state_nbytes or None,
        "full_cache_bytes": cell.checkpoint.full_cache_bytes(fed),
        "full_position_bytes": cell.checkpoint.full_position_bytes(fed),
        "evicted": float(evicted(cache, fed)),
        "pre_pass_tokens": _passed(cell.policy, cache),
        "masked_tokens": cache.masked if isinstance(cache, PressedCache) else None,
        **_read_last(cell.policy, cache),
    }


def _read_last(policy: Policy, cache: KVCache | PressedCache) -> dict[str, Any]:
    """What the last decoded token read, of a policy with a reader."""
    if policy.reader is None or not isinstance(cache, KVCache):
        return {}
    return {"read_tokens": tokens_read(cache.group), "read_bytes": nbytes_read(cache.group)}


def _passed(policy: Policy, cache: KVCache | PressedCache) -> int | None:
    """Tokens that passed through the model beside the prompt, of a policy that asks for a pre-pass."""
    if policy.pre_pass is None or not isinstance(cache, KVCache):
        return None
    return cache.group.progress.passed[0]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
