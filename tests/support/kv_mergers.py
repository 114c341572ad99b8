"""D2O, RoCo, CaM and SirLLM the slow way: one token, one head at a time, in float64 with plain lists and loops.

Written from the published equations and their specification, on top of the slow oracle's cache and attention.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kv_oracle import Array, Glance, Head, Rows, Rules, SlowSequence, Trace, mean_of
from kv_simulate import attending, generate
from torch import Tensor
from transformers import PreTrainedModel

Draw = Callable[[int, int, int], float]
"""The random number in [0,1) of (layer, KV head, position)."""


class Selecting(SlowSequence):
    """Evicts layer by layer to `budgets`, by scores of its own; kept tokens may take something of the evicted in."""

    granularity = "kv_head"

    def __init__(self, model: PreTrainedModel, budget: int | float, prompt: int) -> None:
        config = model.config
        heads, rules = config.num_key_value_heads, Rules("h2o", budget, granularity=self.granularity)
        super().__init__(rules, config.num_hidden_layers, heads, config.num_attention_heads // heads, prompt)

    @property
    def whole_prompt(self) -> bool:
        return self.seen == 0

    def scores(self, layer: int, kv: int) -> dict[int, float]:
        raise NotImplementedError

    def safe(self, layer: int, kv: int, budget: int) -> set[int]:
        raise NotImplementedError

    def absorb(self, layer: int, kv: int, kept: list[int], gone: list[int]) -> None:
        """What becomes of the evicted, both by ascending position; the cache still holds all of them."""

    def _evict(self, layer: int, glance: Glance) -> None:
        self.shrink(layer)

    def shrink(self, layer: int) -> None:
        budget = self.budgets[layer]
        assert budget is not None
        for kv, head in enumerate(self.heads[layer]):
            if len(head.keys) <= budget:
                continue
            scores, safe = self.scores(layer, kv), self.safe(layer, kv, budget)
            order = sorted(head.keys, key=lambda p: (p not in safe, -scores[p], p))
            kept, gone = sorted(order[:budget]), sorted(order[budget:])
            self.absorb(layer, kv, kept, gone)
            head.drop(gone)

    def sums(self, layer: int, kv: int) -> dict[int, float]:
        """Accumulated attention, averaged over the group."""
        head = self.heads[layer][kv]
        places = sorted(head.keys)
        return dict(zip(places, mean_of([[sums[p] for p in places] for sums in head.sums]), strict=True))


# D2O


@dataclass(frozen=True)
class D2ORules:
    budget: int | float
    sinks: int = 4
    n: int = 3
    m: int = 1
    norm: str = "layer_minmax"
    allocation: str = "softmax"
    similarity: str = "keys"
    beta: float = 0.7
    ema: bool = True
    merge: str = "weighted"


def shares(log_weights: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """clip(exp(mu + w), least, most) with mu found by bisection, then largest fractional parts."""
    low, high = -2000.0, 2000.0
    for _ in range(300):
        mu = (low + high) / 2
        targets = [min(max(math.exp(min(mu + w, 700.0)), least), most) for w in log_weights]
        low, high = (low, mu) if sum(targets) > total else (mu, high)
    floors = [math.floor(t + 1e-9) for t in targets]
    fractions = [round(t - f, 9) for t, f in zip(targets, floors, strict=True)]
    order = sorted(range(len(targets)), key=lambda i: (-fractions[i], i))
    for layer in order[: total - sum(floors)]:
        floors[layer] += 1
    return floors


def cosine(a: Array, b: Array) -> float:
    return float(a @ b) / (max(float(np.linalg.norm(a)), 1e-6) * max(float(np.linalg.norm(b)), 1e-6))


class D2OSequence(Selecting):
    """D2O, equations 4 to 12, with the choices its specification settles."""

    def __init__(self, model: PreTrainedModel, rules: D2ORules, prompt: int) -> None:
        super().__init__(model, rules.budget, prompt)
        self.how = rules
        self.budgets: list[int | None]
        self.tau: dict[tuple[int, int, str], float] = {}
        self.closest_call = 1.0  # the smallest distance of a similarity from its threshold

    def _evict(self, layer: int, glance: Glance) -> None:
        if not self.whole_prompt:
            self.shrink(layer)
        elif layer == self.layers - 1:
            self._allocate()
            for each in range(self.layers):
                self.shrink(each)

    def _allocate(self) -> None:
        length, how = self.seen_after, self.how
        total = sum(budget or 0 for budget in self.budgets)
        if length * self.layers <= total or how.allocation == "uniform":
            return
        variances = []
        for layer in range(self.layers):
            sums = [[s[p] for p in range(length)] for head in self.heads[layer] for s in head.sums]
            variances.append(float(np.mean([np.var(row, ddof=1) for row in sums])))
        weights = [-v for v in variances]
        if how.allocation == "reciprocal":
            weights = [-math.log(v) for v in variances]
        elif how.norm == "layer_minmax":
            low, high = min(variances), max(variances)
            weights = [-(v - low) / (high - low + 1e-6) for v in variances]
        self.budgets = list(shares(weights, total, min(length, how.sinks + 2), length))

    def scores(self, layer: int, kv: int) -> dict[int, float]:
        return self.sums(layer, kv)

    def safe(self, layer: int, kv: int, budget: int) -> set[int]:
        recent = max(1, (budget - self.how.sinks) * self.how.m // (self.how.n + self.how.m))
        return {p for p in self.heads[layer][kv].keys if p < self.how.sinks or p >= self.seen_after - recent}

    def absorb(self, layer: int, kv: int, kept: list[int], gone: list[int]) -> None:
        head = self.heads[layer][kv]
        if self.how.similarity == "separate":
            plans = {"keys": self._plan(layer, kv, head.keys, kept, gone, "keys")}
            plans["values"] = self._plan(layer, kv, head.values, kept, gone, "values")
        else:
            judged = head.keys if self.how.similarity == "keys" else head.values
            plans = dict.fromkeys(("keys", "values"), self._plan(layer, kv, judged, kept, gone, "both"))
        for what, held in (("keys", head.keys), ("values", head.values)):
            old = dict(held)
            for place in kept:
                taken = [(gone_at, u) for gone_at, (nearest, u) in plans[what].items() if nearest == place]
                if taken:
                    weighted = self.how.merge == "weighted"
                    weights = [math.exp(u) if weighted else 1.0 for _, u in taken]
                    own = math.e if weighted else 1.0
                    mixed = own * old[place] + np.sum([w * old[p] for w, (p, _) in zip(weights, taken, strict=True)], 0)
                    held[place] = mixed / (own + sum(weights))

    def _plan(
        self, layer: int, kv: int, judged: dict[int, Array], kept: list[int], gone: list[int], what: str
    ) -> dict[int, tuple[int, float]]:
        """For every evicted token that merges: the kept one that takes it in, and their similarity."""
        best = {}
        for place in gone:
            similarities = [cosine(judged[place], judged[other]) for other in kept]
            highest = max(similarities)
            best[place] = kept[similarities.index(highest)], highest
        if not self.how.ema:
            return best
        name, mean = (layer, kv, what), sum(u for _, u in best.values()) / len(best)
        before = self.tau.get(name)
        after = mean if before is None else self.how.beta * mean + (1 - self.how.beta) * before
        self.tau[name] = after
        judge = before if before is not None and len(gone) == 1 else after
        self.closest_call = min([self.closest_call, *(abs(u - judge) for _, u in best.values() if len(gone) > 1)])
        return {place: found for place, found in best.items() if found[1] >= judge}


# RoCo


class RoCoSequence(Selecting):
    """Histories of every cached token's attention, averaged over the group; mean and deviation straight from them."""

    sinks, recent, decode_share = 4, 10, 0.3

    def __init__(self, model: PreTrainedModel, budget: int | float, prompt: int) -> None:
        super().__init__(model, budget, prompt)
        self.drawn: dict[tuple[int, int, int], list[float]] = {}

    def _accumulate(self, layer: int, rows: Rows) -> None:
        super()._accumulate(layer, rows)
        for kv, head in enumerate(self.heads[layer]):
            for at in range(self.seen, self.seen_after):
                group = [rows[q, at] for q in range(kv * self.group, (kv + 1) * self.group)]
                for p in head.keys:
                    if p <= at:
                        mean = sum(row.get(p, 0.0) for row in group) / len(group)
                        self.drawn.setdefault((layer, kv, p), []).append(mean)

    def scores(self, layer: int, kv: int) -> dict[int, float]:
        return {p: float(np.mean(self.drawn[layer, kv, p])) for p in self.heads[layer][kv].keys}

    def safe(self, layer: int, kv: int, budget: int) -> set[int]:
        places = list(self.heads[layer][kv].keys)
        forced = {p for p in places if p >= self.seen_after - self.recent}
        if self.whole_prompt:
            return forced | {p for p in places if p < self.sinks}
        deviation = {p: float(np.std(self.drawn[layer, kv, p])) for p in places if p not in forced}
        spread = sorted(deviation, key=lambda p: (-deviation[p], p))
        return forced | set(spread[: math.floor(self.decode_share * budget)])


# CaM


class CaMSequence(Selecting):
    """Tokens leave the window one after the other; each hands its value on to the next m with some probability."""

    def __init__(self, model: PreTrainedModel, budget: int | float, prompt: int, m: int, draw: Draw) -> None:
        super().__init__(model, budget, prompt)
        self.m, self.draw = m, draw

    def scores(self, layer: int, kv: int) -> dict[int, float]:
        return {p: float(p) for p in self.heads[layer][kv].keys}

    def safe(self, layer: int, kv: int, budget: int) -> set[int]:
        return {p for p in self.heads[layer][kv].keys if p < budget // 2}

    def absorb(self, layer: int, kv: int, kept: list[int], gone: list[int]) -> None:
        values, drawn = self.heads[layer][kv].values, self.sums(layer, kv)
        window = len([p for p in kept if p > gone[-1]])
        for place in gone:
            following = [p for p in sorted(values) if p > place][: min(self.m, window)]
            mean = sum(drawn[p] for p in following) / len(following)
            if self.draw(layer, kv, place) < min(1.0, drawn[place] / mean):
                for p in following:
                    values[p] = values[p] + values[place] / len(following)


# SirLLM


class SirLLMSequence(Selecting):
    """Evicts a prompt after the call, when its logits are known."""

    sinks = 4

    def __init__(self, model: PreTrainedModel, budget: int | float, prompt: int) -> None:
        super().__init__(model, budget, prompt)
        self.surprisal: dict[int, float] = {0: 0.0}

    def _evict(self, layer: int, glance: Glance) -> None:
        if not self.whole_prompt:
            self.shrink(layer)

    def scores(self, layer: int, kv: int) -> dict[int, float]:
        return self.surprisal

    def safe(self, layer: int, kv: int, budget: int) -> set[int]:
        return {p for p in self.heads[layer][kv].keys if p < self.sinks}


# models


def simulate_with(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, sequence: SlowSequence) -> Trace:
    """Prefill and generate greedily through `sequence`."""
    run = _generate_surprised if isinstance(sequence, SirLLMSequence) else generate
    with attending(model, sequence):
        run(model, list(prompt), new_tokens, sequence)  # type: ignore[operator]
    return sequence.trace


def _logits(model: PreTrainedModel, tokens: list[int], sequence: SlowSequence) -> Tensor:
    """One call; all logits [m,V]. Nothing is noted in the trace."""
    sequence.begin(len(tokens))
    positions = torch.arange(sequence.seen, sequence.seen_after)[None]
    return model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0]


def _generate_surprised(model: PreTrainedModel, prompt: list[int], new: int, sequence: SirLLMSequence) -> None:
    logits = _logits(model, prompt, sequence)
    chances = logits.double().softmax(-1)
    for place in range(1, len(prompt)):
        sequence.surprisal[place] = -math.log(float(chances[place - 1, prompt[place]]))
    for layer in range(sequence.layers):
        sequence.shrink(layer)
    sequence.end()
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < new:
        sequence.surprisal[sequence.seen] = -math.log(float(logits[-1].double().softmax(-1)[tokens[-1]]))
        logits = _logits(model, tokens[-1:], sequence)
        sequence.end()
        tokens.append(int(logits[-1].argmax()))
    sequence.trace.tokens = tokens


def contents(heads: list[list[Head]]) -> list[list[dict[int, tuple[Array, Array]]]]:
    """Key and value of every kept position: [layer][KV head][position]."""
    return [[{p: (head.keys[p], head.values[p]) for p in sorted(head.keys)} for head in layer] for layer in heads]
