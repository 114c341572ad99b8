"""How unexpected each token was to the model itself: -log p(token | all before it), for policies that ask for it.

Shapes: B batch, T prompt columns (padding included), V vocabulary, D hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvbench.cache.cache import KVCache

LOGITS_AT_ONCE = 2**24  # 64 MiB of float32: a prompt's logits never exist all at once


def surprisal(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p of tokens [...] under logits [...,V]: [...] float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)


@contextmanager
def telling_surprisal(model: PreTrainedModel, cache: KVCache, input_ids: Tensor, mask: Tensor | None) -> Iterator[None]:
    """While the model reads a prompt [B,T] in one call: tell the cache its surprisal as soon as the layers are done.

    mask [B,T] bool marks real tokens, None: all are. ValueError where the model calls a part of its base model alone.
    """
    done = False

    def tell(base: torch.nn.Module, args: object, output: Any) -> None:  # noqa: ANN401 - a ModelOutput
        nonlocal done
        done = True
        hook.remove()
        cache.tell_surprisal(prompt_surprisal(model, output, input_ids, mask))

    cache.group.expect_surprisal()
    hook = model.base_model.register_forward_hook(tell)
    try:
        yield
    finally:
        hook.remove()
    if not done:
        raise ValueError(
            f"{cache.policy.name} needs the probability of every prompt token, which kvbench cannot get from "
            f"{type(model).__name__}: it calls a part of its {type(model.base_model).__name__} and not the whole"
        )


def prompt_surprisal(
    model: PreTrainedModel, output: BaseModelOutputWithPast, input_ids: Tensor, mask: Tensor | None
) -> Tensor:
    """[B,T] float32 from what the model's base gave for a prompt; 0 for padding and for a sequence's first token."""
    hidden = output.last_hidden_state
    assert hidden is not None
    batch, columns = input_ids.shape
    out = torch.zeros(batch, columns, device=hidden.device)
    at_once = max(1, LOGITS_AT_ONCE // (batch * model.config.get_text_config(decoder=True).vocab_size))
    for start in range(0, columns - 1, at_once):
        end = min(start + at_once, columns - 1)
        logits = head_logits(model, type(output)(last_hidden_state=hidden[:, start:end]))
        out[:, start + 1 : end + 1] = surprisal(logits, input_ids[:, start + 1 : end + 1].to(hidden.device))
    if mask is not None:
        follows = torch.nn.functional.pad(mask[:, :-1], (1, 0))  # the token before it is a real one
        out = out.masked_fill(~(mask & follows).to(hidden.device), 0.0)
    return out


def head_logits(model: PreTrainedModel, output: BaseModelOutputWithPast) -> Tensor:
    """The logits the model makes of last hidden states, soft-capping and scales of its own included: [B,n,V].

    output: of the type that the model's base gives, with last hidden states [B,n,D]. The model's whole forward runs,
    with a base that returns it: so no model's head, and nothing else it reads, has to be known here.
    """
    base = model.base_model
    own = base.__dict__.get("forward")
    base.forward = lambda *args, **kwargs: output
    try:
        logits: Tensor = model.forward(inputs_embeds=output.last_hidden_state, use_cache=False).logits
        return logits
    finally:
        del base.forward
        if own is not None:
            base.forward = own
