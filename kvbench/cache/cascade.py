"""Prompt layers whose shares of the budget shrink with every layer after them (CAKE).

A layer is ordered once, from the first token to keep to the first to evict. Its slots are stored in this order until
the last layer is measured, so that every smaller share is a prefix: all layers are cut by one concatenation of each
tensor. Then every layer is put back in order of position.

Shapes: B = 1 sequence, H_kv KV heads, T slots, n slots of a share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.cache.attend import backend_of
from kvbench.cache.layer import Layer
from kvbench.cache.sequence import CachedSequence
from kvbench.kernels.selection import take
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import protected_counts
from kvbench.policies.stores.slot_store import SlotStore

RANKED = "scores", "tie_break", "protected", "spared"
"""The tensors of a ranking, beside the positions of the store."""


def can_cut(sequence: CachedSequence) -> bool:
    """Whether the layers of a sequence are cut together: plain slots without codes, and evicted tokens are dropped."""
    policy = sequence.policy
    if policy.merger.merges or policy.schedule.rerotate or policy.allocator.per_head:
        return False
    stores = [layer.store for layer in sequence.layers if layer.opened]
    return all(isinstance(store, SlotStore) and store.holds_exact and store.starts is None for store in stores)


def cut_to_shares(sequences: Sequence[CachedSequence], measured: int) -> None:
    """Evict from the first `measured` layers of sequences of one prompt, which are ranked, down to their shares."""
    ranked = [(one, layer) for one in sequences for layer in one.layers[:measured]]
    shares = {layer: one.budgets.shares[layer.index] for one, layer in ranked}
    larger = [layer for layer, share in shares.items() if layer.count > share]
    _order({layer: shares[layer] for layer in larger})
    for some in _alike(larger):
        _cut(some, [shares[layer] for layer in some])
    final = {layer for one, layer in ranked if measured == len(one.layers)}
    for some in _alike([layer for layer in final if layer.ranking is not None and layer.ranking.ordered]):
        _by_position(some, some[0].policy.schedule.spare)
    changed = final.union(larger)
    for one, layer in ranked:
        if layer in changed:
            one.note_bytes(layer.index)


def _alike(layers: Sequence[Layer]) -> Iterable[list[Layer]]:
    """Layers whose tensors can be concatenated along their slots, as many as fit the workspace of the backend."""
    alike: dict[object, list[list[Layer]]] = {}
    for layer in layers:
        contents = _contents(layer)
        most = backend_of(contents["keys"]).workspace
        shapes = tuple((name, x.shape[1], x.shape[3:], x.device) for name, x in contents.items())
        parts = alike.setdefault((layer.policy.schedule.spare, shapes), [[]])
        if sum(one.nbytes for one in (*parts[-1], layer)) > most:
            parts.append([])
        parts[-1].append(layer)
    return [part for parts in alike.values() for part in parts if part]


def _order(shares: Mapping[Layer, int]) -> None:
    """Put the slots of layers in order of preference, unless they are; only those of their shares.

    Policies of a prompt that share their scores share the order, and what is taken in this order.
    """
    alike: dict[object, list[Layer]] = {}
    for layer, share in shares.items():
        ranking, scorer = layer.ranking, layer.policy.scorer
        assert ranking is not None
        assert scorer is not None
        if not ranking.ordered or scorer.protects(layer.count) != scorer.protects(share):
            scored = ranking.scores, ranking.tie_break, ranking.spared
            alike.setdefault((layer.index, scorer.protects(share), *map(id, scored)), []).append(layer)
    for some in alike.values():
        most = max(some, key=lambda layer: shares[layer])
        assert most.ranking is not None
        assert most.policy.scorer is not None
        ranking = most.ranking.protecting(*protected_counts(most.policy.scorer, [shares[most]]))
        order = ranking.order[..., : shares[most]]
        ranked = {name: x.gather(-1, order) for name, x in _tensors(ranking)}
        taken: dict[int, Tensor] = {}  # by the tensor of a store, which several may share
        for layer in some:
            share, store = shares[layer], _store(layer)
            for name, x in store.memory.items():
                if id(x) not in taken:
                    taken[id(x)] = take(store.contents()[name], order)
            contents = {name: taken[id(x)].narrow(2, 0, share) for name, x in store.memory.items()}
            store.replace(contents, ascending=False)
            kept: dict[str, Any] = {name: x.narrow(2, 0, share) for name, x in ranked.items()}
            layer.ranking = replace(
                ranking, **kept, positions=store.positions, packed=True, ascending=False, ordered=True
            )
            layer.count, layer.compacted = share, True


def _cut(layers: Sequence[Layer], shares: Sequence[int]) -> None:
    """Keep the first slots of ordered layers, with one launch for each of their tensors."""
    contents = [_contents(layer) for layer in layers]
    parts: dict[str, Sequence[Tensor]] = {}
    for name in contents[0]:
        kept = [own[name].narrow(2, 0, share) for own, share in zip(contents, shares, strict=True)]
        parts[name] = torch.cat(kept, 2).split(list(shares), 2)
    for index, (layer, share) in enumerate(zip(layers, shares, strict=True)):
        store, ranking = _store(layer), layer.ranking
        assert ranking is not None
        own = {name: part[index] for name, part in parts.items()}
        ranked: dict[str, Any] = {name: own.pop(name) for name, _ in _tensors(ranking)}
        store.replace(own, ascending=False)
        layer.ranking, layer.count = replace(ranking, **ranked, positions=store.positions), share


def _by_position(layers: Sequence[Layer], spare: int) -> None:
    """Put the slots of alike layers in order of position, with `spare` empty slots behind them: one sort for all."""
    contents, wholes = [_store(layer).contents() for layer in layers], dict[str, Tensor]()
    for name, x in contents[0].items():
        empty = x.new_full((*x.shape[:2], spare, *x.shape[3:]), -1 if name == "positions" else 0)
        wholes[name] = torch.cat([part for own in contents for part in (own[name], empty)], 2)
    positions, sizes = wholes["positions"], [own["positions"].shape[2] + spare for own in contents]
    repeats = torch.tensor(sizes, device=positions.device)
    number = torch.repeat_interleave(repeats, output_size=sum(sizes))  # of the layer of each slot
    places = positions.masked_fill(positions < 0, torch.iinfo(positions.dtype).max)
    order = (places + (number << 32)).argsort(dim=-1, stable=True)
    parts = {name: take(x, order).split(sizes, 2) for name, x in wholes.items()}
    for index, layer in enumerate(layers):
        _store(layer).replace({name: part[index] for name, part in parts.items()}, ascending=True, spare=spare)


def _contents(layer: Layer) -> dict[str, Tensor]:
    """The tensors of a layer's slots, [1,H_kv,T,...], and those of its ranking, by name."""
    assert layer.ranking is not None
    return _store(layer).contents() | dict(_tensors(layer.ranking))


def _tensors(ranking: Ranking) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a ranking that exist, by name."""
    named = ((name, getattr(ranking, name)) for name in RANKED)
    return [(name, x) for name, x in named if x is not None]


def _store(layer: Layer) -> SlotStore:
    assert isinstance(layer.store, SlotStore)
    return layer.store
