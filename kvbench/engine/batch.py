"""The decode batch: sequences of any policy, budget, length and example take their decoding steps together.

Each sequence has the same tokens, kept positions, bytes and audit as in a batch of one: exactly on a CPU, and up to the
rounding of its kernels on a GPU.

With CUDA graphs, a finished sequence leaves a copy of its cache and stays in the batch as padding. Padding is removed
when the other sequences fit a smaller `bucket`, when a store has to grow, and when sequences are admitted: 32 sequences
that finish one after another are recorded 7 times instead of 32.

Shapes: S sequences, T prompt tokens, V vocabulary.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.cache import BudgetError, KVCache, ScoreError
from kvbench.cache.device_batch import DeviceBatch
from kvbench.cache.group import in_order
from kvbench.cache.join import copied, empty_like, join, pick
from kvbench.cache.layout import layout_of
from kvbench.engine.cuda_graph import Recorder, bucket, recorded
from kvbench.engine.logits import next_logits
from kvbench.engine.prefill import prefill_prompt
from kvbench.engine.sequence import LiveSequence, Request, choose_next
from kvbench.kernels.tiles import use_triton
from kvbench.policies.policy import Policy
from kvbench.policies.scorers.random import with_example_seed

JOIN_STEPS = 3  # steps after an admission until all sequences can decode on the device as one batch


class DecodeBatch:
    """The sequences in flight on one model. `sequences` are those of `cache` in this order, padding included.

    cuda_graph: decoding steps are recorded and replayed. strict: see `Recorder`.
    """

    def __init__(self, model: PreTrainedModel, cuda_graph: bool = False, strict: bool = True) -> None:
        self._model = model
        self._recorder = Recorder(model, strict) if cuda_graph else None
        self._layout = layout_of(model.config)
        self.cache: KVCache | None = None
        self.sequences: list[LiveSequence] = []
        self._joining = 0

    @property
    def in_flight(self) -> int:
        """Number of sequences that are being decoded."""
        return sum(not sequence.done for sequence in self.sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences and of the padding, which is freed at the next admission."""
        return 0 if self.cache is None else self.cache.nbytes

    # --- admission -------------------------------------------------------------------------------------------------
    def can_admit(self, request: Request) -> bool:
        """Whether the request may join the sequences in flight.

        A model whose rotary frequencies depend on the length of a call (longrope, dynamic NTK) decodes a sequence
        beyond the length of the switch alone, so that no other sequence changes its frequencies.
        """
        here = [sequence.request for sequence in self.sequences if not sequence.done]
        return not here or not any(map(self._switches, [request, *here]))

    def _switches(self, request: Request) -> bool:
        return self._layout.rotates_by_length(request.input_ids.shape[1] + request.max_new_tokens)

    def shares_prompt(self, first: Request, second: Request) -> bool:
        """Whether one prefill serves both requests: same prompt or context, or a later turn of one conversation."""
        if first.turns:
            read = first.input_ids.shape[1]
            continued = second.turns[: len(first.turns)] == first.turns
            return continued and torch.equal(second.input_ids[:, :read], first.input_ids) and not self._switches(second)
        if second.turns or first.context_tokens != second.context_tokens:
            return False
        return torch.equal(first.prompt, second.prompt) and not any(map(self._switches, (first, second)))

    def admit(self, request: Request, policies: Sequence[Policy]) -> list[LiveSequence]:
        """Prefill a prompt for all policies and choose the first tokens; sequences in the order of the policies.

        A sequence that fails (budget, NaN, memory) is returned with its error; the others continue.
        """
        return self.admit_questions([request], policies)[0]

    @torch.inference_mode()
    def admit_questions(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[LiveSequence]]:
        """Admit questions about one context, or samples of one prompt (`shares_prompt`), with one prefill."""
        assert all(map(self.can_admit, requests))
        assert all(self.shares_prompt(requests[0], request) for request in requests[1:])
        self.drop(())
        sequences = [[_new_sequence(request, policy) for policy in policies] for request in requests]
        prefill_prompt(self._model, sequences)
        self.start(chain(*sequences))
        return sequences

    def admit_each(self, requests: Sequence[Request], policies: Sequence[Policy]) -> list[list[LiveSequence]]:
        """Admit any requests, with one prefill if they share their prompt."""
        if all(self.shares_prompt(requests[0], other) for other in requests[1:]):
            return self.admit_questions(requests, policies)
        return [self.admit(request, policies) for request in requests]

    def start(self, sequences: Iterable[LiveSequence]) -> None:
        """Add prefilled sequences to the batch."""
        for sequence in sequences:
            if sequence.done:
                _audit(sequence)
                continue
            assert sequence.cache is not None
            if self.cache is None:
                self.cache = empty_like(sequence.cache)
            self.cache.groups += sequence.cache.groups
            self.sequences.append(sequence)
        if self.cache is not None:
            before = self.sequences
            self.sequences = [before[place] for place in join(self.cache)]
        self._joining = JOIN_STEPS

    # --- decoding --------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def step(self) -> list[LiveSequence]:
        """Append the last token of every sequence and choose its next one, in one call. Returns finished sequences."""
        batch = self._recorded()
        if batch is None or batch.room == 0:
            self.drop(())
        assert self.cache is not None, "no sequence is in flight"
        if self._joining:
            self._joining -= 1
        elif use_triton(self.sequences[0].request.input_ids):
            self.cache.on_device()
        sequences = self.sequences
        live = {place: sequence for place, sequence in enumerate(sequences) if not sequence.done}
        device = sequences[0].request.input_ids.device
        tokens = torch.tensor([[sequence.tokens[-1]] for sequence in sequences], device=device)
        places = torch.tensor([[sequence.position] for sequence in sequences], device=device)
        self._prepare(self.cache, tokens)
        try:
            if self._recorder is None or self._joining:
                logits = next_logits(self._model, tokens, places, self.cache)
            else:
                logits = self._recorder.step(self.cache, tokens, places)
        except Exception as error:
            for sequence in live.values():
                sequence.error = error
            return self._finish(live)
        self._assign_errors(self.cache)
        for sequence in live.values():
            sequence.position += 1
            sequence.decode_steps += 1
        choose_next(list(live.values()), logits if len(live) == len(sequences) else logits[list(live)])
        return self._finish(live)

    def _prepare(self, cache: KVCache, tokens: Tensor) -> None:
        """Give groups whose policies rate tokens the logits before the next tokens [S,1]."""
        for group, here in in_order(cache.groups):
            if group.policy.rates:
                logits = torch.cat([one.logits for one in self.sequences[here] if one.logits is not None])
                group.rate_next(logits, tokens[here])

    def _assign_errors(self, cache: KVCache) -> None:
        """Give the error of a failed group to the sequences that caused it, or to all of them if none is known."""
        for group, here in in_order(cache.groups):
            error, sequences = group.error, self.sequences[here]
            if error is None:
                continue
            failed = sequences
            if isinstance(error, ScoreError):
                group.error, failed = None, [sequences[index] for index in error.sequences]
            elif isinstance(error, BudgetError):
                first, group.error = here.start or 0, None
                failed = [one for index, one in enumerate(sequences) if _breaks_budget(cache, first + index)]
            for sequence in failed or sequences:
                sequence.error = error

    def drop(self, sequences: Collection[LiveSequence]) -> None:
        """Remove sequences from the batch, and the padding."""
        places = [n for n, one in enumerate(self.sequences) if not (one.done or one in sequences)]
        if self.cache is not None and len(places) < len(self.sequences):
            self.cache = pick(self.cache, places) if places else None
            self.sequences = [self.sequences[place] for place in places]

    def _finish(self, live: Mapping[int, LiveSequence]) -> list[LiveSequence]:
        """The finished ones of the live sequences, by place, each with its own cache; remove them or pad with them."""
        assert self.cache is not None
        ended = {place: sequence for place, sequence in live.items() if sequence.done}
        if not ended:
            return []
        pads = self._pad(ended)
        for place, sequence in ended.items():
            sequence.cache = copied(self.cache, place) if pads else pick(self.cache, [place])
        if not pads:
            self.drop(())
        for sequence in ended.values():
            _audit(sequence)
        return list(ended.values())

    def _pad(self, ended: Mapping[int, LiveSequence]) -> bool:
        """Keep finished sequences as padding, unless the others fit a smaller bucket."""
        batch = self._recorded()
        if batch is None or bucket(self.in_flight) < len(self.sequences) or any(one.error for one in ended.values()):
            return False
        for place in ended:
            batch.halt(place)
        return batch.room > 0

    def _recorded(self) -> DeviceBatch | None:
        """The batch on the device, if steps are recorded."""
        return None if self._recorder is None or self.cache is None else recorded(self.cache)


def _new_sequence(request: Request, policy: Policy) -> LiveSequence:
    """A sequence before its prefill, whose policy uses the random numbers of its example."""
    return LiveSequence(request, policy if request.example is None else with_example_seed(policy, *request.example))


def _breaks_budget(cache: KVCache, place: int) -> bool:
    """Whether one sequence of a cache holds more than its policy allows."""
    try:
        pick(cache, [place]).audit()
    except BudgetError:
        return True
    return False


def _audit(sequence: LiveSequence) -> None:
    """Set the error of a finished sequence that holds more than its policy allows."""
    if sequence.error is None and sequence.cache is not None:
        try:
            sequence.cache.audit()
        except BudgetError as error:
            sequence.error = error
