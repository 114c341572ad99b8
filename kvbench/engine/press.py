"""Generation through a press of kvpress: its hooks compress transformers' own cache, and we count what that holds.

Shapes: B batch (of one), T prompt tokens, L layers, H_kv KV heads, V vocabulary.
"""

import copy
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache as once
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.cache.audit import BudgetError
from kvbench.cache.layout import layout_of
from kvbench.cache.pressed import PressedCache, kept_by_layer
from kvbench.engine.answer import choose
from kvbench.engine.prompt_pass import now
from kvbench.engine.request import Request
from kvbench.errors import UsageError
from kvbench.policies.latents import check_latents
from kvbench.policies.press import KVPress, decoding_part, ratio_for

log = logging.getLogger(__name__)


def generate_with_press(
    model: PreTrainedModel, request: Request, policy: KVPress
) -> tuple[list[int], PressedCache, float, int]:
    """Generate for a request as kvpress's pipeline does: new tokens, the cache, when its prefill ended, and steps.

    The press sees all of the prompt, or, with context_tokens, what stands before the question. Raises ValueError with
    the press's own words where it cannot compress.
    """
    layout = layout_of(model.config.get_text_config(decoder=True))
    if layout.latent:
        check_latents(policy)
    others = {"recurrent layers": layout.states, "layers that read another's keys and values": layout.owners}
    for kind, has in others.items():
        if has:
            raise UsageError(
                f"{policy.name} of kvpress compresses models whose layers all keep the keys and values of every token, "
                f"and {type(model).__name__} has {kind}: use a policy of kvbench's own"
            )
    prompt, answer, held, steps = request.prompt, request.answer(), PressedCache(), 0
    with _refusals_of(policy):
        press = press_for(policy, prompt.shape[1])
    decodes = _decodes(press)
    with _attending(model, policy.attention):
        with _refusals_of(policy), _prefilling(press, model), _measured(model, held, press):
            logits = _call(model, prompt, 0, held)
        place = held.get_seq_length() if _rerotates(press) else prompt.shape[1]
        held.note_bytes()
        if not decodes:
            _warn_if_masked(policy, held, prompt.shape[1])
        with _refusals_of(policy), _decoding(press, model), _measured(model, held, press) if decodes else nullcontext():
            for tokens in _question_calls(request.later, held, decodes):
                logits, place = _call(model, tokens, place, held), place + tokens.shape[1]
            step = choose(logits, [answer])
            prefilled = now(model)
            while not answer.done:
                logits, place, steps = _call(model, step, place, held), place + 1, steps + 1
                step = choose(logits, [answer])
        held.note_bytes()
        held.masked = _masked(model, held)
    held.seen = request.input_ids.shape[1] + steps
    _audit(policy, press, held, steps, request.later.shape[1])
    return answer.tokens, held, prefilled, steps


def press_for(policy: KVPress, tokens: int) -> Any:  # noqa: ANN401 - a package without types
    """The press for a prompt of so many tokens: one of its own, as presses remember prompts, at the policy's budget."""
    press: Any = copy.deepcopy(policy.press)
    if policy.budget is None:
        return press
    kept, decoder = _tokens(policy, tokens), decoding_part(press)
    if decoder is not None:
        decoder.target_size = max(kept, 1)
    prefills = press if decoder is None else getattr(press, "prefilling_press", None)
    if prefills is not None and not prefills.compression_ratio:
        prefills.compression_ratio = ratio_for(kept, tokens)
    return press


def _tokens(policy: KVPress, prompt: int) -> int:
    """The budget in tokens per KV head, of a prompt of so many."""
    assert policy.budget is not None
    return policy.budget if isinstance(policy.budget, int) else int(policy.budget * prompt)


def _call(model: PreTrainedModel, ids: Tensor, place: int, held: PressedCache) -> Tensor:
    """The logits [1,V] after the last of the tokens [1,M], the first of which stands at `place`."""
    positions = torch.arange(place, place + ids.shape[1], device=ids.device)
    logits: Tensor = model(
        input_ids=ids,
        position_ids=positions[None],
        cache_position=positions,  # kvpress tells a prefill by it, and transformers hands none on by itself
        past_key_values=held,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


@contextmanager
def _attending(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """The model with an attention function of transformers, its own again afterwards."""
    before = model.config._attn_implementation
    own = {module: module._modules.get("rotary_emb") for module in _attentions(model)}
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        # Presses leave a mask behind, and the model's rotation in the place of a layer's own.
        for module, rotary in own.items():
            module.__dict__.pop("masked_key_indices", None)
            module._modules.pop("rotary_emb", None)
            if rotary is not None:
                module.rotary_emb = rotary


@contextmanager
def _refusals_of(policy: KVPress) -> Iterator[None]:
    """A press's own refusals as one sentence that names it."""
    try:
        yield
    except (AssertionError, NotImplementedError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(f"{policy.kind} of kvpress cannot compress this prompt: {why}") from error
    except OSError as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"{policy.kind} of kvpress needs files that cannot be loaded: {why}") from error


@contextmanager
def _measured(model: PreTrainedModel, held: PressedCache, press: Any) -> Iterator[None]:  # noqa: ANN401
    """The cache's peak, taken in every layer before its press has compressed it."""

    def note(*_: object) -> None:
        held.buffer_nbytes = _buffered(press)
        held.note_bytes()

    with ExitStack() as hooks:
        for module in _attentions(model):
            hooks.callback(module.register_forward_hook(note, prepend=True).remove)
        yield
        note()


def _attentions(model: PreTrainedModel) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]


def _prefilling(press: Any, model: PreTrainedModel) -> AbstractContextManager[object]:  # noqa: ANN401
    """The press while a prompt is read, unless it compresses decoded tokens alone."""
    found: AbstractContextManager[object] = nullcontext() if _is(press, "DecodingPress") else press(model)
    return found


def _decoding(press: Any, model: PreTrainedModel) -> AbstractContextManager[object]:  # noqa: ANN401
    """The press while tokens are decoded, where it compresses then."""
    found: AbstractContextManager[object] = press(model) if _decodes(press) else nullcontext()
    return found


def _decodes(press: object) -> bool:
    """Whether a press compresses while tokens are decoded."""
    return _is(press, "DecodingPress", "PrefillDecodingPress") or bool(getattr(press, "decoding", False))


def _question_calls(later: Tensor, held: PressedCache, decodes: bool) -> Sequence[Tensor]:
    """The tokens after the context, [1,M], in calls of the model.

    A press that compresses while decoding counts calls, so it gets all of them in one call, as in kvpress's pipeline.
    Otherwise they are called one by one: layers may hold different numbers of tokens, and a call has one mask.
    """
    together = decodes and len({int(layer.max()) for layer in kept_by_layer(held)}) == 1
    if later.shape[1] == 0:
        return ()
    return (later,) if together else later.split(1, dim=1)


def _buffered(press: Any) -> int:  # noqa: ANN401 - a package without types
    """Bytes of the hidden states or scores that a press keeps while decoding."""
    decoder = decoding_part(press)
    states = {} if decoder is None else decoder.hidden_states_buffer
    scores = getattr(press, "scores_buffer", {})
    tensors: list[Tensor] = [x for some in states.values() for x in some] + list(scores.values())
    return sum(x.nbytes for x in tensors)


def _masked(model: PreTrainedModel, held: PressedCache) -> list[list[int]] | None:
    """Held tokens whose keys a press masks, by layer and KV head; None if it masks none."""
    found = [[0] * layer.keys.shape[1] for layer in held.read]
    for module in _attentions(model):
        triples = getattr(module, "masked_key_indices", None)  # batch, KV head and slot of each
        if triples is not None and len(triples[0]):
            heads = torch.stack([x.cpu() for x in triples]).unique(dim=1)[1]
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            found[layer] = heads.bincount(minlength=len(found[layer])).tolist()
    return found if any(map(any, found)) else None


def _audit(policy: KVPress, press: Any, held: PressedCache, steps: int, question: int) -> None:  # noqa: ANN401
    """BudgetError if a press that has compressed while decoding holds more than its target and interval allow."""
    decoder = decoding_part(press)
    if decoder is None or policy.budget is None or steps + bool(question) < decoder.compression_interval:
        return
    most, allowed = max(int(layer.max()) for layer in kept_by_layer(held)), decoder.target_size
    if most > allowed + decoder.compression_interval:
        raise BudgetError(
            f"{policy.kind} holds {most} tokens per KV head, but its target size is {allowed} and its compression "
            f"interval {decoder.compression_interval}"
        )


def _rerotates(press: object) -> bool:
    """Whether kept keys have moved to the places 0, 1, ..., after which the next token then stands."""
    finch = _is(press, "FinchPress") and bool(getattr(press, "rerotate_keys", False))
    return finch or _is(press, "KeyRerotationPress", "RestoreKVPress")


def _is(press: object, *names: str) -> bool:
    presses = importlib.import_module("kvpress")
    return isinstance(press, tuple(getattr(presses, name) for name in names if hasattr(presses, name)))


def _warn_if_masked(policy: KVPress, held: PressedCache, tokens: int) -> None:
    """Say once that a press holds more than its budget."""
    kept = float(torch.cat(kept_by_layer(held), dim=1).float().mean())
    if policy.budget is not None and kept > max(_tokens(policy, tokens), 1) + 1:
        _warn(policy.kind)


@once
def _warn(kind: str) -> None:
    log.warning(
        "%s holds more tokens than its budget: what it masks or sets to zero is not freed and counts as held", kind
    )
