"""From the prompt of an example to its sample: the request, the answer and its score, and what the cache holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from kvbench.cache.cache import BudgetError
from kvbench.cache.footprint import fed
from kvbench.cache.layer import Layer
from kvbench.cache.views import nbytes_read, tokens_read
from kvbench.engine.divergence import divergence_of
from kvbench.engine.generate import HeldCache, generate
from kvbench.engine.prompts import blank
from kvbench.engine.scores import Scores, summary
from kvbench.engine.sequence import LiveSequence, Request, TokenSampler, script_of
from kvbench.engine.teacher_forcing import policy_for, score_pair, text_scores
from kvbench.errors import UsageError, one_line
from kvbench.models.answers import Ending, end_tokens
from kvbench.models.devices import now, peak, reset_peak
from kvbench.models.loading import LoadedModel
from kvbench.models.prompt import Prompt
from kvbench.models.tokens import Encoder
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.stores.token_codes import TokenCodeLayer
from kvbench.results.kept import kept_heads, kept_spans
from kvbench.results.repetition import repetition
from kvbench.results.samples import Sample
from kvbench.run.run import Run
from kvbench.run.run_config import Sampling
from kvbench.tasks.evidence import HIDDEN


class HistoryError(RuntimeError):
    """The history of a conversation has no answer to an earlier turn."""


class ScoringError(RuntimeError):
    """The scorer of a task raised an error for an answer."""


OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
OWN_ERRORS = (BudgetError, FloatingPointError, HistoryError)
"""Errors of one sequence that do not depend on the other sequences of its batch."""
FAILURES = (*OWN_ERRORS, *OUT_OF_MEMORY, ScoringError)
"""Errors that fail one example of a run, and not the run."""

WITH_KEPT_HEADS = 20
"""Examples of a run whose samples list the kept tokens for reports; the other samples stay small."""

log = logging.getLogger(__name__)


def request_for(
    run: Run, loaded: LoadedModel, prompt: Prompt, report: Callable[[int], object] | None = None
) -> Request:
    """The request of one example, which is the same for all policies. report: as in `Request`."""
    tokenizer, task = run.checkpoint.tokenizer(), run.task.task_of(prompt.example)
    ids, target = prompt.ids, prompt.continuation
    texts = () if task.thoughts else (task.end_texts, task.stop)  # in a thought, only EOS ends an answer
    text = (ids if target is None else ids[: prompt.length])[None].to(run.device, torch.long)
    scored = None if target is None else target[None].to(run.device, torch.long)
    return Request(
        script_of(text, prompt.context_tokens, prompt.turns, scored),
        max_new_tokens=prompt.most_new_tokens,
        min_new_tokens=task.min_new_tokens + len(prompt.dictated) * bool(task.min_new_tokens),
        eos_token_ids=tuple(end_tokens(loaded.model.generation_config, tokenizer, *texts)),
        stop=_ending(run, prompt).test,
        question=prompt.question,
        encoder=Encoder(tokenizer),
        sampler=_sampler(run, prompt),
        dictated=prompt.given or prompt.dictated,
        example=(run.seed, prompt.draw),
        parts=tuple(sorted(a for name, parts in prompt.spans.items() if name not in HIDDEN for a, _ in parts)),
        protected=tuple(sorted(part for name in task.protects for part in prompt.spans.get(name, ()))),
        next_turn="own" if prompt.own else None,
        report=report,
        watch=run.watch,
    )


def _ending(run: Run, prompt: Prompt) -> Ending:
    """Where the answer of an example ends."""
    tokenizer, task = run.checkpoint.tokenizer(), run.task.task_of(prompt.example)
    ends = end_tokens(None, tokenizer, task.end_texts, task.stop) if task.thoughts else ()
    return Ending(tokenizer, task.stop, task.thoughts, prompt.opened, ends)


def _sampler(run: Run, prompt: Prompt) -> Callable[[], TokenSampler] | None:
    """What makes the sampler of an example; None: greedy decoding."""
    sampling, sample, own = run.sampling, prompt.sample or 0, prompt.example.sampling
    if run.task.divergence:
        return None
    if sampling is None and own is not None:
        sampling = Sampling(**own)
    if sampling is None or sampling.greedy:
        return None
    return partial(TokenSampler, sampling, run.seed, (prompt.example.index - sample) // run.samples, sample)


# --- samples ---------------------------------------------------------------------------------------------------------
def answered(
    run: Run,
    prompt: Prompt,
    tokens: Sequence[int],
    cache: HeldCache,
    decode_steps: int,
    compared: Sequence[Sequence[float]] | None = None,
    kept: Mapping[str, Any] | None = None,
) -> Sample:
    """The sample of an example with a generated answer, without the fields about the batch in which it was computed.

    kept: further fields, such as those of `kept_at_start`. compared: the divergence of every token of an answer that
    was fed to the policy; it has no score.
    """
    generated = list(tokens[len(prompt.dictated) :])
    ending = _ending(run, prompt)
    stopped = decode_steps == len(tokens) or ending.reached(generated)  # EOS takes a step and is not a token
    processed = cache.seen if prompt.own else len(prompt.ids) + decode_steps  # own answers count too
    text = ending.text(generated)
    return replace(
        blank(prompt),
        **(scored(run, text, prompt) if compared is None else {"divergence": divergence_of(text, compared)}),
        repetition=repetition(generated) if compared is None else None,
        **_cache_fields(run, cache, processed, decode_steps),
        generated_tokens=len(generated),
        finish_reason="stop" if stopped else "length",
        decode_steps=decode_steps,
        **_kept_fields(run, prompt, cache),
        **(kept or {}),
    )


def failed(run: Run, prompt: Prompt, error: Exception) -> Sample:
    """The sample of an example that failed."""
    log.error("%s: example %d failed: %s", run.run_id, prompt.example.index, one_line(error))
    return replace(blank(prompt), error=one_line(error))


def as_memory_error(error: Exception) -> Exception:
    """The error, as a MemoryError if PyTorch could not allocate memory on a CPU, which is a plain RuntimeError."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return MemoryError(*error.args)
    return error


def evicted(cache: HeldCache, tokens: int) -> bool:
    """Whether a KV head of a cache of one sequence holds fewer tokens than were processed, which are >= `tokens`."""
    return min(int(layer.min()) for layer in cache.kept_by_layer()) < max(tokens, cache.seen)


def scored(run: Run, output: str, prompt: Prompt) -> dict[str, Any]:
    """An output, the answer in it, its score, and other measures of its benchmark.

    Raises ScoringError for an error of the task's scorer, but for those of its configuration and of memory.
    """
    task, example = run.task, prompt.example
    answer = output if prompt.pairs else task.task_of(example).after_thinking(output, prompt.opened)
    try:
        score, measures = task.judge(answer or "", example)
    except (UsageError, *OUT_OF_MEMORY):
        raise
    except Exception as error:  # a scorer may be code of the user or of a benchmark
        where = f"example {example.index} of task {task.name}"
        raise ScoringError(f"{where} could not be scored: {one_line(error)}") from error
    return {
        "output": output,
        "answer": None if answer == output else answer or "",
        "in_thought": answer is None or None,
        "score": None if score is None else float(score),
        "measures": dict(measures) or None,
    }


def _cache_fields(run: Run, cache: HeldCache, processed: int, decode_steps: int = 0) -> dict[str, Any]:
    """What a cache holds at the end, and held at its peak. processed: tokens that `full` would hold."""
    fields: dict[str, Any] = {
        "kept_tokens": [layer[0].tolist() for layer in cache.kept_by_layer()],
        "kv_footprint": cache.footprint(decode_steps) / fed(0, processed),
        "cache_bytes": cache.held_nbytes,
        "peak_bytes": cache.peak_nbytes,
        "spare_bytes": cache.spare_nbytes,
        "state_bytes": cache.state_nbytes or None,
        "full_cache_bytes": run.checkpoint.full_cache_bytes(processed),
        "full_position_bytes": run.checkpoint.full_position_bytes(processed) if _holds_positions(cache) else 0,
        "evicted": float(evicted(cache, processed)),
    }
    for sequence in cache.sequences:
        fields["clipped"] = clipped(sequence.layers)
        fields["watched"] = {watcher.name: watcher.value() for watcher in sequence.watchers} or None
        if run.policy.pre_pass is not None:
            fields |= {"pre_pass_tokens": sequence.passed, "pre_pass_steps": sequence.passes}
        if run.policy.reader is not None:
            fields |= {"read_tokens": tokens_read(sequence), "read_bytes": nbytes_read(sequence)}
    return fields


def clipped(layers: Sequence[Layer]) -> int | None:
    """How many numbers of coded keys and values were beyond the fixed scales of their store; None if none is fixed."""
    stores = [layer.store for layer in layers if layer.opened]
    counts = [store.clipped for store in stores if isinstance(store, TokenCodeLayer)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _holds_positions(cache: HeldCache) -> bool:
    """Whether a cache stores positions; a cache of another package and codes of all tokens do not need them."""
    stores = (layer.store for sequence in cache.sequences for layer in sequence.layers if layer.opened)
    return any(store.sizes().kinds.get("positions") for store in stores)


def _kept_fields(run: Run, prompt: Prompt, cache: HeldCache) -> dict[str, Any]:
    """The tokens of a prompt that are held at the end.

    kept_heads: how many heads keep each, for the first examples; reports colour the prompt by it. kept_spans: the share
    of each named part, mean over layers and heads. Both are unknown if a policy selects the prompt's tokens, because it
    counts positions among those it selected, and for a cache of another package, which has no positions.
    """
    heads = prompt.example.index < WITH_KEPT_HEADS and run.policy.evicts
    if isinstance(run.policy.pre_pass, PromptChoice) or not (heads or prompt.spans):
        return {}
    positions = [layer.positions[0] for sequence in cache.sequences for layer in sequence.layers]
    return {
        "kept_heads": kept_heads(positions, len(prompt.ids)) if heads else None,
        "kept_spans": kept_spans(positions, prompt.spans)[0] if prompt.spans and positions else None,
    }


def kept_at_start(run: Run, prompt: Prompt, sequence: LiveSequence) -> dict[str, Any]:
    """The fields of a sample about the parts of a prompt that are held when its answer begins.

    That is before the first token of the answer is fed, or with late=true when the prompt is evicted after it.
    """
    if not prompt.spans or sequence.cache is None or isinstance(run.policy.pre_pass, PromptChoice):
        return {}
    positions = [layer.positions[0] for layer in sequence.held.layers]
    whole = {"": ((0, sequence.position - sequence.decode_steps),)}
    shares, heads = kept_spans(positions, {**whole, **prompt.spans})
    return {"kept_prompt": shares.pop(""), "kept_spans_start": shares, "heads_whole": {k: heads[k] for k in shares}}


# --- examples that are computed as a whole: pairs, scored texts, and policies with a cache of their own --------------
def computed_whole(run: Run, loaded: LoadedModel, prompt: Prompt, report: Callable[[int], None]) -> Sample:
    """The sample of an example that cannot be part of a batch. report: called with the number of tokens just scored.

    Raises the error of the example.
    """
    reset_peak(run.device)
    if prompt.pairs:
        sample = _score_pairs(run, loaded, prompt)
    elif prompt.is_whole_text:
        sample = _score_text(run, loaded, prompt, report)
    else:
        done = generate(loaded.model, [request_for(run, loaded, prompt)], run.policy)
        sample = replace(
            answered(run, prompt, done.tokens[0], done.cache, done.decode_steps, kept=done.fields),
            prefill_seconds=round(done.prefill_seconds, 6),
            decode_seconds=round(done.decode_seconds, 6),
            recomputed_tokens=None if prompt.example.shared is None else prompt.known,
            shared_prefill=1,
            rows_in_flight=1,
        )
    return replace(sample, device_peak_bytes=peak(run.device))


def _score_pairs(run: Run, loaded: LoadedModel, prompt: Prompt) -> Sample:
    """The sample of an example whose continuations are scored, each with a new cache."""
    outputs, fields, seconds = [], [], 0.0
    policy, began = run.policy.for_example(run.seed, prompt.draw), now(loaded.model)
    for pair in prompt.pairs:
        scores = score_pair(loaded.model, pair, policy, Encoder(run.checkpoint.tokenizer()))
        outputs.append([scores.logprob, bool(scores.greedy.all())])
        fields.append(_cache_fields(run, scores.cache, pair.tokens - 1))
        seconds += scores.seconds
        del scores  # frees the cache before the next one is made
    longest = fields[max(range(len(fields)), key=lambda i: prompt.pairs[i].tokens)]
    overall = {"peak_bytes": max(x["peak_bytes"] for x in fields), "evicted": fmean(x["evicted"] for x in fields)}
    if run.policy.pre_pass is not None:
        overall |= {name: sum(x[name] for x in fields) for name in ("pre_pass_tokens", "pre_pass_steps")}
    if longest.get("clipped") is not None:
        overall["clipped"] = sum(x["clipped"] for x in fields)
    return replace(
        blank(prompt),
        **scored(run, json.dumps(outputs), prompt),
        **{**longest, **overall},
        generated_tokens=0,
        prefill_seconds=round(now(loaded.model) - began - seconds, 6),
        decode_seconds=round(seconds, 6),
    )


def _score_text(run: Run, loaded: LoadedModel, prompt: Prompt, report: Callable[[int], None]) -> Sample:
    """The sample of an example whose tokens are all scored."""
    policy = policy_for(run.policy.for_example(run.seed, prompt.draw), prompt)
    scores = text_scores(loaded.model, prompt.ids[None].to(run.device, torch.long), policy, report)
    return replace(likelihood_of(run, prompt, policy, scores), prefill_seconds=round(scores.seconds, 6))


def likelihood_of(run: Run, prompt: Prompt, policy: Policy, scores: Scores) -> Sample:
    """The sample of an example whose given tokens were scored, without its seconds."""
    first, processed, block = 1, prompt.tokens, scores.block
    if prompt.continuation is not None:
        first, processed = prompt.length, prompt.tokens - 1  # the last token is not appended
        block = (policy.schedule.spare or None) if policy.evicts else None
    likelihood = summary(scores.nll, first, block, scores.most_kept.by_layer)
    return replace(blank(prompt), **_cache_fields(run, scores.cache, processed), likelihood=likelihood)
