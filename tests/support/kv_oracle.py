"""What eviction ought to do, the slow way: one sequence, one head, one query at a time, in float64 with plain lists.

Written from the published equations (CAOTE, arXiv 2504.14051, section 3; H2O, TOVA, SnapKV as its section 4 uses them)
and knowing nothing of kvbench: the model runs through an attention function of its own, which receives the new keys
only and keeps everything else here.

Letters: n cached tokens, m new ones, G query heads of a KV head, D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

Array = NDArray[np.float64]
Kept = list[list[tuple[int, ...]]]
"""Kept positions, ascending: [layer][KV head]."""


@dataclass(frozen=True)
class Rules:
    """One way to evict. block None: the whole prompt at once. budget None: nothing is ever evicted."""

    base: str
    budget: int | float | None = None
    value: str | None = None
    block: int | None = None
    decode: str = "evict"
    order: str = "attend_then_evict"
    window: int = 32
    kernel: int = 7
    pool: str = "max"
    sinks: int = 4
    recent: int = 0
    half_recent: bool = False
    gqa: str = "alpha_mean"
    norm_domain: str = "all"


@dataclass(frozen=True)
class Eviction:
    """One eviction of one KV head: what was cached, its scores (base, and the value-aware ones) and what stayed."""

    layer: int
    head: int
    step: int
    positions: list[int]
    base: list[float]
    scores: list[float]
    kept: list[int]


@dataclass
class Trace:
    """What one sequence left behind. kept: after every forward; outputs[step][layer]: [H_q,m,D], before W_O."""

    tokens: list[int] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    outputs: list[dict[int, Array]] = field(default_factory=list)

    def margin(self) -> float:
        """The smallest relative gap between a token that stayed and one that went (equal scores aside)."""
        gaps = [1.0]
        for event in self.evictions:
            stayed = set(event.kept)
            scores = dict(zip(event.positions, event.scores, strict=True))
            low = min((s for p, s in scores.items() if p in stayed and s < math.inf), default=math.inf)
            high = max((s for p, s in scores.items() if p not in stayed), default=-math.inf)
            if low != high and not math.isinf(low):
                gaps.append((low - high) / max(abs(low), abs(high)))
        return min(gaps)


@dataclass
class Head:
    """What one KV head holds: keys, values and, per query head of its group, accumulated column sums, by position."""

    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)
    sums: list[dict[int, float]] = field(default_factory=list)

    def drop(self, positions: Sequence[int]) -> None:
        for position in positions:
            del self.keys[position], self.values[position]
            for sums in self.sums:
                del sums[position]


@dataclass(frozen=True)
class Glance:
    """How one layer turns a query into weights: scale, soft cap of the logits, sliding window."""

    scaling: float
    softcap: float | None
    sliding: int | None

    def weights(self, query: Array, at: int, keys: dict[int, Array]) -> dict[int, float]:
        """Softmax over the cached keys which the query at position `at` may see; the others get 0."""
        logits = {}
        for position, key in keys.items():
            if position > at or (self.sliding is not None and position <= at - self.sliding):
                continue
            logit = float(query @ key) * self.scaling
            logits[position] = logit if self.softcap is None else self.softcap * math.tanh(logit / self.softcap)
        if not logits:
            return {}
        top = max(logits.values())
        powers = {p: math.exp(x - top) for p, x in logits.items()}
        total = sum(powers.values())
        return {p: powers.get(p, 0.0) / total for p in keys}


def row_output(weights: dict[int, float], values: dict[int, Array]) -> Array:
    return np.sum([w * values[p] for p, w in weights.items()], axis=0)


# scores


def pooled(row: list[float], kernel: int, pool: str) -> list[float]:
    """Stride 1, same length; beyond the ends: nothing for max, zeros that count for avg."""
    reach = kernel // 2
    out = []
    for i in range(len(row)):
        near = row[max(0, i - reach) : i + reach + 1]
        out.append(max(near) if pool == "max" else sum(near) / kernel)
    return out


def normalised(h: list[float]) -> list[float]:
    """f_norm: h / sum h; with negative scores min-max with a floor of 1e-3 of the range, then the same."""
    if min(h) < 0:
        low, high = min(h), max(h)
        h = [x - low + 1e-3 * (high - low) for x in h]
    total = sum(h)
    return [1 / len(h)] * len(h) if total == 0 else [x / total for x in h]


def caote(h: list[float], values: list[Array], fast: bool) -> list[float]:
    """alpha/(1 - alpha) * ||X - v||, X the weighted (fast: the plain) mean of the values; eqs. 8 and 23."""
    alpha = normalised(h)
    centre = np.mean(values, axis=0) if fast else np.sum([a * v for a, v in zip(alpha, values, strict=True)], axis=0)
    return [a / max(1 - a, 1e-6) * float(np.linalg.norm(centre - v)) for a, v in zip(alpha, values, strict=True)]


def value_aware(per_query_head: list[list[float]], values: list[Array], rules: Rules, free: list[int]) -> list[float]:
    """CAOTE's scores of all n tokens from the base scores of each query head; `free` are those which may go."""
    fast = rules.value == "fastcaote"
    domain = list(range(len(values))) if rules.norm_domain == "all" else free
    picked = [values[i] for i in domain]
    heads = [[h[i] for i in domain] for h in per_query_head]
    if rules.gqa == "alpha_mean":
        inside = caote([sum(column) / len(column) for column in zip(*heads, strict=True)], picked, fast)
    else:
        each = [caote(h, picked, fast) for h in heads]
        columns = list(zip(*each, strict=True))
        if rules.gqa == "score_mean":
            inside = [sum(c) / len(c) for c in columns]
        else:
            inside = [math.sqrt(sum(x * x for x in c)) for c in columns]
    scores = [math.inf] * len(values)
    for i, c in zip(domain, inside, strict=True):
        scores[i] = c
    return scores


class Sequence1:
    """One sequence going through the layers, with everything it has cached."""

    def __init__(self, rules: Rules, layers: int, kv_heads: int, group: int, prompt: int) -> None:
        self.rules, self.layers, self.kv_heads, self.group = rules, layers, kv_heads, group
        self.heads = [[Head(sums=[{} for _ in range(group)]) for _ in range(kv_heads)] for _ in range(layers)]
        self.queries: list[dict[int, Array]] = [{} for _ in range(layers)]  # [layer][position] -> [H_q,D]
        self.seen = 0
        self.seen_after = 0  # once the present block is in
        self.step = 0
        self.may_evict = True
        self.trace = Trace()
        self.budgets = [self._budget(layer, prompt) for layer in range(layers)]

    def _budget(self, layer: int, prompt: int) -> int | None:
        budget = self.rules.budget
        if not isinstance(budget, float):
            return budget
        total = round(budget * prompt * self.layers)
        return total // self.layers + (1 if layer < total % self.layers else 0)

    def attend(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        """queries [H_q,m,D], new keys and values [H_kv,m,D] -> output [H_q,m,D]; evicts on the way."""
        m = queries.shape[1]
        new = list(range(self.seen, self.seen + m))
        for i, position in enumerate(new):
            self.queries[layer][position] = queries[:, i]
        out = np.zeros(queries.shape)
        for kv, head in enumerate(self.heads[layer]):
            for i, position in enumerate(new):
                head.keys[position], head.values[position] = keys[kv, i], values[kv, i]
            group = range(kv * self.group, (kv + 1) * self.group)
            own = {p: (keys[kv, i], values[kv, i]) for i, p in enumerate(new)}
            rows = {(q, p): glance.weights(queries[q, i], p, head.keys) for q in group for i, p in enumerate(new)}
            self._accumulate(head, rows, group)
            late = self.rules.order == "evict_then_attend"
            before = {key: row_output(row, head.values) for key, row in rows.items()} if not late else {}
            self._evict(layer, kv, head, glance)
            for q in group:
                for i, p in enumerate(new):
                    out[q, i] = before[q, p] if not late else self._after(queries[q, i], p, head, own[p], glance)
        self.trace.outputs[-1][layer] = out
        return out

    @staticmethod
    def _after(query: Array, at: int, head: Head, own: tuple[Array, Array], glance: Glance) -> Array:
        """A row's output from what has survived; a row that sees nothing any more sees its own token."""
        weights = glance.weights(query, at, head.keys)
        return row_output(weights, head.values) if weights else own[1]

    def _accumulate(self, head: Head, rows: dict[tuple[int, int], dict[int, float]], group: range) -> None:
        for (q, _), row in rows.items():
            sums = head.sums[q - group.start]
            for position in head.keys:
                sums[position] = sums.get(position, 0.0) + row.get(position, 0.0)

    def _evict(self, layer: int, kv: int, head: Head, glance: Glance) -> None:
        budget = self.budgets[layer]
        positions = sorted(head.keys)
        if budget is None or not self.may_evict or len(positions) <= budget:
            return
        safe = self._protected(positions, budget)
        free = [i for i, p in enumerate(positions) if p not in safe]
        per_head = self._base(layer, kv, head, positions, glance, [positions[i] for i in free])
        base = self._reduced(per_head, free)
        if self.rules.base == "snapkv" and self.rules.value is not None and self.rules.gqa != "alpha_mean":
            per_head = [self._pooled(h, free) for h in per_head]
        elif self.rules.value is not None and self.rules.gqa == "alpha_mean":
            per_head = [base]
        scores = list(base)
        if self.rules.value is not None:
            scores = value_aware(per_head, [head.values[p] for p in positions], self.rules, free)
        shown = [math.inf if p in safe else s for p, s in zip(positions, scores, strict=True)]
        ranked = sorted(range(len(positions)), key=lambda i: (-shown[i], -base[i], positions[i]))
        kept = sorted(positions[i] for i in ranked[:budget])
        self.trace.evictions.append(Eviction(layer, kv, self.step, positions, base, shown, kept))
        head.drop([p for p in positions if p not in set(kept)])

    def _protected(self, positions: list[int], budget: int) -> set[int]:
        now = self.seen_after
        if self.rules.base == "snapkv":
            return {p for p in positions if p >= now - self.rules.window}
        if self.rules.base == "h2o":
            recent = budget // 2 if self.rules.half_recent else self.rules.recent
            return {p for p in positions if p >= now - recent}
        if self.rules.base == "streamingllm":
            return {p for p in positions if p < self.rules.sinks}
        return set()

    def _base(
        self, layer: int, kv: int, head: Head, positions: list[int], glance: Glance, free: list[int]
    ) -> list[list[float]]:
        """Raw base scores of every query head of the group, by ascending position."""
        heads = range(kv * self.group, (kv + 1) * self.group)
        if self.rules.base == "h2o":
            return [[sums[p] for p in positions] for sums in head.sums]
        if self.rules.base == "knorm":
            return [[-float(np.linalg.norm(head.keys[p])) for p in positions] for _ in heads]
        if self.rules.base in ("streamingllm", "local_window"):
            return [[float(p) for p in positions] for _ in heads]
        looking = 1 if self.rules.base == "tova" else self.rules.window
        out = []
        for q in heads:
            total = dict.fromkeys(positions, 0.0)
            for at in range(max(0, self.seen_after - looking), self.seen_after):
                for p, w in glance.weights(self.queries[layer][at][q], at, head.keys).items():
                    total[p] += w
            out.append([total[p] for p in positions])
        return out

    def _reduced(self, per_head: list[list[float]], free: list[int]) -> list[float]:
        mean = [sum(column) / len(column) for column in zip(*per_head, strict=True)]
        return self._pooled(mean, free) if self.rules.base == "snapkv" else mean

    def _pooled(self, h: list[float], free: list[int]) -> list[float]:
        """Candidates pooled among themselves in cache order; protected ones keep their raw sums."""
        smooth = pooled([h[i] for i in free], self.rules.kernel, self.rules.pool)
        out = list(h)
        for i, x in zip(free, smooth, strict=True):
            out[i] = x
        return out


# the model


_running: list[Sequence1] = []


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    assert attention_mask is None
    assert len(query) == 1
    glance = Glance(scaling, kwargs.get("softcap"), kwargs.get("sliding_window"))
    q, k, v = (t[0].double().numpy() for t in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = _running[-1].attend(layer, q, k, v, glance)
    return torch.from_numpy(out).to(query.dtype).transpose(0, 1)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """Causality is decided by positions."""


AttentionInterface.register("slow_oracle", _attention)
AttentionMaskInterface.register("slow_oracle", _no_mask)


@torch.no_grad()
def simulate(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, rules: Rules) -> Trace:
    """Prefill the prompt and generate greedily under `rules`; the model's attention setting is put back afterwards."""
    config = model.config
    before = config._attn_implementation
    kv_heads = config.num_key_value_heads
    sequence = Sequence1(rules, config.num_hidden_layers, kv_heads, config.num_attention_heads // kv_heads, len(prompt))
    model.set_attn_implementation("slow_oracle")
    _running.append(sequence)
    try:
        _generate(model, list(prompt), new_tokens, sequence)
    finally:
        _running.pop()
        model.set_attn_implementation(before)
    return sequence.trace


def _generate(model: PreTrainedModel, prompt: list[int], new_tokens: int, sequence: Sequence1) -> None:
    size = sequence.rules.block or len(prompt)
    token = 0
    for start in range(0, len(prompt), size):
        token = _forward(model, prompt[start : start + size], sequence)
    sequence.trace.tokens.append(token)
    sequence.may_evict = sequence.rules.decode == "evict"
    while len(sequence.trace.tokens) < new_tokens:
        token = _forward(model, [token], sequence)
        sequence.trace.tokens.append(token)


def _forward(model: PreTrainedModel, tokens: list[int], sequence: Sequence1) -> int:
    """Run one block; returns the most likely next token and notes what every head holds now."""
    sequence.seen_after = sequence.seen + len(tokens)
    sequence.trace.outputs.append({})
    positions = torch.arange(sequence.seen, sequence.seen_after)[None]
    logits = model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False).logits
    sequence.seen = sequence.seen_after
    sequence.step += 1
    sequence.trace.kept.append([[tuple(sorted(head.keys)) for head in layer] for layer in sequence.heads])
    return int(logits[0, -1].argmax())
