"""Non-causal attention: attention within chunks in which every token sees the whole chunk.

Shapes: H_q query heads, H_kv KV heads, n tokens, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.kernels.references import widen
from kvbench.kernels.selection import take
from kvbench.policies.checks import LARGEST, whole_number
from kvbench.policies.mergers.merger import in_order
from kvbench.policies.needs import Needs
from kvbench.policies.observation import Observation, State
from kvbench.policies.scorers.scorer import Scorer

NEIGHBOURS = 3


def standardised(scores: Tensor, counted: Tensor) -> Tensor:
    """Standardise scores [B,H_kv,T]: mean 0 and standard deviation 1 over the counted slots of a sequence."""
    count = counted.sum((1, 2), keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~counted, 0.0).sum((1, 2), keepdim=True) / count
    squares = (scores - mean).square().masked_fill(~counted, 0.0).sum((1, 2), keepdim=True)
    return (scores - mean) / (squares / (count - 1).clamp(min=1)).sqrt().clamp(min=1e-6)


def chunk_sums(queries: Tensor, keys: Tensor, chunk: int, scaling: float, official: bool) -> Tensor:
    """Attention each token receives from its chunk, group mean: queries [H_q,n,D], keys [H_kv,n,D] -> [H_kv,n]."""
    found = []
    queries = widen(queries).unflatten(0, (len(keys), -1))  # [H_kv,G,n,D]
    for some, own in zip(queries.split(chunk, 2), widen(keys).split(chunk, 1), strict=True):
        tokens = own.shape[1]
        logits = some @ own[:, None].mT * (1.0 if official else scaling)
        if official:  # pad the last chunk with zero queries and zero keys
            logits = F.pad(logits, (0, chunk - tokens, 0, chunk - tokens))
        found.append(logits.softmax(-1).sum(-2)[..., :tokens].mean(1))
    return torch.cat(found, dim=-1)


@dataclass(frozen=True)
class NonCausal(Scorer):
    """Keep tokens by the unmasked attention they receive within their chunk, times the norm of the value.

        A_j = 1 / G sum_(h in "group") sum_(i in C) softmax_(j in C)(q_(h,i) k_j / sqrt(D)), C = "the chunk of" j
        s_j = z(1 / 3 sum_(|i - j| <= 1) A_i ||v_i||_2)

    z subtracts the mean over all tokens and heads of the layer and divides by the standard deviation. Chunks are cut
    from the prompt's first token. A decoded token counts as a separate chunk: A = 1, the mean of every chunk. If a
    prompt is prefilled in several calls, its queries are stored until the end of the prompt.

    chunk: tokens per chunk. official: as in kvpress's code, no 1 / sqrt(D), and the last chunk is padded with zeros
    that receive attention.
    Source: Chari and Van Durme 2025, arXiv 2507.08143, section 3; norm, neighbours and z-score follow its code.
    """

    needs = Needs(window=LARGEST, window_decoding=0, statistics=("attention",), keys=True, whole_prompt=True)

    chunk: int = 256
    official: bool = False

    def __post_init__(self) -> None:
        whole_number("chunk", self.chunk, 1)

    def observe(self, observation: Observation, state: State) -> None:
        self.judge(observation, state)

    def judge(self, observation: Observation, state: State, first: int = 0, newest: int = 0) -> None:
        """At the end of a prompt, store A - 1 for all but its `first` first and `newest` newest positions."""
        if observation.phase == "decode" or observation.window is None:
            return
        queries, places = observation.window[:2]
        for row, budget in enumerate(observation.sequences.budgets):
            if budget == 0:  # this sequence's prompt is not complete
                continue
            own = (places[row] >= first) & (places[row] < observation.seen[row] - newest)
            positions = observation.positions[row : row + 1]
            chosen = torch.isin(positions, places[row, own])
            slots = in_order(chosen, positions).slots
            if slots.shape[-1] == 0:
                continue
            keys = take(observation.keys[row : row + 1], slots)[0]
            sums = chunk_sums(queries[row, :, own], keys, self.chunk, observation.params.scaling, self.official)
            noted = state["attention"][row]
            new = (sums - 1)[..., None].expand(-1, -1, noted.shape[-1]).to(noted.dtype)
            noted.scatter_(1, slots[0, ..., None].expand_as(new), new)

    def score(self, observation: Observation, state: State) -> Tensor:
        return self.smoothed(observation, state, observation.occupied)

    def smoothed(self, observation: Observation, state: State, counted: Tensor) -> Tensor:
        """The score of the counted slots, bool [B,H_kv,T], as if there were no others."""
        weighed = (1 + state["attention"][..., 0]) * widen(observation.values).norm(dim=-1)
        slots, present = in_order(counted, observation.positions)
        drawn = weighed.gather(-1, slots).masked_fill(~present, 0.0)
        pooled = F.avg_pool1d(drawn, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)
        return standardised(torch.zeros_like(weighed).scatter_(-1, slots, pooled), counted)
