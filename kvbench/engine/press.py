"""Generation with a press of kvpress, which compresses transformers' own cache; its tokens and bytes are counted here.

Shapes: B batch, T prompt tokens, M tokens of a call, L layers, H_kv KV heads, V vocabulary.
"""

import copy
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache as once
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvbench.cache.audit import BudgetError
from kvbench.cache.families import layout_of
from kvbench.cache.footprint import fed
from kvbench.cache.hook import attention
from kvbench.cache.views import stacked
from kvbench.engine.generate import Generation
from kvbench.engine.sequence import LiveSequence, Request, choose_next
from kvbench.errors import UsageError
from kvbench.models.devices import now
from kvbench.policies.latents import check_latents
from kvbench.policies.press import KVPress, decodes, decoding_part, ratio_for

log = logging.getLogger(__name__)


class PressedCache(DynamicCache):
    """A transformers cache with the sizes of a `HeldCache`, counted from its tensors.

    entries: of the footprint, without passes of the press itself. buffer_nbytes: bytes of hidden states or scores that
    a press holds while decoding. masked: [L][H_kv] held tokens with keys that the press masks; None if it masks none.
    """

    spare_nbytes = state_nbytes = 0  # no memory is reserved, and models with recurrent layers are refused
    sequences = ()

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.entries = 0.0
        self.peak_nbytes = 0
        self.buffer_nbytes = 0
        self.masked: list[list[int]] | None = None

    @property
    def used_layers(self) -> list[Any]:
        """The layers with keys and values."""
        return [layer for layer in self.layers if getattr(layer, "keys", None) is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of the press's buffer."""
        held: int = sum(x.nbytes for layer in self.used_layers for x in (layer.keys, layer.values))
        return held + self.buffer_nbytes

    held_nbytes = nbytes

    def kept_by_layer(self) -> list[Tensor]:
        """[B,H_kv] tokens held by each layer, masked tokens included."""
        return [torch.full(layer.keys.shape[:2], layer.keys.shape[2]) for layer in self.used_layers]

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held, masked tokens included. ValueError if layers differ in their number of KV heads."""
        return stacked(self.kept_by_layer())

    def footprint(self, decode_steps: int) -> float:
        """The entries, counted call by call."""
        return self.entries

    def note_bytes(self) -> None:
        """Update the peak."""
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)


def generate(model: PreTrainedModel, request: Request, policy: KVPress) -> Generation:
    """Generate as kvpress's pipeline does.

    The press compresses the whole prompt, or the context before a question. Raises UsageError with the press's message
    if it cannot compress the prompt or the model.
    """
    _check_model(model, policy)
    began = now(model)
    prompt, sequence, cache = request.prompt, LiveSequence(request, policy), PressedCache()
    question = torch.cat([prompt[:, :0], *(feed.tokens for feed in request.script[1:])], dim=1)
    with _press_errors(policy):
        press = press_for(policy, prompt.shape[1])
    active = decodes(press)
    with attention(model, policy.attention), _restored(model):
        with (
            _press_errors(policy),
            nullcontext() if _is(press, "DecodingPress") else press(model),  # it compresses only decoded tokens
            _recording_peak(model, cache, press),
        ):
            logits = _append(model, sequence, prompt, cache)
        sequence.position = cache.get_seq_length() if _rerotates(press) else prompt.shape[1]
        cache.note_bytes()
        kept = float(torch.cat(cache.kept_by_layer(), dim=1).float().mean())
        if not active and policy.budget is not None and kept > max(_budget(policy, prompt.shape[1]), 1) + 1:
            _warn(policy.kind)
        with _press_errors(policy), ExitStack() as contexts:
            if active:
                contexts.enter_context(press(model))
                contexts.enter_context(_recording_peak(model, cache, press))
            for tokens in _question_calls(question, cache, active):
                logits = _append(model, sequence, tokens, cache)
            choose_next([sequence], logits)
            prefilled = now(model)
            while not sequence.done:
                logits = _append(model, sequence, prompt.new_tensor([sequence.tokens[-1:]]), cache)
                sequence.decode_steps += 1
                choose_next([sequence], logits)
        cache.note_bytes()
        cache.masked = _masked(model, cache)
    if sequence.error is not None:
        raise sequence.error
    cache.seen = request.length + sequence.decode_steps
    _audit(policy, press, cache, sequence.decode_steps, question.shape[1])
    times = prefilled - began, now(model) - prefilled
    return Generation([sequence.tokens], cache, *times, sequence.decode_steps, {"masked_tokens": cache.masked})


def _append(model: PreTrainedModel, sequence: LiveSequence, tokens: Tensor, cache: PressedCache) -> Tensor:
    """Append tokens [1,M] to a sequence; the logits [1,V] after them. kvpress detects a prefill by `cache_position`."""
    held = [layer.keys.shape[2] for layer in cache.used_layers]
    cache.entries += fmean(fed(h, tokens.shape[1]) for h in held or [0])  # that the call finds
    positions = sequence.position + torch.arange(tokens.shape[1], device=tokens.device)
    sequence.position += tokens.shape[1]
    call = {"position_ids": positions[None], "cache_position": positions, "past_key_values": cache}
    logits: Tensor = model(input_ids=tokens, **call, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


def press_for(policy: KVPress, tokens: int) -> Any:  # noqa: ANN401 - a package without types
    """A new press at the policy's budget for a prompt of `tokens` tokens; presses keep state about their prompt."""
    press: Any = copy.deepcopy(policy.press)
    if policy.budget is None:
        return press
    kept, decoder = _budget(policy, tokens), decoding_part(press)
    if decoder is not None:
        decoder.target_size = max(kept, 1)
    prefills = press if decoder is None else getattr(press, "prefilling_press", None)
    if prefills is not None and not prefills.compression_ratio:
        prefills.compression_ratio = ratio_for(kept, tokens)
    return press


def _budget(policy: KVPress, prompt: int) -> int:
    """The budget in tokens per KV head for a prompt of `prompt` tokens."""
    assert policy.budget is not None
    return policy.budget if isinstance(policy.budget, int) else int(policy.budget * prompt)


def _check_model(model: PreTrainedModel, policy: KVPress) -> None:
    """Raise an error for a model with layers that presses cannot compress."""
    layout = layout_of(model.config)
    if layout.latent:
        check_latents(policy)
    others = {"recurrent layers": layout.states, "layers that read another's keys and values": layout.owners}
    for kind, has in others.items():
        if has:
            raise UsageError(
                f"{policy.name} of kvpress compresses models whose layers all keep the keys and values of every token, "
                f"and {type(model).__name__} has {kind}: use a policy of kvbench's own"
            )


@contextmanager
def _restored(model: PreTrainedModel) -> Iterator[None]:
    """Removes what presses leave in a model afterwards: a mask, and another rotation of a layer."""
    rotations = {module: module._modules.get("rotary_emb") for module in _attention_modules(model)}
    try:
        yield
    finally:
        for module, rotation in rotations.items():
            module.__dict__.pop("masked_key_indices", None)
            module._modules.pop("rotary_emb", None)
            if rotation is not None:
                module.rotary_emb = rotation


@contextmanager
def _press_errors(policy: KVPress) -> Iterator[None]:
    """Convert errors of a press to a UsageError with its name."""
    try:
        yield
    except (AssertionError, NotImplementedError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(f"{policy.kind} of kvpress cannot compress this prompt: {why}") from error
    except OSError as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"{policy.kind} of kvpress needs files that cannot be loaded: {why}") from error


@contextmanager
def _recording_peak(model: PreTrainedModel, cache: PressedCache, press: Any) -> Iterator[None]:  # noqa: ANN401
    """Record the cache's peak in every layer before its press compresses it."""

    def note(*_: object) -> None:
        cache.buffer_nbytes = _buffered(press)
        cache.note_bytes()

    with ExitStack() as hooks:
        for module in _attention_modules(model):
            hooks.callback(module.register_forward_hook(note, prepend=True).remove)
        yield
        note()


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]


def _question_calls(later: Tensor, cache: PressedCache, decodes: bool) -> Sequence[Tensor]:
    """The tokens after the context, [1,M], in calls of the model.

    A press that compresses while decoding counts calls, so it gets all of them in one call, as in kvpress's pipeline.
    Otherwise they are called one by one: layers may hold different numbers of tokens, and a call has one mask.
    """
    together = decodes and len({int(layer.max()) for layer in cache.kept_by_layer()}) == 1
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


def _masked(model: PreTrainedModel, cache: PressedCache) -> list[list[int]] | None:
    """Number of tokens in the cache whose keys a press masks, by layer and KV head; None if it masks none."""
    found = [[0] * layer.keys.shape[1] for layer in cache.used_layers]
    for module in _attention_modules(model):
        triples = getattr(module, "masked_key_indices", None)  # batch, KV head and slot of each
        if triples is not None and len(triples[0]):
            heads = torch.stack([x.cpu() for x in triples]).unique(dim=1)[1]
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            found[layer] = heads.bincount(minlength=len(found[layer])).tolist()
    return found if any(map(any, found)) else None


def _audit(policy: KVPress, press: Any, cache: PressedCache, steps: int, question: int) -> None:  # noqa: ANN401
    """BudgetError if a press that has compressed while decoding holds more than its target and interval allow."""
    decoder = decoding_part(press)
    if decoder is None or policy.budget is None or steps + bool(question) < decoder.compression_interval:
        return
    most, allowed = max(int(layer.max()) for layer in cache.kept_by_layer()), decoder.target_size
    if most > allowed + decoder.compression_interval:
        raise BudgetError(
            f"{policy.kind} holds {most} tokens per KV head, but its target size is {allowed} and its compression "
            f"interval {decoder.compression_interval}"
        )


def _rerotates(press: object) -> bool:
    """Whether kept keys move to the positions 0, 1, ..., so that the next token follows them there."""
    finch = _is(press, "FinchPress") and bool(getattr(press, "rerotate_keys", False))
    return finch or _is(press, "KeyRerotationPress", "RestoreKVPress")


def _is(press: object, *names: str) -> bool:
    presses = importlib.import_module("kvpress")
    return isinstance(press, tuple(getattr(presses, name) for name in names if hasattr(presses, name)))


@once
def _warn(kind: str) -> None:
    """Log once that a press holds more than its budget."""
    log.warning(
        "%s holds more tokens than its budget: what it masks or sets to zero is not freed and counts as held", kind
    )
