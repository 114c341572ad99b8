"""The extras of a cache, and its layers with the interface of transformers."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.cache.extra import Extra
from kvbench.cache.families import Layout
from kvbench.cache.inputs import HiddenInputs
from kvbench.cache.latent import LatentLayers
from kvbench.cache.measured import MEASURING, MeasuredBudgets
from kvbench.cache.pre_passes import PrePasses
from kvbench.cache.recurrent import RecurrentKVLayer, RecurrentLayer, RecurrentLayers
from kvbench.cache.sequence import CachedSequence
from kvbench.cache.shared import SharedReads
from kvbench.cache.views import EmptyLayer, KVLayer
from kvbench.policies.policy import Policy


def extras_of(layout: Layout, policies: Iterable[Policy]) -> list[Extra]:
    """The extras that a model and the policies of a cache need, in the order in which their hooks are called."""
    policies, found = list(policies), list[Extra]()
    if any(policy.needs.hidden for policy in policies):
        found.append(HiddenInputs())  # before others make evictions wait
    if layout.owners:
        found.append(SharedReads(layout))
    if any(policy.pre_pass is not None for policy in policies):
        found.append(PrePasses())
    if any(isinstance(policy.allocator, MEASURING) for policy in policies):
        found.append(MeasuredBudgets())
    if layout.latent:
        found.append(LatentLayers())
    if layout.states:
        found.append(RecurrentLayers())
    return found


def layers_of(sequences: Sequence[CachedSequence], layout: Layout) -> list[Any]:
    """A cache's layers, by their index in the model."""
    return [_layer(sequences, index, layout) for index in range(layout.layers)]


def _layer(sequences: Sequence[CachedSequence], index: int, layout: Layout) -> KVLayer | RecurrentLayer | EmptyLayer:
    place = layout.places.get(index)
    if index not in layout.states:
        return EmptyLayer() if place is None else KVLayer(sequences, place)
    if place is None:
        return RecurrentLayer(sequences, index, layout)
    return RecurrentKVLayer(sequences, place, index, layout)
