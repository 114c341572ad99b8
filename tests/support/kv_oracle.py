"""What eviction ought to do, the slow way: one sequence, one head, one query at a time, in float64 with plain lists.

Written from the published equations (CAOTE, arXiv 2504.14051, section 3; H2O, TOVA, SnapKV as its section 4 uses them)
and knowing nothing of kvbench. `kv_simulate` lets a model run through it.

Letters: n cached tokens, m new ones, G query heads of a KV head, D head dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kept = list[list[tuple[int, ...]]]
"""Kept positions, ascending: [layer][KV head]."""
Rows = dict[tuple[int, int], dict[int, float]]
"""Attention weights by cached position, for each (query head, query position)."""


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
    accumulate: bool = True
    by_age: bool = False
    gqa: str = "alpha_mean"
    norm_domain: str = "all"
    f_norm: str = "auto"
    granularity: str = "kv_head"

    @property
    def slug(self) -> str:
        """The preset that is meant to follow these rules."""
        if self.value is not None:
            return f"{self.value}_{self.base}"
        return "h2o_norecent" if self.base == "h2o" and not self.half_recent else self.base


@dataclass(frozen=True)
class Eviction:
    """One eviction of one KV head: what was cached (ascending), its scores, and what stayed.

    scores are value-aware where the rules are; ranked are the same with infinity for protected tokens.
    """

    layer: int
    head: int
    positions: list[int]
    base: list[float]
    scores: list[float]
    ranked: list[float]
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
            scores = dict(zip(event.positions, event.ranked, strict=True))
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
    if pool == "none":
        return row
    reach = kernel // 2
    out = []
    for i in range(len(row)):
        near = row[max(0, i - reach) : i + reach + 1]
        out.append(max(near) if pool == "max" else sum(near) / kernel)
    return out


def normalised(h: list[float], how: str = "auto") -> list[float]:
    """f_norm: h / sum h; with negative scores min-max with a floor of 1e-3 of the range, then the same."""
    if how == "softmax":
        h = [math.exp(x - max(h)) for x in h]
    if how == "minmax_sum" or (how == "auto" and min(h) < 0):
        low, high = min(h), max(h)
        h = [x - low + 1e-3 * (high - low) for x in h]
    total = sum(h)
    return [1 / len(h)] * len(h) if total == 0 else [x / total for x in h]


def caote(h: list[float], values: list[Array], fast: bool, how: str = "auto") -> list[float]:
    """alpha/(1 - alpha) * ||X - v||, X the weighted (fast: the plain) mean of the values; eqs. 8 and 23."""
    alpha = normalised(h, how)
    centre = np.mean(values, axis=0) if fast else np.sum([a * v for a, v in zip(alpha, values, strict=True)], axis=0)
    return [a / max(1 - a, 1e-6) * float(np.linalg.norm(centre - v)) for a, v in zip(alpha, values, strict=True)]


def mean_of(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def norm_of(rows: list[list[float]]) -> list[float]:
    return [math.sqrt(sum(x * x for x in column)) for column in zip(*rows, strict=True)]


@dataclass(frozen=True)
class Scores:
    """One KV head's scores by ascending position: base (group mean) and, per query head, the same before the mean."""

    base: list[float]
    per_query_head: list[list[float]]

    def errors(self, values: list[Array], rules: Rules, free: list[int]) -> list[list[float]]:
        """CAOTE's c for every row it is wanted for; `free` are the tokens that may go."""
        domain = list(range(len(values))) if rules.norm_domain == "all" else free
        one_row = rules.gqa == "alpha_mean" and rules.granularity != "layer"
        out = []
        for row in [self.base] if one_row else self.per_query_head:
            inside = caote(
                [row[i] for i in domain], [values[i] for i in domain], rules.value == "fastcaote", rules.f_norm
            )
            c = [math.inf] * len(values)
            for i, x in zip(domain, inside, strict=True):
                c[i] = x
            out.append(c)
        return out


class SlowSequence:
    """One sequence going through the layers, with everything it has cached."""

    def __init__(self, rules: Rules, layers: int, kv_heads: int, group: int, prompt: int) -> None:
        if rules.granularity == "query_head":  # keys and values are repeated: every query head has its own cache
            kv_heads, group = kv_heads * group, 1
        self.rules, self.layers, self.group = rules, layers, group
        self.heads = [[Head(sums=[{} for _ in range(group)]) for _ in range(kv_heads)] for _ in range(layers)]
        self.queries: list[dict[int, Array]] = [{} for _ in range(layers)]  # [layer][position] -> [H_q,D]
        self.seen = 0
        self.seen_after = 0  # once the present block is in
        self.may_evict = True
        self.trace = Trace()
        self.budgets = [self._budget(layer, prompt) for layer in range(layers)]

    def begin(self, tokens: int) -> None:
        """A block of so many tokens comes in."""
        self.seen_after = self.seen + tokens
        self.trace.outputs.append({})

    def end(self) -> None:
        """The block went through all layers."""
        self.seen = self.seen_after
        self.trace.kept.append([[tuple(sorted(head.keys)) for head in layer] for layer in self.heads])

    def attend(self, layer: int, queries: Array, keys: Array, values: Array, glance: Glance) -> Array:
        """queries [H_q,m,D], new keys and values [H_kv,m,D] -> output [H_q,m,D]; evicts on the way."""
        repeat = len(self.heads[layer]) // len(keys)
        keys, values = keys.repeat(repeat, axis=0), values.repeat(repeat, axis=0)
        new = range(self.seen, self.seen_after)
        self.queries[layer] |= {p: queries[:, i] for i, p in enumerate(new)}
        for kv, head in enumerate(self.heads[layer]):
            head.keys |= {p: keys[kv, i] for i, p in enumerate(new)}
            head.values |= {p: values[kv, i] for i, p in enumerate(new)}
        rows = self._rows(layer, glance)
        self._accumulate(layer, rows)
        out = np.zeros(queries.shape)
        if self.rules.order == "attend_then_evict":
            self._output(layer, rows, out, values)
            self._evict(layer, glance)
        else:
            self._evict(layer, glance)
            self._output(layer, self._rows(layer, glance), out, values)
        self.trace.outputs[-1][layer] = out
        return out

    def _budget(self, layer: int, prompt: int) -> int | None:
        budget = self.rules.budget
        if not isinstance(budget, float):
            return budget
        total = round(budget * prompt * self.layers)
        return total // self.layers + (1 if layer < total % self.layers else 0)

    def _rows(self, layer: int, glance: Glance) -> Rows:
        """Attention of every new query over what its KV head holds now, by (query head, position)."""
        new = range(self.seen, self.seen_after)
        heads = self.heads[layer]
        return {
            (q, p): glance.weights(self.queries[layer][p][q], p, heads[q // self.group].keys)
            for q in range(len(heads) * self.group)
            for p in new
        }

    def _output(self, layer: int, rows: Rows, out: Array, own: Array) -> None:
        """Weighted values; a query that sees nothing any more sees its own token."""
        for (q, p), row in rows.items():
            kv, i = q // self.group, p - self.seen
            out[q, i] = row_output(row, self.heads[layer][kv].values) if row else own[kv, i]

    def _accumulate(self, layer: int, rows: Rows) -> None:
        for kv, head in enumerate(self.heads[layer]):
            for sums in head.sums:
                for p in head.keys:
                    sums[p] = sums.get(p, 0.0) if self.rules.accumulate else 0.0
            for (q, _), row in rows.items():
                if q // self.group == kv:
                    sums = head.sums[q % self.group]
                    for p, weight in row.items():
                        sums[p] += weight

    def _evict(self, layer: int, glance: Glance) -> None:
        """Bring every head of a layer back to its budget."""
        budget, heads = self.budgets[layer], self.heads[layer]
        if budget is None or not self.may_evict or len(heads[0].keys) <= budget:
            return
        places = [sorted(head.keys) for head in heads]
        safe = [self._protected(p, budget) for p in places]
        free = [[i for i, p in enumerate(places[kv]) if p not in safe[kv]] for kv in range(len(heads))]
        scores = [self._scores(layer, kv, places[kv], glance, free[kv]) for kv in range(len(heads))]
        bases = [s.base for s in scores]
        shown = bases
        if self.rules.value is not None:
            errors = [
                scores[kv].errors([head.values[p] for p in places[kv]], self.rules, free[kv])
                for kv, head in enumerate(heads)
            ]
            reduce = mean_of if self.rules.gqa == "score_mean" else norm_of
            shown = [rows[0] if len(rows) == 1 else reduce(rows) for rows in errors]
            if self.rules.granularity == "layer":
                shown = [norm_of([row for rows in errors for row in rows])] * len(heads)
        if self.rules.granularity == "layer":
            bases = [mean_of(bases)] * len(heads)
            shown = shown if self.rules.value is not None else bases
        for kv, head in enumerate(heads):
            ranked = [math.inf if p in safe[kv] else s for p, s in zip(places[kv], shown[kv], strict=True)]
            order = sorted(range(len(ranked)), key=lambda i: (-ranked[i], -bases[kv][i], places[kv][i]))
            kept = sorted(places[kv][i] for i in order[:budget])
            self.trace.evictions.append(Eviction(layer, kv, places[kv], bases[kv], shown[kv], ranked, kept))
            head.drop([p for p in places[kv] if p not in set(kept)])

    def _protected(self, positions: list[int], budget: int) -> set[int]:
        rules, now = self.rules, self.seen_after
        newest = {"snapkv": rules.window, "h2o": budget // 2 if rules.half_recent else rules.recent}.get(rules.base, 0)
        first = rules.sinks if rules.base == "streamingllm" else 0
        return {p for p in positions if p < first or p >= now - newest}

    def _scores(self, layer: int, kv: int, positions: list[int], glance: Glance, free: list[int]) -> Scores:
        raw = self._raw(layer, kv, positions, glance)
        if self.rules.base == "snapkv":
            return Scores(self._pooled(mean_of(raw), free), [self._pooled(row, free) for row in raw])
        return Scores(mean_of(raw), raw)

    def _raw(self, layer: int, kv: int, positions: list[int], glance: Glance) -> list[list[float]]:
        """Raw base scores of every query head of the group, by ascending position."""
        head, base = self.heads[layer][kv], self.rules.base
        if base == "h2o":
            ages = [self.seen_after - p if self.rules.by_age else 1 for p in positions]
            return [[sums[p] / age for p, age in zip(positions, ages, strict=True)] for sums in head.sums]
        if base == "knorm":
            return [[-float(np.linalg.norm(head.keys[p])) for p in positions]] * self.group
        if base in ("streamingllm", "local_window"):
            return [[float(p) for p in positions]] * self.group
        looking = 1 if base == "tova" else self.rules.window
        out = []
        for q in range(kv * self.group, (kv + 1) * self.group):
            total = dict.fromkeys(positions, 0.0)
            for at in range(max(0, self.seen_after - looking), self.seen_after):
                for p, weight in glance.weights(self.queries[layer][at][q], at, head.keys).items():
                    total[p] += weight
            out.append([total[p] for p in positions])
        return out

    def _pooled(self, h: list[float], free: list[int]) -> list[float]:
        """Candidates pooled among themselves in cache order; protected ones keep their raw sums."""
        smooth = pooled([h[i] for i in free], self.rules.kernel, self.rules.pool)
        out = list(h)
        for i, x in zip(free, smooth, strict=True):
            out[i] = x
        return out
