"""A KVCache driven by queries, keys and values of our own making, and a look at the scores its policy gave."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from kvbench import KVCache
from kvbench.cache.hook import kvbench_attention
from kvbench.policies.observation import AttentionParams, Observation, QueryWindow, SequenceInfo, SlotInfo, State
from kvbench.policies.policy import Policy
from kvbench.policies.ranking import Ranking


class Crafted:
    """One attention layer without a model around it; the scaling is 1 unless told otherwise."""

    def __init__(
        self, policy: Policy, query_heads: int = 1, kv_heads: int = 1, prompt_length: int | list[int] | None = None
    ) -> None:
        config = LlamaConfig(
            hidden_size=8 * query_heads,
            num_hidden_layers=1,
            num_attention_heads=query_heads,
            num_key_value_heads=kv_heads,
            head_dim=8,
        )
        config._attn_implementation = "kvbench"
        self._module = LlamaAttention(config, layer_idx=0).eval()
        self.cache = KVCache(config, policy, prompt_length=prompt_length)

    def call(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, scaling: float | None = 1.0
    ) -> Tensor:
        """queries [B,H_q,M,8], keys and values [B,H_kv,M,8] -> output [B,H_q,M,8]."""
        held, _ = self.cache.update(keys, values, 0)
        out, _ = kvbench_attention(self._module, queries, held, held, mask, scaling=scaling)
        return out.transpose(1, 2)

    def kept(self, row: int = 0) -> list[tuple[int, ...]]:
        """Positions held by every KV head, ascending."""
        positions = self.cache.layers[0].positions[row]
        return [tuple(sorted(int(p) for p in head if p >= 0)) for head in positions]


def windowed(queries: Tensor, keys: Tensor, values: Tensor, budget: int, model: Any = None) -> Observation:
    """A prompt whose window has queries [H_q,w,D], over keys and values [H_kv,T,D]; model: the layer."""
    tokens, window = keys.shape[1], queries.shape[1]
    return observed(
        keys[None],
        queries[None],
        values=values[None],
        recent_queries=queries[None],
        recent_positions=torch.arange(tokens - window, tokens)[None],
        scaling=keys.shape[-1] ** -0.5,
        model=model,
        budgets=(budget,),
        packed=True,
    )


def observed(
    keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None, seen: int | None = None, **more: Any
) -> Observation:
    """One layer's observation of keys [B,H_kv,T,D] by the newest of `seen` queries; the scaling is 1.

    By default queries are the keys, slots hold the tokens in order, and these are all that was seen. more: fields of
    the observation and of its parts.
    """
    queries = keys if queries is None else queries
    positions = torch.arange(keys.shape[2]).expand(keys.shape[:3]) if positions is None else positions
    seen = int(positions.max()) + 1 if seen is None else seen
    fields: dict[str, Any] = {"layer": 0, "values": torch.zeros_like(keys), "phase": "prompt", **more}
    if "recent_queries" in fields:
        fields["window"] = QueryWindow(fields.pop("recent_queries"), fields.pop("recent_positions"))
    for name, kind in (("params", AttentionParams), ("slots", SlotInfo), ("sequences", SequenceInfo)):
        own = {"scaling": 1.0} if name == "params" else {}
        fields[name] = kind(**own | {key: fields.pop(key) for key in kind._fields if key in fields})
    return Observation(
        queries=queries,
        query_positions=torch.arange(seen - queries.shape[2], seen).expand(len(keys), -1),
        keys=keys,
        positions=positions,
        seen=torch.full((len(keys),), seen),
        **fields,
    )


@dataclass(frozen=True)
class Ranked:
    """One call of `Policy.rank`: what was looked at (copied), and what came out."""

    observation: Observation
    state: State
    ranking: Ranking

    def scores(self, row: int = 0, head: int = 0) -> list[float]:
        """Scores by ascending position."""
        return self._ordered(self.ranking.scores, row, head)

    def base(self, row: int = 0, head: int = 0) -> list[float]:
        """The base scores behind value-aware ones, by ascending position."""
        return self._ordered(self.ranking.tie_break, row, head)

    def _ordered(self, scores: Tensor, row: int, head: int) -> list[float]:
        positions = self.ranking.positions[row, head].tolist()
        by_position = dict(zip(positions, scores[row, head].tolist(), strict=True))
        return [by_position[p] for p in sorted(by_position) if p >= 0]


@contextmanager
def rankings() -> Iterator[list[Ranked]]:
    """Every ranking made inside, in order; nothing is changed."""
    seen: list[Ranked] = []
    original = Policy.rank

    def rank(policy: Policy, observation: Observation, state: State) -> Ranking:
        copied = {name: x.clone() for name, x in state.items()}
        ranking = original(policy, observation, state)
        positions = ranking.positions.clone()
        shown = Ranking(ranking.scores, ranking.tie_break, positions, ranking.protected, ranking.seen)
        seen.append(Ranked(observation, copied, shown))
        return ranking

    with patch.object(Policy, "rank", rank):
        yield seen


def drawn(
    tokens: int, query_heads: int = 1, kv_heads: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [1,H_q,M,8], k and v [1,H_kv,M,8]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((query_heads, tokens, 8), (kv_heads, tokens, 8), (kv_heads, tokens, 8))
    q, k, v = (torch.randn(1, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def chosen(ranking: Ranking, keep: int) -> list[list[int]]:
    """Positions that a ranking of one sequence keeps of each head, ascending."""
    kept = ranking.select(keep)[0]
    return [sorted(ranking.positions[0, head][kept[head]].tolist()) for head in range(len(kept))]
