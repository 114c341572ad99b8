"""A decoding step over codes of groups in flat memory, and a ring that takes the new tokens.

Codes are entries of a group of tokens or of one, as in `kvbench.policies.stores.ring_layout`; segments start at whole
entries. Token i of a segment is in place i % E of its ring.

Shapes: L layers, P rows of a step, B sequences, H KV heads, N slots, m entries, E places of the ring, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.kernels.devices import decodes
from kvbench.kernels.group_codes import FlatCodes, Ring, append_groups, decode_groups
from kvbench.kernels.group_formats import Form
from kvbench.kernels.references import NewTokens, decode_attention_ref, widen
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.slot_store import SIDES

CODED, RING = "coded", ("exact keys", "exact values", "exact positions")
"""Names of what a recorded step has about a layer beside its codes: [1,H] tokens read from codes, and [1,H,E+n,...]."""


def form_of(codec: Coding, side: int, dim: int) -> Form:
    """The form of the codes of keys (side 0) or values (1) of D = `dim` numbers."""
    form = codec.packed(side, dim)
    assert form is not None
    return form


def take_places(
    state: Mapping[str, Tensor], ring: int, positions: Tensor, offsets: Tensor, nowhere: int,
    into: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Take a place of the ring for the next token of every row, and a slot for the token that it displaces.

    state: of the rows, by name, [L,P,H,...], whose `counts` include the new token. positions [L,N], of which layers are
    at `offsets` [L,1,1]. nowhere: a slot that is not read, for rows in which no token becomes a code (slot -1). into:
    places and slots [L,P,H].
    """
    coded, held, (places, gone) = state[CODED], state[RING[2]], into
    torch.remainder(state["counts"] - 1, ring, out=places)
    moved, index = coded < state["counts"] - ring, places[..., None]
    gone.copy_(torch.where(moved, coded, -1))
    slots = torch.where(moved, state["starts"] + coded, nowhere) + offsets
    old = torch.where(moved, held.gather(-1, index)[..., 0], -1)
    positions.view(-1).scatter_(0, slots.flatten(), old.flatten())
    held.scatter_(-1, index, state["next"].int().expand_as(places)[..., None])
    coded += moved


def group_step(
    codec: Coding, queries: Tensor, new: NewTokens, gone: Tensor, memory: Mapping[str, Tensor], ring: Ring,
    places: tuple[Tensor, Tensor], segments: tuple[Tensor, Tensor], most: int, how: AttentionParams,
) -> Tensor:  # fmt: skip
    """Attention [B,H_q,1,D] of the newest queries over segments of codes and a ring that takes the new tokens first.

    new: with places of the ring. gone [B,H]: slots of the displaced tokens, whose values are encoded; -1: none. memory:
    flat, by name. places: positions of queries [B,1] and slots [N]. segments: starts and tokens in codes [B,H], at most
    `most`. Nothing waits for a GPU, so that the step can be recorded.
    """
    if not decodes(queries):
        return group_step_ref(codec, queries, new, gone, memory, ring, places, segments, most, how)
    keys, values = (flat_codes(codec, memory, side, x.shape[-1]) for side, x in enumerate(ring[:2]))
    append_groups(values, ring, segments[0], new, gone)
    return decode_groups(queries, keys, values, ring, places, segments, most, how.for_kernels)


def group_step_ref(
    codec: Coding, queries: Tensor, new: NewTokens, gone: Tensor, memory: Mapping[str, Tensor], ring: Ring,
    places: tuple[Tensor, Tensor], segments: tuple[Tensor, Tensor], most: int, how: AttentionParams,
) -> Tensor:  # fmt: skip
    """The definition of `group_step`: encode displaced values, dequantize all codes, attend to them and the ring."""
    index, forms = new.slots[..., None, None], [form_of(codec, side, x.shape[-1]) for side, x in enumerate(ring[:2])]
    if forms[1].per_token:
        _encode(codec, ring.values, index, gone, memory, segments[0])
    for x, token in ((ring.keys, new.keys), (ring.values, new.values)):
        x.scatter_(2, index.expand_as(token), token)
    unit = max(form.tokens for form in forms)
    steps, found = torch.arange(-(-most // unit) * unit, device=queries.device), []
    for side, (form, exact) in enumerate(zip(forms, ring[:2], strict=True)):
        first, count = segments[0] // form.tokens, len(places[1]) // form.tokens
        entries = (first[..., None] + steps[: len(steps) // form.tokens]).clamp(max=count - 1)
        own = {name: memory[f"{SIDES[side]} {name}"][entries] for name in form.shapes}
        x = codec.decode(own, side, len(steps), exact.shape[-1])
        x = x.flatten(2, 3) if x.dim() == 5 else x
        found.append(torch.cat([x, exact], dim=2).to(widen(exact).dtype))
    slots = (segments[0][..., None] + steps).clamp(max=len(places[1]) - 1)
    positions = places[1][slots].masked_fill(steps >= segments[1][..., None], -1)
    positions = torch.cat([positions, ring.positions], dim=-1)
    out = decode_attention_ref(widen(queries), found[0], found[1], places[0], positions, *how.for_kernels).out
    return out.to(queries.dtype)


def _encode(
    codec: Coding, values: Tensor, index: Tensor, gone: Tensor, memory: Mapping[str, Tensor], starts: Tensor
) -> None:
    """Encode the values of a ring at `index` [B,H,1,1] into their slots."""
    old = values.gather(2, index.expand(-1, -1, -1, values.shape[-1]))
    slots = torch.where(gone < 0, 0, starts + gone)
    for name, x in codec.encode(old, 1).items():
        flat, new = memory[f"{SIDES[1]} {name}"], x[:, :, 0]
        own = torch.where((gone < 0).view(*gone.shape, *[1] * (new.dim() - 2)), flat[slots], new)
        flat.index_copy_(0, slots.flatten(), own.flatten(0, 1))


def flat_codes(codec: Coding, memory: Mapping[str, Tensor], side: int, dim: int) -> FlatCodes:
    """The codes of one side as kernels read them; D = `dim`."""
    form = form_of(codec, side, dim)
    words, scale, minimum = (memory[f"{SIDES[side]} {name}"] for name in form.shapes)
    return FlatCodes(words, scale, minimum, form)
