"""Compares a sweep as one batch with single runs: the policies and budgets of one prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request, script_of
from kvbench.models.devices import records_steps, reset_process_peak, seconds
from kvbench.models.given import borrowed
from kvbench.policies.policy import Policy
from kvbench.tools.bench.latency import MIB, spread
from kvbench.tools.bench.measure import alone, random_prompt, timed_policy
from kvbench.tools.bench.settings import Settings

POLICIES = ["streamingllm", "snapkv", "tova", "h2o", "caote_snapkv", "cake"]
BUDGETS = [64, 128, 256, 512, 1024, 2048]
SHOWN = ("runs", "prompt", "variants", "prefill_s", "decode_s", "total_s", "ratio", "held_mib", "equal_answers")


@dataclass(frozen=True)
class Cost:
    """Seconds, bytes of all caches at the end, and the new tokens of every variant."""

    prefill: float
    decode: float
    held_bytes: int
    tokens: list[list[int]]

    @property
    def total(self) -> float:
        """Seconds of prefill and decoding."""
        return self.prefill + self.decode

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.prefill + other.prefill,
            self.decode + other.decode,
            self.held_bytes + other.held_bytes,
            self.tokens + other.tokens,
        )


def variants(settings: Settings) -> list[Policy]:
    """Every policy at every budget; a policy without eviction only once."""
    found = []
    for slug in settings.policies:
        for budget in settings.budgets:
            found.append(timed_policy(slug, budget, settings))
            if not found[-1].evicts:
                break
    return found


def one_by_one(model: PreTrainedModel, ids: Tensor, policies: Sequence[Policy], new_tokens: int) -> Cost:
    """Runs the variants one after another."""
    cost = Cost(0.0, 0.0, 0, [])
    for policy in policies:
        prefill, decode, _, held, tokens = alone(model, policy, ids, new_tokens)
        cost += Cost(prefill, decode, held, tokens)
    return cost


def together(model: PreTrainedModel, ids: Tensor, policies: Sequence[Policy], new_tokens: int) -> Cost:
    """Runs all variants as one batch after one prefill. Raises the error of a variant that fails."""
    with borrowed(model):
        batch, start = DecodeBatch(model, records_steps(model.device)), seconds(model.device)
        sequences = batch.admit([Request(script_of(ids), new_tokens, min_new_tokens=new_tokens)], policies)[0]
        prefilled = seconds(model.device)
        batch.finish(sequences)
        end = seconds(model.device)
    held = sum(sequence.cache.nbytes for sequence in sequences if sequence.cache is not None)
    return Cost(prefilled - start, end - prefilled, held, [sequence.tokens for sequence in sequences])


def rows(model: PreTrainedModel, settings: Settings) -> Iterator[list[dict[str, Any]]]:
    """Two rows for each prompt length: single runs, and the shared batch.

    Half of the single runs of a round are before its batch and half after it, so that a drift of the machine's speed
    affects both. Each round is printed to stderr.
    ratio: time of the batch divided by that of the single runs of the same round. equal_answers: share of
    variants with equal tokens, the minimum over rounds.
    """
    policies = variants(settings)
    half = len(policies) // 2
    for length in sorted(settings.lengths):
        ids, rounds = random_prompt(model, 1, length), []
        for turn in range(settings.rounds + 1):
            reset_process_peak(model.device)
            first = one_by_one(model, ids, policies[:half], settings.new_tokens)
            shared = together(model, ids, policies, settings.new_tokens)
            single = first + one_by_one(model, ids, policies[half:], settings.new_tokens)
            rounds.append((single, shared))
            name = f"round {turn} of {settings.rounds}" if turn else "warm-up"
            costs = f"single runs {single.total:.1f} s, one batch {shared.total:.1f} s"
            ratio = shared.total / single.total
            sys.stderr.write(f"kvbench: {length} tokens, {name}: {costs}, ratio {ratio:.3f}\n")
        yield table(rounds[1:], length, len(policies), settings)


def table(rounds: Sequence[tuple[Cost, Cost]], length: int, count: int, settings: Settings) -> list[dict[str, Any]]:
    """The two rows of the measured rounds (single, shared) of `count` variants."""
    equal = min(sum(a == b for a, b in zip(one.tokens, many.tokens, strict=True)) for one, many in rounds)
    made = []
    for place, name in enumerate(("single", "shared")):
        costs = [pair[place] for pair in rounds]
        made.append(
            {
                "runs": name,
                "prompt": length,
                "variants": count,
                "new_tokens": settings.new_tokens,
                "rounds": settings.rounds,
                **spread("prefill_s", [cost.prefill for cost in costs]),
                **spread("decode_s", [cost.decode for cost in costs]),
                **spread("total_s", [cost.total for cost in costs]),
                **spread("ratio", [pair[place].total / pair[0].total for pair in rounds]),
                "held_mib": costs[-1].held_bytes / MIB,
                "equal_answers": equal / count,
            }
        )
    return made
