"""Where the divergence from the full cache comes from: the same policy with the cache of one layer (or KV head) whole.

One prefill serves all: the full cache, the policy, and one row per layer, which are fed the full cache's own answer.

Shapes: L layers, H KV heads of a layer, C slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.cache.copies import fork
from kvbench.engine.batch import DecodeBatch, new_sequence
from kvbench.engine.divergence import compare, divergence_of, full_cache
from kvbench.engine.prefill import prefill_prompts
from kvbench.engine.sequence import LiveSequence, Request
from kvbench.errors import UsageError
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.schedule import Prompt
from kvbench.report.figures.style import HEAT
from kvbench.tools.diagnostics.probe import Probe

TITLE = "share of the KL from full that is gone if one {} is kept whole"
FIELDS = {"task.divergence": True}
AT_ONCE = 32
"""Rows of a batch; each holds a copy of the policy's cache and a whole layer."""


def check(policy: Policy, name: str, heads: bool = False) -> None:
    """Raise ValueError for a policy whose layers cannot be exchanged."""
    why = None
    if policy.generator or isinstance(policy.pre_pass, PromptChoice) or policy.reader is not None:
        why = "does not hold its tokens layer by layer at their positions, so no layer can be exchanged: choose another"
    elif not policy.evicts and policy.pre_pass is None and policy.store.exact:
        why = "keeps every token exactly, so its KL is 0: choose another policy"
    elif not isinstance(policy.schedule, Prompt) or policy.schedule.late:
        why = "evicts before or after the end of the prompt, and one prefill cannot serve all: use schedule=prompt"
    elif heads and (policy.decoding_evicts or not policy.store.exact or not policy.evicts):
        why = "cannot keep a single head whole: --heads needs decode=grow, and a policy that evicts and stores exactly"
    elif heads and policy.granularity == "query_head":
        why = "keeps a set of tokens per query head: --heads is about KV heads"
    if why is not None:
        raise ValueError(f"policy={name} {why}")


@torch.inference_mode()
def measure(probe: Probe) -> list[dict[str, object]]:
    """One row per layer, or per layer and KV head: the KL from full with it whole, and what that takes away.

    kl: of the policy, nats per token of the answer. kl_whole: with the layer or head whole. removed: kl - kl_whole.
    Raises the error of a sequence, and UsageError if a context is compressed before its question.
    """
    request = probe.request
    assert request is not None
    if request.is_turn or request.asks("question"):
        raise UsageError(
            f"policy={probe.name}: no layer can be exchanged before a question: use compress=prompt, and a task whose "
            "prompts have one question"
        )
    policies = (full_cache(), probe.policy, _without_eviction(probe.policy, request))
    full, base, whole = (new_sequence(request, policy) for policy in policies)
    full.reference = base.reference = whole.reference = full
    prefill_prompts(probe.model, [[full, base, whole]])
    places = list(_places(whole, probe.heads))
    found, waiting, batch = dict[object, float](), iter([None, *places]), DecodeBatch(probe.model)
    while some := list(islice(waiting, AT_ONCE)):
        found |= zip(some, _kl(batch, full, base, whole, some), strict=True)
    kl = found.pop(None)
    names = ("layer", "head")[: 1 + probe.heads]
    return [
        {**dict(zip(names, place, strict=True)), "kl": kl, "kl_whole": found[place], "removed": kl - found[place]}
        for place in places
    ]


def _without_eviction(policy: Policy, request: Request) -> Policy:
    """The policy with a budget for all tokens, whose layers have its statistics; full precision if it quantizes."""
    if not policy.evicts or not policy.store.exact:
        return full_cache()
    allocator = Uniform() if policy.allocator.sets_budget else policy.allocator
    return replace(policy, allocator=allocator, budget=request.length + request.max_new_tokens)


def _places(whole: LiveSequence, heads: bool) -> Iterator[tuple[int, ...]]:
    if whole.error is not None:
        raise whole.error
    for layer in whole.held.layers:
        yield from ((layer.index, h) for h in range(layer.positions.shape[1])) if heads else [(layer.index,)]


def _kl(
    batch: DecodeBatch, full: LiveSequence, base: LiveSequence, whole: LiveSequence, places: Sequence[object]
) -> list[float]:
    """The KL of the policy with each layer or head whole; None: as it is."""
    reference = _copy(full)
    rows = [_exchanged(base, whole, place) for place in places]
    for one in (reference, *rows):
        one.reference, one.waiting = reference, full.waiting
    compare(reference, rows)
    batch.start([reference, *rows])
    batch.finish(rows)
    return [divergence_of("", row.divergences).mean_kl or 0.0 for row in rows]


def _copy(sequence: LiveSequence) -> LiveSequence:
    if sequence.error is not None:
        raise sequence.error
    assert sequence.cache is not None
    return replace(sequence, cache=fork(sequence.cache), tokens=[], divergences=[])


def _exchanged(base: LiveSequence, whole: LiveSequence, place: object) -> LiveSequence:
    """The policy after its prompt, with one layer, or one head of a layer, of the other sequence."""
    row = _copy(base)
    if not isinstance(place, tuple):
        return row
    index, other = place[0], _copy(whole).held
    if len(place) > 1:
        own, layer = row.held.layers[index].positions, other.layers[index]
        kept = (layer.positions[..., None] == own[..., None, :]).any(-1)
        kept[:, place[1]] = True
        layer.store.keep(kept & (layer.positions >= 0), 0)
    row.held.take_layer(index, other)
    return row


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A heat map: policies by layers, or for each policy KV heads by layers; means over prompts."""
    order = list(table["policy"].unique())
    mean = table.groupby(["policy", *[name for name in ("head",) if name in table], "layer"])[["kl", "removed"]].mean()
    cells = (mean["removed"] / mean["kl"].where(mean["kl"] > 0)).unstack("layer")
    maps = {str(name): cells.loc[name] for name in order} if "head" in table else {"": cells.loc[order]}
    panels = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    top = float(np.nan_to_num(cells.to_numpy()).max(initial=0.01))
    for axes, (title, own) in zip(panels, maps.items(), strict=True):
        _map(axes, own, top)
        axes.set_title(title, loc="left")
    panels[-1].set_xlabel("layer")
    figure.colorbar(panels[0].images[0], ax=panels, label="share of the KL that is gone", shrink=0.8)


def _map(axes: Axes, cells: pd.DataFrame, top: float) -> None:
    axes.imshow(cells.to_numpy(), cmap=colormaps[HEAT], vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.set_yticks(range(len(cells)), [str(name) for name in cells.index])
    step = -(-len(cells.columns) // 16)
    axes.set_xticks(range(0, len(cells.columns), step), [str(name) for name in cells.columns[::step]])
    if cells.index.name == "head":
        axes.set_ylabel("KV head")
