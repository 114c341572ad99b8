"""The training data of KVzap's gate: hidden states of a text, and how much its repetition needs each token.

Shapes: H_q query heads, H KV heads, G = H_q / H, T tokens, n tokens of the text, m queries at once, D head dim.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kernels.references import attention_rows, widen
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

QUERIES = 64  # of the repetition with attention weights in memory at once
LEAST = 1e-12  # of a target before the logarithm; an underflow would give -inf


@dataclass
class InputMoments:
    """Sums over tokens for the regression of one layer, in float64, and the tokens held out from it.

    rows: hidden states [n,hidden] and targets [n,H] of the other tokens, for a gate that is no linear regression; None:
    they are not stored.
    """

    count: int = 0
    rows: list[tuple[Tensor, Tensor]] | None = None
    x: Tensor = field(default_factory=lambda: torch.zeros(()))
    y: Tensor = field(default_factory=lambda: torch.zeros(()))
    xx: Tensor = field(default_factory=lambda: torch.zeros(()))
    xy: Tensor = field(default_factory=lambda: torch.zeros(()))
    held_out: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, x: Tensor, y: Tensor, held_out: Tensor) -> None:
        """Add hidden states [n,hidden] and targets [n,H]; those of `held_out`, bool [n], only for validation."""
        self.held_out.append((x[held_out].float().cpu(), y[held_out].float().cpu()))
        if self.rows is not None:
            self.rows.append((x[~held_out].cpu(), y[~held_out].cpu()))
        x, y = (part[~held_out].double().cpu() for part in (x, y))
        self.count += len(x)
        self.x, self.y = self.x + x.sum(0), self.y + y.sum(0)
        self.xx, self.xy = self.xx + x.mT @ x, self.xy + x.mT @ y

    def ridge(self, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        """Weights [H,hidden] and biases [H] of the ridge regression with intercept, float64."""
        mean_x, mean_y = self.x / self.count, self.y / self.count
        centred = self.xx - self.count * mean_x[:, None] * mean_x
        both = self.xy - self.count * mean_x[:, None] * mean_y
        weights = torch.linalg.solve(centred + alpha * torch.eye(len(mean_x), dtype=centred.dtype), both).mT
        return weights, mean_y - weights @ mean_x


@dataclass(frozen=True)
class KVzapTargets(Scorer):
    """Collects, for the tokens of a text that is repeated in one prompt, the scores that a gate learns.

        y_j = log max_(h in "group", q in "repeated text") A_(h,q,j) * ||W_O^h v_j||_2 / ||x_q||_2

    The softmax is over all visible tokens. x is the input of the layer's attention. It evicts nothing.

    text, repeat: spans of the text and of its repetition in the prompt. share: share of tokens held out. seed: of the
    choice of these. found: sums by layer. stores: whether the rows are stored too.
    Source: NVIDIA/kvpress, kvzap/data.py, after Jegou et al. 2026, arXiv 2601.07891.
    """

    needs = Needs(memory=True, hidden=True, model=True, layer=True)

    text: tuple[int, int]
    repeat: tuple[int, int]
    share: float = 0.05
    seed: int = 0
    found: dict[int, InputMoments] = field(default_factory=dict, compare=False)
    stores: bool = False

    def observe(self, observation: Observation, state: State) -> None:
        if observation.phase == "decode":
            return
        hidden = observation.shared["hidden"][0]
        generator = torch.Generator().manual_seed(self.seed)
        held_out = torch.rand(self.text[1] - self.text[0], generator=generator) < self.share
        x = hidden[self.text[0] : self.text[1]]
        targets = self.targets(observation, hidden)
        if observation.layer not in self.found:
            self.found[observation.layer] = InputMoments(rows=[] if self.stores else None)
        self.found[observation.layer].add(x, targets, held_out.to(x.device))

    def targets(self, observation: Observation, hidden: Tensor) -> Tensor:
        """y of every token of the text, [n,H] float32; hidden [T,hidden]."""
        first, last = self.text
        heads, params = observation.keys.shape[1], observation.params
        weights = widen(observation.model.output_projection()).unflatten(0, (heads, -1))  # [H,G,D,hidden]
        values = widen(observation.values[0, :, first:last])
        norms = torch.stack(  # [H,G,n]
            [torch.stack([(v @ w).norm(dim=-1) for w in group]) for v, group in zip(values, weights, strict=True)]
        )
        given = widen(hidden).norm(dim=-1)
        found = None
        for begin in range(self.repeat[0], self.repeat[1], QUERIES):
            some = slice(begin, min(begin + QUERIES, self.repeat[1]))
            queries, places = observation.queries[:, :, some], observation.query_positions[:, some]
            how = params.scaling, params.softcap, params.sliding_window, params.sinks
            rows = attention_rows(queries, observation.keys, places, observation.positions, *how)
            rows = rows[0, ..., first:last]  # [H,G,m,n]
            most = (rows * norms[:, :, None] / given[some, None]).amax((1, 2))
            found = most if found is None else torch.maximum(found, most)
        assert found is not None
        targets: Tensor = found.clamp(min=LEAST).log().mT
        return targets

    def score(self, observation: Observation, state: State) -> Tensor:
        return observation.positions.float()
