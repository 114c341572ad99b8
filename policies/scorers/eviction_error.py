"""DropKV and ReST-KV: score a token by the error that its eviction alone causes in the window's attention output.

Shapes: B batch, H KV heads, G query heads per KV head, w queries of the window, K rows, T slots, D head dim.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors import ConfigError
from kvbench.kernels.references import widen
from kvbench.policies.checks import check_choices, choice, number, whole_number
from kvbench.policies.needs import Needs, Protected
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.pooling import check_kernel, smooth
from kvbench.policies.scorers.scorer import AttentionScorer


def distances(centres: Tensor, values: Tensor) -> Tensor:
    """||x - v_j||_2 of centres [B,H,K,D] and values [B,H,T,D]: [B,H,K,T]."""
    # Differences, squared and summed in one pass: products (|v|^2 - 2 v x + |x|^2) would cancel where v is near x.
    return torch.cdist(centres, values, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True)
class EvictionError(AttentionScorer):
    """Keep the tokens whose eviction would change the attention output of the newest `window` queries most.

        e_(h,q,j) = (A_(h,q,j) / (1 - A_(h,q,j) + epsilon) * ||W_O^h (o_(h,q) - v_j)||_2^tau)^"power"
        o_(h,q) = sum_i A_(h,q,i) v_i
        s_j = 1 / G sum_(h in "group") "sum, mean or average"_(q in "window") e_(h,q,j)

    Without the projection W_O this is the closed form of CAOTE (`Caote`), whose scores are normalised; attention is
    not. With `rows=attention`, attention is first aggregated over the queries, and o is the sum over the tokens before
    the window, whose weights then sum to less than 1, as in ReST-KV's code. Scores are pooled over neighbours, and the
    window is always kept.

    window: number of newest queries, which score and are kept. rows: aggregate `errors` or `attention` over the
    queries. over_queries: their `sum`, `mean`, or an exponential moving average, `ema`. alpha: of `ema`, the weight of
    the newest query; the oldest has (1 - alpha)^(w - 1). space: measure the `output` projection of the error, or the
    error of `value`s. tau, power: the exponents. relative: divide errors by ||W_O o||. epsilon: added to 1 - A. pool:
    `avg` and `max` over `kernel` tokens, with zeros or nothing at the ends; `adaptive` is a mean over
    max(kernel, 2 floor(|t| / scale) + 1) tokens, centred t / scale tokens later, with the ends repeated; t is how far
    the most attended tokens are before those of queries w / 2 later (only of a prompt; a mean over `kernel` while
    decoding). kernel: odd number of pooled neighbours. scale: of `adaptive`, the drift for one more token at each side.
    reach: pool over the `candidates` before the window, or over `all` tokens.
    Source: DropKV (kvpress pull request 285, OpenReview MqfNzH3TVH) and ReST-KV (ICLR 2026), after their code.
    """

    window: int = 32
    rows: Literal["errors", "attention"] = "errors"
    over_queries: Literal["sum", "mean", "ema"] = "sum"
    alpha: float = 0.3
    space: Literal["value", "output"] = "value"
    tau: float = 1.0
    power: float = 1.0
    relative: bool = False
    epsilon: float = 1e-6
    pool: Literal["avg", "max", "none", "adaptive"] = "avg"
    kernel: int = 7
    scale: float = 2000.0
    reach: Literal["candidates", "all"] = "candidates"

    def __post_init__(self) -> None:
        check_choices(self)
        check_kernel(self.kernel)
        whole_number("window", self.window, 1)
        choice("relative", self.relative, True, False)
        for name, least in (("alpha", 1e-9), ("tau", 0), ("power", 0), ("epsilon", 0), ("scale", 1e-9)):
            number(name, getattr(self, name), least, 1 if name == "alpha" else 1e9)
        if self.relative and self.rows == "attention":
            raise ConfigError("relative", True, why="divides the errors of single queries: it needs rows=errors")
        if self.pool == "adaptive" and (self.reach == "all" or self.window % 2):
            raise ConfigError("pool", "adaptive", why="needs reach=candidates and an even window")

    @property
    def needs(self) -> Needs:
        adapts = self.pool == "adaptive"
        return Needs(
            window=self.window, keys=True, model=self.space == "output", never_negative=True, whole_prompt=adapts
        )

    def protects(self, budget: int) -> Protected:
        return Protected(newest=self.window)

    def raw(self, observation: Observation, state: State) -> Tensor:
        rows = observation.window_attention(self.window)  # [B,H,G,w,T]
        values = widen(observation.values)
        if not observation.slots.packed:
            values = values.masked_fill(~observation.occupied[..., None], 0.0)
        weights = self._of_queries(rows.shape[3]).to(rows)
        factors = self._projection_factors(observation, values)
        before = observation.occupied & ~observation.newest(self.window)
        found = []
        for head, own in enumerate(rows.unbind(2)):
            projected = values if factors is None else values @ factors[:, head]
            if self.rows == "attention":
                summed = weights @ own  # [B,H,1,T]
                found.append(self._errors(summed, (summed * before[:, :, None]) @ projected, projected)[:, :, 0])
            else:
                found.append((weights @ self._errors(own, own @ projected, projected))[:, :, 0])
        scores = torch.stack(found, dim=2)
        adapts = self.pool == "adaptive" and observation.phase != "decode"
        return self._adapted(scores, rows, observation) if adapts else scores

    def score(self, observation: Observation, state: State) -> Tensor:
        if self.pool == "adaptive":  # depends on the budget
            return super().score(observation, state)
        return observation.once(self, lambda: super(EvictionError, self).score(observation, state))

    def finish(self, raw: Tensor, observation: Observation) -> Tensor:
        if self.pool == "adaptive":
            return raw if observation.phase != "decode" else smooth(raw, observation, self.window, self.kernel, "avg")
        return smooth(raw, observation, self.window if self.reach == "candidates" else 0, self.kernel, self.pool)

    def _errors(self, rows: Tensor, centres: Tensor, values: Tensor) -> Tensor:
        """e of rows of attention [B,H,K,T] with outputs [B,H,K,D], in the space of the values [B,H,T,D]."""
        errors = rows / (1 - rows + self.epsilon) * distances(centres, values) ** self.tau
        if self.relative:
            errors = errors / centres.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        return errors if self.power == 1 else errors**self.power

    def _of_queries(self, count: int) -> Tensor:
        """The weight of each query of the window, oldest first, [1,w]."""
        if self.over_queries != "ema":
            return torch.full((1, count), 1.0 if self.over_queries == "sum" else 1 / count)
        weights = self.alpha * (1 - self.alpha) ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
        weights[0] /= self.alpha
        return weights[None]

    def _projection_factors(self, observation: Observation, values: Tensor) -> Tensor | None:
        """Matrices [H,G,D,D] with ||x F||_2 = ||x W_O^h||_2, so that no vector of the model's width is made."""
        if self.space == "value":
            return None
        heads = observation.model.output_projection().unflatten(0, (values.shape[1], -1)).double()
        scales, directions = torch.linalg.eigh(heads @ heads.mT)
        factors: Tensor = directions * scales.clamp(min=0).sqrt()[..., None, :]
        return factors.to(values.dtype)

    # --- adaptive pooling -------------------------------------------------------------------------------------------
    def _adapted(self, scores: Tensor, rows: Tensor, observation: Observation) -> Tensor:
        """Scores [B,H,G,T] of a prompt, of which those before the window are pooled as far as the attention drifts."""
        found = scores.clone()
        for row, budget in enumerate(observation.sequences.budgets):
            for head, places in enumerate(observation.positions[row]):
                order = places.argsort(stable=True)[int((places < 0).sum()) :]
                own = order[: max(len(order) - self.window, 0)]
                for one, attention in enumerate(rows[row, head][..., order]):
                    reach = self.drift_reach(attention, min(budget, len(order)) - self.window)
                    found[row, head, one, own] = shifted_mean(scores[row, head, one, own], *reach)
        return found

    def drift_reach(self, attention: Tensor, count: int) -> tuple[int, int]:
        """The kernel, and the shift of its centre, from attention [w,T] to tokens in order of position.

        count: the most attended tokens of each query that are compared, rank by rank.
        """
        half = len(attention) // 2
        if count < 1 or half < 1:
            return self.kernel, 0
        places = attention.topk(count, dim=-1).indices.double()
        drift = float((places[:half] - places[half : 2 * half]).mean())
        steps = int(abs(drift) / self.scale)
        return max(self.kernel, 2 * steps + 1), steps if drift > 0 else -steps


def shifted_mean(x: Tensor, kernel: int, shift: int) -> Tensor:
    """The mean of x [n] over `kernel` neighbours around i + shift, with the ends repeated."""
    if not len(x):
        return x
    beside = kernel // 2 + abs(shift)
    means = F.avg_pool1d(F.pad(x[None, None], (beside, beside), mode="replicate"), kernel, stride=1)[0, 0]
    return means[abs(shift) + shift :][: len(x)]
