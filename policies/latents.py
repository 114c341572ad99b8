"""Observations of layers that store latents, which are expanded to keys and values of every query head.

All heads share a token's latent and keep one token set, so a policy sees one KV head with H_q query heads. Attention is
computed over the expanded keys, and the score is the mean over all heads, as over a group. A scorer that reads keys or
values (`Needs.keys`) scores every head; the mean of these scores is used.

Shapes: B batch, H_q query heads, w queries of a window, T slots, D head dim.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, partial
from typing import Literal

from torch import Tensor

from kvbench.kernels.query_sums import Moments
from kvbench.kernels.references import attention_rows, widen
from kvbench.policies.model_layer import Latents
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State, StepCache
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.lookahead import Lookahead
from kvbench.policies.pre_passes.pre_pass import ExtraPasses
from kvbench.policies.selections.fair import Fair
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.slot_store import SlotStore
from kvbench.policies.stores.store import LayerStore

ROWS_AT_ONCE = 2**22  # number of attention weights in memory at once


def check_latents(policy: Policy) -> None:
    """Raise ValueError if a policy cannot be used with latents, which all heads share and which need one token set."""
    needs = Needs() if policy.scorer is None else policy.scorer.needs
    fair, scorer = policy.selection, policy.scorer
    reasons = {
        "is computed by another package, which reads the keys and values of heads": policy.generator is not None,
        "has a separate budget for each head": policy.allocator.per_head,
        "keeps a token set for each query head": policy.granularity == "query_head",
        "divides its window among the parts of a prompt": isinstance(fair, Fair)
        and scorer is not None
        and fair.divides(scorer),
        "merges keys and values": policy.merger.merges,
        "uses sparse attention": policy.reader is not None,
        "reads unrotated keys": needs.model,
        "rotates kept keys to new positions": policy.schedule.rerotate,
        "makes extra forward passes over the stored keys": isinstance(policy.pre_pass, ExtraPasses | Lookahead),
        "keeps statistics of every key": needs.keys and bool(needs.statistics),
        "compresses stored keys and values": type(policy.store) is not Dense,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"{policy.name} {reason}, but this model's cache stores latents that all heads of a layer share: use "
                "another policy, such as snapkv or h2o"
            )


def of_all_heads(stored: Callable[[str], Tensor], latents: Latents, known: StepCache) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads. stored: what is stored as keys or values. known: has them once made."""
    if "expanded keys" not in known:
        known["expanded keys"], known["expanded values"] = latents.expand(stored("keys"), stored("values"))
    return known["expanded keys"], known["expanded values"]


def expanded(held: LayerStore, latents: Latents, known: StepCache) -> SlotStore:
    """The latents of a store as keys and values of all heads; known: see `of_all_heads`."""
    keys, values = of_all_heads(partial(getattr, held), latents, known)
    positions = held.positions.expand(-1, keys.shape[1], -1).contiguous()
    contents = {"keys": keys, "values": values, "positions": positions}
    return SlotStore.of(contents, (), held.slots.ascending, held.slots.packed)


class LatentObservation(Observation):
    """An observation with keys and values [B,H_q,T,D] of all query heads at shared positions [B,1,T]."""

    @cached_property
    def heads(self) -> Observation:
        """The same layer with every query head as a KV head."""
        given = {field.name: getattr(self, field.name) for field in fields(Observation)}
        given["positions"] = self.positions.expand(-1, self.keys.shape[1], -1).contiguous()
        return Observation(**given)

    @property
    def group(self) -> int:
        return self.queries.shape[1]

    def scores(self, score: Callable[[Observation, State], Tensor], state: State, of_keys: bool) -> Tensor:
        found = score(self.heads if of_keys else self, state)
        return found if found.shape[1] == 1 else found.mean(1, keepdim=True)

    def window_attention(self, window: int) -> Tensor:
        return self.heads.window_attention(window).transpose(1, 2)

    def window_sums(self, window: int) -> Tensor:
        return self.heads.window_sums(window).transpose(1, 2)

    def window_mean(self, window: int) -> Tensor:
        return self.heads.window_mean(window).mean(1, keepdim=True)

    def window_spread(self, statistic: Literal["variance", "entropy"], window: int) -> Tensor:
        return self.heads.window_spread(statistic, window).transpose(1, 2)

    def window_largest(self, window: int) -> Tensor:
        return self.window_mean(window)[:, 0]

    def column_sums(self) -> Tensor:
        return self.heads.column_sums().transpose(1, 2)

    def moments(self) -> Moments:
        batch, heads, new, _ = self.queries.shape
        keys, places = self.keys, self.heads.positions
        sums = places.new_zeros(self.positions.shape, dtype=widen(keys.new_empty(0)).dtype)
        squares = sums.clone()
        at_once = max(1, ROWS_AT_ONCE // (batch * heads * keys.shape[2]))
        for first in range(0, new, at_once):
            some = slice(first, first + at_once)
            call = self.queries[:, :, some], keys, self.query_positions[:, some], places
            mean = attention_rows(*call, *self.params[:4]).mean((1, 2))[:, None]  # [B,1,w,T]
            sums += mean.sum(2)
            squares += mean.square().sum(2)
        return Moments(sums, squares)
