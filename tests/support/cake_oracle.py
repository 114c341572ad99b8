"""What CAKE and P2A ought to do, the slow way: one sequence, head and query at a time, in float64 with plain lists.

Written from the paper (arXiv 2503.12491, equations 4-12, algorithm 1) and knowing nothing of kvbench. Letters: T prompt
tokens, W queries of the observation window, C budget, L layers, G query heads of a KV head.
"""

import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np
import torch
from kv_oracle import Array, Glance, Kept, row_output
from kv_simulate import attending
from transformers import PreTrainedModel

Row = dict[int, float]
"""Attention of one query: weight by position."""


@dataclass(frozen=True)
class CakeRules:
    """scorer: cake, snapkv, h2o or tova. allocation: p2a, h_only, uniform, pyramid or official."""

    budget: int
    scorer: str = "cake"
    allocation: str = "p2a"
    window: int = 8
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0
    indicator: str = "mean_var"
    decode: str = "evict"
    decode_rule: str = "current_attention"
    slot_order: str = "position"
    official_gate: bool = False


@dataclass
class Head:
    """One KV head: positions in the order in which the slots are read, and what is known of each by position."""

    order: list[int] = field(default_factory=list)
    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)  # attention drawn, mean over the group

    def hold(self, order: list[int]) -> None:
        for position in set(self.order) - set(order):
            del self.keys[position], self.values[position], self.sums[position]
        self.order = order


def smooth(row: list[float], kernel: int, largest: bool) -> list[float]:
    reach = kernel // 2
    near = [row[max(0, i - reach) : i + reach + 1] for i in range(len(row))]
    return [max(x) if largest else sum(x) / kernel for x in near]


def one_at_a_time(preference: list[float], total: int, cap: int) -> list[int]:
    slots = [0] * len(preference)
    for _ in range(min(total, cap * len(slots))):
        open_ = [i for i, n in enumerate(slots) if n < cap]
        best = max(open_, key=lambda i: (preference[i] / (2 * slots[i] + 1), -i))
        slots[best] += 1
    return slots


def pyramid(mean: float, cap: int, layers: int, beta: float = 20) -> list[float]:
    low, high = mean / beta, 2 * mean - mean / beta
    if high >= cap:
        low, high = 2 * mean - cap, cap
    return [high - layer * (high - low) / (layers - 1) for layer in range(layers)]


def truncated(preference: list[float], total: int, cap: int) -> list[int]:
    """What the released code makes of real shares, clipped as its caller does."""
    real = [p / sum(preference) * total for p in preference]
    slots = [min(int(x), cap) for x in real]
    clipped, lost = sum(int(x) - n for x, n in zip(real, slots, strict=True)), total - sum(int(x) for x in real)
    for spread in (clipped, lost):
        below = [i for i, n in enumerate(slots) if n < cap]
        each, more = divmod(spread, len(below)) if below else (0, 0)
        for i in below:
            slots[i] += each
        for i in below[:more]:
            slots[i] += 1
    return [min(n, cap) for n in slots]


class CakeSequence:
    """One sequence going through the layers, with everything it has cached."""

    def __init__(self, rules: CakeRules, layers: int, kv_heads: int, group: int, prompt: int) -> None:
        self.rules, self.layers, self.group, self.prompt = rules, layers, group, prompt
        self.heads = [[Head() for _ in range(kv_heads)] for _ in range(layers)]
        self.queries: list[list[Array]] = [[] for _ in range(layers)]  # [layer][position] -> [H_q,D]
        self.glances: list[Glance] = []
        self.statistics: list[tuple[float, float]] = []
        self.scores: list[list[Row]] = []  # [layer][KV head], of the prompt
        self.slots = [rules.budget] * layers
        self.kept: list[Kept] = []

    def attend(self, layer: int, q: Array, k: Array, v: Array, glance: Glance) -> Array:
        """q [H_q,m,D], k and v [H_kv,m,D] of the new tokens -> outputs [H_q,m,D]."""
        first = len(self.queries[layer])
        self.glances.append(glance)
        self.queries[layer] += list(q.transpose(1, 0, 2))
        out = np.zeros((*q.shape[:2], v.shape[-1]))
        for kv, head in enumerate(self.heads[layer]):
            for i in range(q.shape[1]):
                at = first + i
                head.order.append(at)
                head.keys[at], head.values[at], head.sums[at] = k[kv, i], v[kv, i], 0.0
            for g in range(self.group):
                for i in range(q.shape[1]):
                    row = glance.weights(q[kv * self.group + g, i], first + i, head.keys)
                    out[kv * self.group + g, i] = row_output(row, head.values)
                    if self.rules.scorer == "h2o" or (self.rules.decode_rule == "accumulate" and first):
                        for position, weight in row.items():
                            head.sums[position] += weight / self.group
        if first == 0:
            self._observe(layer, glance)
            if layer == self.layers - 1:
                self._evict_prompt()
        elif self.rules.decode == "evict":
            for kv, head in enumerate(self.heads[layer]):
                if len(head.order) > self.slots[layer]:
                    self._keep(head, self._decoded(layer, kv, glance), self.slots[layer])
        return out

    # the prompt

    def _rows(self, layer: int, kv: int, g: int, newest: int, glance: Glance) -> list[Row]:
        """Rows of the newest queries of one query head over what its KV head holds."""
        seen = len(self.queries[layer])
        keys = self.heads[layer][kv].keys
        at = range(max(0, seen - newest), seen)
        return [glance.weights(self.queries[layer][i][kv * self.group + g], i, keys) for i in at]

    def _observe(self, layer: int, glance: Glance) -> None:
        rules = self.rules
        before = range(max(0, self.prompt - rules.window))
        entropy = spread = 0.0
        scores = []
        for kv, head in enumerate(self.heads[layer]):
            each = []
            for g in range(self.group):
                rows = self._rows(layer, kv, g, rules.window, glance)
                columns = [[row[r] for row in rows] for r in before]
                entropy -= sum(u * log(u + 1e-10) for column in columns for u in column)
                spread += sum(plain.variance(column) for column in columns)
                each.append(self._indicator(columns))
            if rules.scorer == "h2o":
                scores.append({r: head.sums[r] for r in before})
            elif rules.scorer == "tova":
                scores.append(self._newest(layer, kv, glance))
            else:
                scores.append(dict(zip(before, self._reduced(each), strict=True)))
        self.statistics.append((max(entropy, 0.0), spread))
        self.scores.append(scores)

    def _indicator(self, columns: list[list[float]]) -> list[float]:
        mean, spread = [plain.mean(c) for c in columns], [plain.variance(c) for c in columns]
        if self.rules.scorer == "snapkv":
            return [sum(c) for c in columns]
        return {
            "mean": mean,
            "var": spread,
            "product": [m * s for m, s in zip(mean, spread, strict=True)],
            "mean_var": [m + self.rules.gamma * s for m, s in zip(mean, spread, strict=True)],
        }[self.rules.indicator]

    def _reduced(self, each: list[list[float]]) -> list[float]:
        """One score per candidate from those of the query heads: SnapKV pools their mean, CAKE averages the pooled."""
        if self.rules.scorer == "snapkv":
            return smooth([plain.mean(c) for c in zip(*each, strict=True)], self.rules.kernel, largest=True)
        pooled = [smooth(row, self.rules.kernel, largest=False) for row in each]
        return [plain.mean(c) for c in zip(*pooled, strict=True)]

    def _evict_prompt(self) -> None:
        rules = self.rules
        gate = rules.budget + (rules.window if rules.official_gate else 0)
        if self.prompt <= gate:
            return
        slots = self._allocated((rules.budget - rules.window) * self.layers, self.prompt - rules.window)
        self.slots = [rules.window + n for n in slots]
        for layer, heads in enumerate(self.heads):
            for kv, head in enumerate(heads):
                self._keep(head, self.scores[layer][kv], self.slots[layer])

    def _allocated(self, total: int, cap: int) -> list[int]:
        rules = self.rules
        if rules.allocation == "uniform":
            return [total // self.layers] * self.layers
        if rules.allocation == "pyramid":
            return one_at_a_time(pyramid(total / self.layers, cap, self.layers), total, cap)
        if rules.allocation == "h_only":
            preference = [h ** (1 / rules.tau1) for h, _ in self.statistics]
        else:
            preference = [h ** (1 / rules.tau1) * v ** (1 / rules.tau2) for h, v in self.statistics]
        return (truncated if rules.allocation == "official" else one_at_a_time)(preference, total, cap)

    # decoding

    def _newest(self, layer: int, kv: int, glance: Glance) -> Row:
        rows = [self._rows(layer, kv, g, 1, glance)[0] for g in range(self.group)]
        return {p: plain.mean(row[p] for row in rows) for p in rows[0]}

    def _decoded(self, layer: int, kv: int, glance: Glance) -> Row:
        """Scores of what may go at a decoding step."""
        rules, head = self.rules, self.heads[layer][kv]
        if rules.scorer == "tova":
            return self._newest(layer, kv, glance)
        candidates = head.order[: -rules.window]
        if rules.scorer == "h2o":
            return {p: head.sums[p] for p in candidates}
        if rules.scorer == "cake" and rules.decode_rule == "accumulate":
            each = [[head.sums[p] for p in candidates]]
        elif rules.scorer == "cake":
            each = [[self._rows(layer, kv, g, 1, glance)[0][p] for p in candidates] for g in range(self.group)]
        else:
            rows = [self._rows(layer, kv, g, rules.window, glance) for g in range(self.group)]
            each = [[sum(row[p] for row in r) for p in candidates] for r in rows]
        return dict(zip(candidates, self._reduced(each), strict=True))

    def _keep(self, head: Head, scores: Row, slots: int) -> None:
        """Keep what has no score and the best of the rest; equal scores: the one read first."""
        fixed = [p for p in head.order if p not in scores]
        ranked = sorted((p for p in head.order if p in scores), key=lambda p: -scores[p])[: slots - len(fixed)]
        head.hold(ranked + fixed if self.rules.slot_order == "score" else sorted(ranked + fixed))

    def note(self) -> None:
        self.kept.append([[tuple(sorted(head.order)) for head in heads] for heads in self.heads])


# the model


def simulate_cake(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, rules: CakeRules
) -> tuple[list[int], CakeSequence]:
    """Generate greedily under `rules`: the new tokens, and the sequence with what was kept after every call."""
    config = model.config
    kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // kv_heads
    sequence = CakeSequence(rules, config.num_hidden_layers, kv_heads, group, len(prompt))
    tokens: list[int] = []
    new, seen = list(prompt), 0
    with attending(model, sequence):
        while len(tokens) < new_tokens:
            positions = torch.arange(seen, seen + len(new))[None]
            logits = model(input_ids=torch.tensor([new]), position_ids=positions, use_cache=False).logits
            sequence.note()
            seen += len(new)
            new = [int(logits[0, -1].argmax())]
            tokens += new
    return tokens, sequence
