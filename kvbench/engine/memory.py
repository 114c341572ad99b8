"""The planner that decides how many more sequences fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, islice
from math import ceil

from kvbench.cache.families import layout_of
from kvbench.engine.run_writer import RunWriter
from kvbench.models.devices import free, release
from kvbench.models.prompt import Prompt
from kvbench.policies.policy import total_slots
from kvbench.run.run import Run

DEFAULT_SEQUENCES = 512
"""Maximum batch without engine.rows: a step of more sequences takes longer in proportion."""
MARGIN = 0.2  # share of the free memory that is left for everything not counted here
PREFILL = 2.0  # memory of a prefill in full caches of the prompt, until it is measured: the cache and activations

log = logging.getLogger(__name__)


class MemoryPlanner:
    """Decides how many sequences of an example may be admitted in addition to those in flight.

    A sequence is expected to hold the bytes of the full cache times the share of tokens that its policy keeps at the
    end, corrected by the largest ratio of held to expected bytes among the finished sequences of its run. A prefill
    takes `PREFILL` full caches of the prompt in addition, or more if more was measured on CUDA. Sequences are admitted
    while they fit the free memory of the device (on a CPU, of the host), minus `MARGIN` and the bytes that sequences in
    flight will still need. If none is in flight, one is admitted in any case.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._corrections: dict[RunWriter, float] = {}
        self._prefill = PREFILL

    def fits(
        self,
        prompts: Sequence[Prompt],
        runs: Sequence[RunWriter],
        in_flight: Sequence[tuple[RunWriter, Prompt]],
        nbytes: int,
    ) -> int:
        """How many sequences may enter with one prefill, among the prompts in order, each for all runs.

        0 if not even the first prompt fits for all runs, in addition to the sequences in flight of `nbytes` bytes.
        """
        most = self._limit or max(DEFAULT_SEQUENCES, len(runs))
        run = runs[0].run
        held = sum(self._expects(*one) for one in in_flight)
        held += sum(reference_bytes(run, prompt) for prompt in {id(prompt): prompt for _, prompt in in_flight}.values())
        room = (1 - MARGIN) * free(run.device) - max(0, held - nbytes)
        room -= self._prefill * run.checkpoint.full_cache_bytes(len(prompts[0].ids))
        each = (
            self._expects(one, prompt) + reference_bytes(run, prompt) * (one is runs[0])
            for prompt in prompts
            for one in runs
        )
        expected = accumulate(each)
        count = sum(total <= room for total in islice(expected, max(0, most - len(in_flight))))
        if in_flight:
            return count if count >= min(len(runs), most) else 0
        return max(1, count)

    def _expects(self, run: RunWriter, prompt: Prompt) -> int:
        """Bytes that a sequence of a run is expected to hold at its end."""
        return ceil(self._corrections.get(run, 1.0) * sequence_bytes(run.run, prompt))

    def finished(self, run: RunWriter, prompt: Prompt, nbytes: int) -> None:
        """A sequence has finished with `nbytes` bytes."""
        ratio = nbytes / max(1, sequence_bytes(run.run, prompt))
        self._corrections[run] = max(self._corrections.get(run, 0.0), ratio)

    def ran_out(self, sequences: int) -> None:
        """Memory ran out with this many sequences: half of them are the limit from now on."""
        limit = max(1, sequences // 2)
        if self._limit is None or limit < self._limit:
            self._limit = limit
            log.warning("memory ran out with %d sequences in flight, now at most %d", sequences, limit)
        release()

    def measured(self, prompt: Prompt, run: Run, nbytes: int) -> None:
        """A prefill took `nbytes` bytes in addition to its sequences."""
        self._prefill = max(self._prefill, nbytes / max(1, run.checkpoint.full_cache_bytes(len(prompt.ids))))


def sequence_bytes(run: Run, prompt: Prompt) -> int:
    """Bytes of keys, values and states at the end of the longest answer to a prompt, in a dense store."""
    tokens = prompt.tokens + prompt.most_new_tokens
    kept = ceil(run.checkpoint.full_cache_bytes(tokens) * _kept_share(run, prompt.length, tokens))
    return kept + run.checkpoint.state_bytes


def reference_bytes(run: Run, prompt: Prompt) -> int:
    """Bytes of the full cache with which the sequences of an example are compared (task.divergence), if they are."""
    return run.checkpoint.full_cache_bytes(prompt.tokens + prompt.most_new_tokens) if run.task.divergence else 0


def _kept_share(run: Run, length: int, tokens: int) -> float:
    """Kept tokens divided by all tokens; above 1 if every query head keeps its own."""
    policy, config = run.policy, run.checkpoint.config.get_text_config(decoder=True)
    copies = 1
    if policy.granularity == "query_head":
        copies = int(config.num_attention_heads) // int(getattr(config, "num_key_value_heads", None) or 1)
    if policy.budget is None or policy.reader is not None:
        return copies
    layers = len(layout_of(config).attention)
    kept = total_slots(policy, layers, length) / layers
    grown = tokens - length
    if policy.evicts and policy.schedule.returns_to_budget:
        held = round(kept)
        grown = min(grown, policy.schedule.decoded(held, tokens, length) - held + policy.schedule.spare)
    return copies * min(1.0, (kept + grown) / tokens)
