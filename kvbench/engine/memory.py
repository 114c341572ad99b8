"""The memory planner: how many more sequences fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import ceil

import torch

from kvbench.cache.layout import attention_layers
from kvbench.engine import device_memory
from kvbench.engine.run_writer import RunWriter
from kvbench.engine.sequence import LiveSequence
from kvbench.models.prompts import Prompt
from kvbench.policies.layer_budgets import total_slots
from kvbench.run.run import Run

USUAL = 512
"""Sequences in flight where none are asked for: with more a step takes longer by as much as it gives."""
MARGIN = 0.2  # of the free memory: for what is not counted here
PREFILL = 2.0  # caches of a whole prompt that its prefill takes, until it was measured: itself, and as much beside it

log = logging.getLogger(__name__)


class MemoryPlanner:
    """Decides how many sequences of an example may be admitted beside those in flight.

    A sequence is expected to hold the full cache's bytes times the share of its tokens that its policy keeps at the
    end, corrected by the largest ratio of held to expected bytes among the finished sequences of its run. A prefill
    takes `PREFILL` full caches of the prompt in addition; on CUDA more, if more was measured. Admitted is what fits
    into the free memory of the device (of the host on CPUs), less `MARGIN` and what sequences in flight will still
    take. If none is in flight, one is admitted in any case: the device then says whether it really does not fit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._expected: dict[LiveSequence, int] = {}  # bytes at the end, of each sequence in flight
        self._corrections: dict[RunWriter, float] = {}
        self._prefill = PREFILL

    def fits(self, prompt: Prompt, runs: Sequence[RunWriter], in_flight: int, held: int, entering: float = 0) -> int:
        """How many of the first runs may enter now with one prefill, all or none where sequences are in flight.

        held: bytes the sequences in flight hold; entering: bytes of those that are about to enter with them.
        """
        most = self._limit or max(USUAL, len(runs))
        wanted = min(len(runs), most)
        if in_flight + wanted > most:
            return 0
        cell = runs[0].cell
        free = (1 - MARGIN) * device_memory.free(cell.device) - max(0, sum(self._expected.values()) - held)
        free -= entering
        free -= self._prefill * cell.checkpoint.full_cache_bytes(len(prompt.ids))
        count = 0
        while count < wanted and (free := free - self.expects(runs[count], prompt)) >= 0:
            count += 1
        if in_flight:
            return wanted if count == wanted else 0
        return max(1, count)

    def joins(
        self, first: Prompt, others: Sequence[Prompt], runs: Sequence[RunWriter], in_flight: int, held: int
    ) -> int:
        """How many further questions about the context of `first` may enter with it, for all of these runs each."""
        for count, prompt in enumerate(others):
            entering = sum(self.expects(run, asked) for asked in (first, *others[:count]) for run in runs)
            if self.fits(prompt, runs, in_flight + (count + 1) * len(runs), held, entering) < len(runs):
                return count
        return len(others)

    def expects(self, run: RunWriter, prompt: Prompt) -> int:
        """Bytes a sequence of a run is expected to hold at its end."""
        return ceil(self._corrections.get(run, 1.0) * sequence_bytes(run.cell, prompt))

    def entered(self, sequence: LiveSequence, run: RunWriter, prompt: Prompt) -> None:
        """A sequence is in flight."""
        self._expected[sequence] = self.expects(run, prompt)

    def left(self, sequence: LiveSequence, run: RunWriter, prompt: Prompt, nbytes: int | None) -> None:
        """A sequence ended, with so many bytes; None: it failed."""
        self._expected.pop(sequence, None)
        if nbytes is not None:
            ratio = nbytes / max(1, sequence_bytes(run.cell, prompt))
            self._corrections[run] = max(self._corrections.get(run, 0.0), ratio)

    def ran_out(self, sequences: int) -> None:
        """So many sequences together did not fit: half as many from now on."""
        limit = max(1, sequences // 2)
        if self._limit is None or limit < self._limit:
            self._limit = limit
            log.warning("memory ran out with %d sequences in flight, now at most %d", sequences, limit)
        torch.cuda.empty_cache()

    def measured(self, prompt: Prompt, cell: Run, nbytes: int) -> None:
        """A prefill took so many bytes beside the sequences that came of it."""
        self._prefill = max(self._prefill, nbytes / max(1, cell.checkpoint.full_cache_bytes(len(prompt.ids))))


def sequence_bytes(cell: Run, prompt: Prompt) -> int:
    """Bytes of the dense keys and values a policy keeps at the end of the longest answer to a prompt, and of states."""
    tokens = len(prompt.ids) + prompt.most_new_tokens
    kept = ceil(cell.checkpoint.full_cache_bytes(tokens) * _kept_share(cell, prompt.length, tokens))
    return kept + cell.checkpoint.state_bytes


def _kept_share(cell: Run, length: int, tokens: int) -> float:
    """Kept over all tokens; above 1 where every query head keeps its own."""
    policy, config = cell.policy, cell.checkpoint.config.get_text_config(decoder=True)
    copies = 1
    if policy.granularity == "query_head":
        copies = int(config.num_attention_heads) // int(getattr(config, "num_key_value_heads", None) or 1)
    if policy.budget is None or policy.reader is not None:
        return copies
    layers = attention_layers(config)
    kept = total_slots(policy, layers, length) / layers
    grown = tokens - length
    if policy.evicts and policy.schedule.decode == "evict":
        grown = min(grown, policy.schedule.spare)
    return copies * min(1.0, (kept + grown) / tokens)
