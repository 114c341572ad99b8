"""The decode batch: sequences of any policy, budget, length and example take their decoding steps together.

All sequences are in one cache, so that a step is one call of the model. If steps are recorded as CUDA graphs, those of
sequences that cannot be recorded are a second call, of a cache of their own. Each sequence has the same tokens, kept
positions, bytes and audit as in a batch of one: exactly on a CPU, and up to the rounding of its kernels on a GPU.

Shapes: S sequences, T prompt tokens, V vocabulary.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from transformers import PreTrainedModel

from kvbench.cache.cache import BudgetError, KVCache, ScoreError
from kvbench.cache.copies import empty_like
from kvbench.cache.families import layout_of
from kvbench.cache.joining import can_join, can_record
from kvbench.cache.pre_passes import rate
from kvbench.engine.divergence import compare
from kvbench.engine.logits import next_logits
from kvbench.engine.prefill import prefill_prompts
from kvbench.engine.recorder import Recorder
from kvbench.engine.sequence import LiveSequence, Played, Request, choose_next
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.policies.selections.fair import Fair


class DecodeBatch:
    """The `sequences` in flight on one model.

    cuda_graph: decoding steps and blocks of prompts are recorded and replayed. strict: of steps, see `Recorder`.
    """

    def __init__(self, model: PreTrainedModel, cuda_graph: bool = False, strict: bool = True) -> None:
        self._model = model
        self._recorder = Recorder(model, strict) if cuda_graph else None
        self._blocks = Recorder(model, strict=False) if cuda_graph else None
        self._layout = layout_of(model.config)
        self._cache: KVCache | None = None
        self._recorded: KVCache | None = None  # with sequences whose steps are recorded
        self.sequences: list[LiveSequence] = []

    @property
    def in_flight(self) -> int:
        """Number of sequences that are being decoded, without the references of comparisons."""
        return sum(not sequence.is_reference for sequence in self.sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences, each as if it was alone."""
        return sum(cache.nbytes for cache in self._caches)

    @property
    def _caches(self) -> list[KVCache]:
        return [cache for cache in (self._cache, self._recorded) if cache is not None]

    # --- admission -------------------------------------------------------------------------------------------------
    def can_admit(self, *requests: Request) -> bool:
        """Whether requests may join the sequences in flight, and each other.

        A model whose rotary frequencies depend on the length of a call (longrope, dynamic NTK) decodes a sequence
        beyond the length of the switch alone, so that no other sequence changes its frequencies.
        """
        all_requests = [*requests, *(sequence.request for sequence in self.sequences)]
        lengths = (request.length + request.max_new_tokens for request in all_requests)
        return len(all_requests) == 1 or not any(map(self._layout.rotates_by_length, lengths))

    @torch.inference_mode()
    def admit(
        self,
        requests: Sequence[Request],
        policies: Sequence[Policy],
        played: Sequence[Played | None] = (),
        reference: Policy | None = None,
    ) -> list[list[LiveSequence]]:
        """Prefill prompts for all policies and choose the first tokens: for each request a sequence of every policy.

        Neighbours with equal prompts or contexts share its prefill, and blocks of several prompts are rows of one call.
        A sequence that fails (budget, NaN, memory) is returned with its error; the others continue.
        played: for a turn of a conversation, the turns before it under each policy; they are continued in place.
        reference: compare all sequences with a sequence of this policy (`engine.divergence`). It has the first of
        `played`, is part of the batch until the others have finished, and is not returned.
        """
        assert self.can_admit(*requests)
        policies = policies if reference is None else [reference, *policies]
        rows = [[new_sequence(request, policy) for policy in policies] for request in requests]
        for row in rows if reference is not None else ():
            for sequence in row:
                sequence.reference = row[0]
        for sequence, before in zip(rows[0], played, strict=False):
            sequence.played = before
        prefill_prompts(self._model, rows, self._blocks)
        _compare(chain(*rows))
        self.start(chain(*rows))
        self.drop([])
        return rows if reference is None else [others for _, *others in rows]

    def start(self, sequences: Iterable[LiveSequence]) -> None:
        """Add prefilled sequences to the batch."""
        for sequence in sequences:
            if sequence.done:
                _audit(sequence)
                continue
            assert sequence.cache is not None
            if self._cache is None:
                self._cache = empty_like(sequence.cache)
            self._cache.join(sequence.cache.sequences)
            self.sequences.append(sequence)

    # --- decoding --------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[LiveSequence]:
        """Append the last token of every sequence and choose its next one. Returns the sequences that finish."""
        assert self._cache is not None, "no sequence is in flight"
        outgrown = [sequence for sequence in self.sequences if self._outgrows(sequence)]
        if outgrown:
            return self._restart(outgrown)
        try:
            if self._recorder is not None:
                self._separate(self._cache)
            for cache in self._caches:
                if cache.sequences:
                    self._decode(cache)
            _compare(self.sequences)
        except Exception as error:  # the caches are in the middle of a call
            self._cache = self._recorded = None
            for sequence in self.sequences:
                sequence.error = sequence.error or error
        ended = [sequence for sequence in self.sequences if sequence.done]
        self.drop(ended)
        for sequence in ended:
            _audit(sequence)
        return [sequence for sequence in ended if not sequence.is_reference]

    def finish(self, sequences: Sequence[LiveSequence]) -> None:
        """Decode until none of the sequences is in flight. Raises the first error of one of them."""
        while self.in_flight and all(sequence.error is None for sequence in sequences):
            self.step()
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error

    def _separate(self, cache: KVCache) -> None:
        """Move the sequences whose steps can be recorded into a cache of their own."""
        joining = [one for one in cache.sequences if can_record(one.policy) and can_join(one)]
        if self._recorded is None:
            self._recorded = empty_like(cache)
        cache.sequences[:] = [sequence for sequence in cache.sequences if sequence not in joining]
        self._recorded.join(joining)

    def _outgrows(self, sequence: LiveSequence) -> bool:
        """Whether the text so far must be computed again (`kvbench.cache.families.AGAIN`)."""
        selects = isinstance(sequence.policy.pre_pass, PromptChoice)  # positions are those among the selected tokens
        return sequence.position == self._layout.restart_length and not selects

    def _restart(self, sequences: Sequence[LiveSequence]) -> list[LiveSequence]:
        """Prefill the text so far of some sequences, and choose their next tokens. Returns those that finish."""
        self.drop(sequences)
        for sequence in sequences:
            request, peak = sequence.request, sequence.held.peak_nbytes
            if request.is_turn:
                sequence.error = ValueError(
                    f"a conversation exceeds {sequence.position} tokens while it is answered, where this model needs "
                    "other rotary factors for all of it (longrope): use shorter conversations, or longer prompts"
                )
                continue
            *before, last = request.script
            fed = torch.cat([last.tokens, last.tokens.new_tensor([sequence.tokens])], dim=1)
            sequence.request = replace(request, script=(*before, replace(last, tokens=fed)))
            sequence.decode_steps += 1
            prefill_prompts(self._model, [[sequence]])
            if sequence.error is None:
                sequence.held.peak_nbytes = max(peak, sequence.held.peak_nbytes)
        _compare([*sequences, *self.sequences])
        self.start(sequences)
        ended = [sequence for sequence in self.sequences if sequence.done]
        self.drop(ended)
        return [one for one in dict.fromkeys([*sequences, *ended]) if one.done and not one.is_reference]

    def _decode(self, cache: KVCache) -> None:
        """One call of the model for the sequences of a cache."""
        live = {sequence.held: sequence for sequence in self.sequences}
        rows = [None if held is None else live[held] for held in cache.begin_step(pads=cache is self._recorded)]
        device = self.sequences[0].request.prompt.device
        tokens = torch.tensor([[0 if one is None else one.tokens[-1]] for one in rows], device=device)
        places = torch.tensor([[0 if one is None else one.position] for one in rows], device=device)
        found = {row: sequence for row, sequence in enumerate(rows) if sequence is not None}
        for row, sequence in found.items():
            if sequence.logits is not None:
                rate(sequence.held, sequence.logits, tokens[row : row + 1])
        if self._recorder is not None and cache is self._recorded and cache.tables.recordable:
            logits = self._recorder(tokens, places, cache)
        else:
            logits = next_logits(self._model, tokens, places, cache)
        for sequence in found.values():
            sequence.error = sequence.held.error
            sequence.position += 1
            sequence.decode_steps += 1
        choose_next(list(found.values()), logits if len(found) == len(rows) else logits[list(found)])

    @torch.inference_mode()
    def drop(self, sequences: Collection[LiveSequence]) -> None:
        """Remove sequences from the batch, and references without others; each has its own cache then."""
        gone = {*sequences}
        compared = {one.reference for one in self.sequences if not (one.is_reference or one in gone)}
        gone.update(one for one in self.sequences if one.is_reference and one not in compared)
        self.sequences[:] = [sequence for sequence in self.sequences if sequence not in gone]
        for cache in self._caches:
            cache.release([one.held for one in gone if one.cache is not None and one.held in cache.sequences])


def new_sequence(request: Request, policy: Policy) -> LiveSequence:
    """A sequence before its prefill, whose policy uses the random numbers of its example."""
    policy = policy if request.example is None else policy.for_example(*request.example)
    if isinstance(policy.selection, Fair):
        policy = replace(policy, selection=replace(policy.selection, starts=request.parts))
    if policy.schedule.protection is not None and "spans" in policy.schedule.protection.reads:
        policy = replace(policy, schedule=replace(policy.schedule, spans=request.protected))
    return LiveSequence(request, policy)


def _compare(sequences: Iterable[LiveSequence]) -> None:
    """Choose the next tokens of sequences that are compared with the full cache."""
    found: dict[LiveSequence, list[LiveSequence]] = {}
    for one in sequences:
        if one.reference is not None:
            found.setdefault(one.reference, []).append(one)
    for reference, compared in found.items():
        compare(reference, [one for one in compared if one is not reference])


def _audit(sequence: LiveSequence) -> None:
    """Set the error of a finished sequence that holds more than its policy allows, or whose scores were NaN."""
    if sequence.error is None and sequence.cache is not None:
        try:
            sequence.cache.audit()
        except (BudgetError, ScoreError) as error:
            sequence.error = error
