"""What a set of variants costs, one run after the other or as rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedModel

from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request
from kvbench.inference.generate import greedy, now
from kvbench.policies.policy import Policy
from kvbench.tools.bench.journal import Record


@dataclass
class Cost:
    """Milliseconds of prefilling and of decoding, bytes of all caches at the end, and the new tokens of every run."""

    prefill: float
    decode: float
    held: int
    tokens: list[list[int]]

    def __add__(self, other: Cost) -> Cost:
        mine, theirs = asdict(self).values(), asdict(other).values()
        return Cost(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def figures(self) -> Record:
        return {"prefill_ms": self.prefill, "decode_ms": self.decode, "held_bytes": self.held}

    def equal_answers(self, other: Cost) -> int:
        """How many runs gave the same tokens both ways."""
        return sum(a == b for a, b in zip(self.tokens, other.tokens, strict=True))


def alone(model: PreTrainedModel, request: Request, policies: Sequence[Policy]) -> Cost:
    """One run after the other."""
    cost = Cost(0.0, 0.0, 0, [])
    for policy in policies:
        done = greedy(model, request.input_ids, policy, max_new_tokens=request.max_new_tokens)
        cost += Cost(1e3 * done.prefill_seconds, 1e3 * done.decode_seconds, done.cache.nbytes, done.tokens)
    return cost


def together(model: PreTrainedModel, request: Request, policies: Sequence[Policy]) -> Cost:
    """All as rows; an error of one ends all."""
    model.set_attn_implementation("kvbench")
    flight, began = DecodeBatch(model), now(model)
    rows = flight.admit(request, policies)
    prefilled = now(model)
    while flight.in_flight:
        flight.step()
    ended = now(model)
    held = 0
    for row in rows:
        if row.error is not None:
            raise row.error
        assert row.cache is not None
        held += row.cache.nbytes
    return Cost(1e3 * (prefilled - began), 1e3 * (ended - prefilled), held, [row.tokens for row in rows])
