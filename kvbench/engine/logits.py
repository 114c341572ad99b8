"""What the model's logits say of tokens that are known, for a prompt a few tokens at a time.

Shapes: B batch, T prompt columns (padding included), V vocabulary, D hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

LOGITS_AT_ONCE = 2**24  # 64 MiB of float32: a prompt's logits never exist all at once


def surprisal(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p of tokens [...] under logits [...,V]: [...] float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)


def prompt_ratings(
    model: PreTrainedModel,
    output: BaseModelOutputWithPast,
    input_ids: Tensor,
    mask: Tensor | None,
    rate: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `rate` (logits [...,V], tokens [...]) says of a prompt's tokens, from what the model's base gave for it.

    [B,T] float32; 0 for padding and for a sequence's first token.
    """
    hidden = output.last_hidden_state
    assert hidden is not None
    batch, columns = input_ids.shape
    out = torch.zeros(batch, columns, device=hidden.device)
    at_once = max(1, LOGITS_AT_ONCE // (batch * model.config.get_text_config(decoder=True).vocab_size))
    for start in range(0, columns - 1, at_once):
        end = min(start + at_once, columns - 1)
        logits = head_logits(model, type(output)(last_hidden_state=hidden[:, start:end]))
        out[:, start + 1 : end + 1] = rate(logits, input_ids[:, start + 1 : end + 1].to(hidden.device))
    if mask is not None:
        follows = F.pad(mask[:, :-1], (1, 0))  # the token before it is a real one
        out = out.masked_fill(~(mask & follows).to(hidden.device), 0.0)
    return out


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head, also where transformers knows it by another name than `base_model`."""
    base: PreTrainedModel = model.base_model  # type: ignore[assignment]
    if base is not model:
        return base
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


def head_logits(model: PreTrainedModel, output: BaseModelOutputWithPast) -> Tensor:
    """The logits the model makes of last hidden states, soft-capping and scales of its own included: [B,n,V].

    output: of the type that the model's base gives, with last hidden states [B,n,D]. The model's whole forward runs,
    with a base that returns it: so no model's head, and nothing else it reads, has to be known here.
    """
    base = base_of(model)
    own = base.__dict__.get("forward")
    base.forward = lambda *args, **kwargs: output
    try:
        logits: Tensor = model.forward(inputs_embeds=output.last_hidden_state, use_cache=False).logits
        return logits
    finally:
        del base.forward
        if own is not None:
            base.forward = own
