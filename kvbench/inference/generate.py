"""Generation through a policy's cache, with honest seconds and an audit at the end.

Shapes: B batch, T prompt columns (padding included), V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import KVCache
from kvbench.cache.layout import in_one_call, layout_of
from kvbench.cache.recurrent import EndedStates
from kvbench.cache.rotary import forget_lengths
from kvbench.inference.answer import Answer, choose
from kvbench.inference.calls import next_logits
from kvbench.inference.context import ContextCache, check_context, parted, take_question
from kvbench.inference.cuda_graph import Recorder, can_replay, check_graph
from kvbench.inference.generation import Generation, now
from kvbench.inference.pre_pass import pre_pass, rate_next, read_prompt
from kvbench.inference.press import generate_with_press
from kvbench.inference.sampling import Draws
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TextEncoder
from kvbench.policies.press import KVPress


@torch.inference_mode()
def generate_tokens(
    model: PreTrainedModel,
    input_ids: Tensor,
    policy: Policy,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
    min_new_tokens: int = 0,
    cuda_graph: bool = False,
    context_tokens: int | None = None,
    question: int | Sequence[int] | None = None,
    encoder: TextEncoder | None = None,
    draws: Sequence[Draws] = (),
    dictated: Sequence[int] = (),
) -> Generation:
    """Generate for input_ids [B,T] (left-padded where attention_mask [B,T] is 0) under a policy.

    A sequence ends at an EOS id, where `stop` says so of its new tokens, or after max_new_tokens; it then stops
    growing, so that its cache and its output are those of a batch of one. No EOS is among its first min_new_tokens
    tokens. cuda_graph: decoding steps are replayed from a recording, while all sequences go on. context_tokens: the
    policy's prompt is so long; what follows of input_ids is a question, read as `take_question` does. question: where
    the question of a prompt that is compressed with it begins, one position or one per sequence, for policies that ask.
    encoder: for policies with a pre-pass that is made of text. draws: what each sequence draws its tokens by; ():
    greedily. dictated: the tokens with which every answer begins, among max_new_tokens and min_new_tokens.

    Raises BudgetError if the promise is broken, ValueError for an empty prompt or padding on the right, and where steps
    cannot be recorded or a context cannot be compressed by itself, FloatingPointError where the model's output is not a
    number.
    """
    mask = padding(input_ids, attention_mask)
    if isinstance(policy, KVPress):
        if mask is not None:
            raise ValueError(
                f"{policy.name} compresses prompts without padding, so attention_mask must be 1 everywhere"
            )
        return generate_with_press(
            model,
            input_ids,
            policy,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            stop=stop,
            min_new_tokens=min_new_tokens,
            context_tokens=context_tokens,
            draws=draws,
            dictated=dictated,
        )
    if cuda_graph:
        check_graph(policy, model.device)
        can_replay(model.config, asked=True)
    later = input_ids[:, :0]
    if context_tokens is not None:
        check_context(policy)
        input_ids, later = parted(input_ids, mask, context_tokens)
    began = now(model)
    kind = KVCache if context_tokens is None else ContextCache
    input_ids, cache = read_prompt(model, input_ids, mask, policy, kind, question)
    lengths = [input_ids.shape[1]] * len(input_ids) if mask is None else mask.sum(-1).tolist()
    logits = prefill(model, input_ids, mask, cache, encoder)
    cache.expect(later.shape[1] + max_new_tokens - 1)  # the last one is never stored
    if isinstance(cache, ContextCache):
        logits = take_question(model, cache, later, logits)
    answers = [
        Answer(eos_token_ids, stop, max_new_tokens, min_new_tokens, draws[row] if draws else None, dictated)
        for row in range(len(lengths))
    ]
    step = choose(logits, answers)
    prefilled = now(model)
    positions = torch.tensor(lengths, device=input_ids.device)[:, None] + later.shape[1]
    recorder = Recorder(model) if cuda_graph and mask is None else None
    steps, ended = 0, EndedStates(cache.group)
    while not all(answer.done for answer in answers):
        steps += 1
        rate_next(cache, logits, step)
        alive = [not answer.done for answer in answers]
        ended.note([answer.done for answer in answers])
        if mask is not None or not all(alive):
            mask = _more_columns(mask, alive, cache.seen, step)
        if mask is None and recorder is not None:
            logits = recorder.step(cache, step, positions)
        else:
            logits = next_logits(model, step, mask, positions, cache)
        positions = positions + (1 if mask is None else mask[:, -1:].long())
        step = choose(logits, answers)
    decoded = now(model)
    cache.on_device(False)
    ended.put_back()
    cache.audit()
    return Generation([answer.tokens for answer in answers], cache, prefilled - began, decoded - prefilled, steps)


def padding(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Which columns are real, bool [B,T]; None if all are.

    ValueError if a prompt is empty or padded on the right, where its next token would follow padding.
    """
    if input_ids.shape[1] == 0:
        raise ValueError("a prompt without a token cannot be continued")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask = attention_mask.to(torch.bool)
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask must mark padding on the left only, so that every prompt ends in the last column"
        )
    return mask


def _more_columns(mask: Tensor | None, alive: list[bool], seen: int, like: Tensor) -> Tensor:
    """Which columns are real, one more decoded: bool [B,T+1]; mask None: all of the `seen` so far."""
    before = torch.ones(len(alive), seen, dtype=torch.bool, device=like.device) if mask is None else mask
    return torch.cat([before, torch.tensor(alive, device=like.device)[:, None]], dim=1)


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    mask: Tensor | None,
    cache: KVCache,
    encoder: TextEncoder | None = None,
) -> Tensor:
    """Take the prompt in, in the blocks of the cache's schedule; returns the logits after its last column, [B,V].

    A later prompt (`cache.next_prompt`) without padding follows what the cache has seen.
    """
    total = input_ids.shape[1]
    schedule = cache.policy.schedule
    # Padding shifts the blocks of a sequence against the columns: a call would end inside a block.
    shifted = mask is not None and schedule.order == "evict_then_attend"
    whole = shifted or in_one_call(model.config, cache.seen + total)
    size = total if whole else schedule.call_size(total)
    layout = layout_of(cache.config)
    if layout.states:
        # A later prompt goes on by single tokens where several would begin anew; padding is no token of a call's own.
        size = 1 if cache.seen and not layout.continues else size if mask is None else max(2, size)
    if not cache.seen:
        forget_lengths(model)
    positions = torch.arange(cache.seen, cache.seen + total).expand(len(input_ids), -1)
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    logits = None
    for start in range(0, total, size):
        end = min(start + size, total)
        seen = None if mask is None else mask[:, :end]
        with pre_pass(model, cache, input_ids, mask, encoder):
            logits = next_logits(model, input_ids[:, start:end], seen, positions[:, start:end], cache)
    assert logits is not None
    return logits
