"""Progress of the sequences of a batch, and the schedule's steps in a call of the model.

Shapes: B batch, M new tokens of a call, m tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from kvbench.policies.observation import Phase
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Step


@dataclass(frozen=True)
class BatchStep:
    """One step of the schedule within a call of the model, for all sequences of a batch.

    columns: the step's tokens in the call. positions [B,m]: their original positions, -1 = padding or a sequence
    without a step. opens: per sequence, whether a block begins. evicts: whether a block ends and eviction follows.
    seen [B]: tokens of each sequence after the step; ends: the same numbers on the host. counts: tokens that each
    sequence appends. prompt_done: every prompt is complete after the step. aligned: all sequences are at the same
    positions without padding; newest is then the highest position, else None.
    """

    columns: slice
    positions: Tensor
    opens: tuple[bool, ...]
    evicts: tuple[bool, ...]
    seen: Tensor
    ends: tuple[int, ...]
    counts: tuple[int, ...]
    phase: Phase
    prompt_done: bool
    aligned: bool
    newest: int | None

    @cached_property
    def places(self) -> Tensor:
        """The positions as stores hold them, int32 [B,m], computed once for all layers."""
        return self.positions.to(torch.int32)

    def to(self, device: torch.device) -> "BatchStep":
        """The same step with its tensors on `device`."""
        if self.positions.device == device:
            return self
        return replace(self, positions=self.positions.to(device), seen=self.seen.to(device))


class Progress:
    """Counts the tokens of every sequence, and splits each call of the model into steps of the schedule.

    The newest prompt of sequence b has positions opened[b] to prompt[b] - 1, and its question begins at question[b].
    columns: tokens of all calls, padding included. passed: tokens of extra forward passes over each prompt. forced: a
    call may bring several tokens after the prompt (teacher forcing). rope_switch: number of tokens from which on the
    model's rotary frequencies depend on the length of a call (`kvbench.cache.layout`); longer prompts need one call.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_length: int | Sequence[int] | None,
        forced: bool = False,
        rope_switch: int | None = None,
        question: int | Sequence[int] | None = None,
    ) -> None:
        self._policy = policy
        self._given = prompt_length
        self._given_question = question
        self._forced = forced
        self._rope_switch = rope_switch
        self.seen: list[int] = []
        self.opened: list[int] = []
        self.prompt: list[int] = []
        self.question: list[int] = []
        self.passed: list[int] = []
        self.columns = 0
        self._last = 0  # columns of the last call

    def open(self, length: int | Sequence[int], question: int | Sequence[int] | None = None) -> None:
        """Begin another prompt of `length` tokens. ValueError for a wrong length or within a prompt."""
        if not self.seen:
            if self._given is not None:
                raise ValueError("next_prompt was called before the first prompt, whose length is given already, is in")
            self._given, self._given_question = length, question
            return
        lengths = self._lengths(length, len(self.seen))
        for row, (seen, end) in enumerate(zip(self.seen, self.prompt, strict=True)):
            if seen < end:
                raise ValueError(
                    f"next_prompt was called while {end - seen} tokens of the last prompt of sequence {row} are to come"
                )
        questions = self._questions(question, lengths)
        self.opened = list(self.seen)
        self.prompt = [seen + new for seen, new in zip(self.seen, lengths, strict=True)]
        self.question = [seen + begin for seen, begin in zip(self.seen, questions, strict=True)]

    def split(
        self, batch: int, new: int, mask: Tensor | None, device: torch.device, generating: bool = False
    ) -> list[BatchStep]:
        """The steps of a call of `new` tokens per sequence; mask [B,new] bool marks real tokens (None: all).

        generating: the caller is `model.generate`, which splits a prompt into parts of one size, the last one shorter.
        """
        counts = [new] * batch if mask is None else mask.sum(-1).tolist()
        if not self.seen:
            self._start(batch, counts)
        if new > 1 and (not self._forced or (generating and self._last == 1)):
            self._check_prompt(counts)
        if new == 1 and not self._forced:
            self._check_single(counts, generating)
        if self._rope_switch is not None:
            self._check_rotation(self._rope_switch, counts)
        steps = [self._steps(row, count) if count else [] for row, count in enumerate(counts)]
        first, self.seen = self.seen, [s + c for s, c in zip(self.seen, counts, strict=True)]
        self.columns += new
        self._last = new
        if mask is None and len(set(first)) == 1 and len(set(map(tuple, steps))) == 1:
            return [self._aligned(step, first[0], batch, device) for step in steps[0]]
        if mask is None:
            mask = torch.ones(batch, new, dtype=torch.bool, device=device)
        offsets = torch.tensor(first, device=device)[:, None]
        positions = torch.where(mask, offsets + mask.long().cumsum(-1) - 1, -1)
        ends, slices = list(first), []
        for row in zip_longest(*steps):
            ends = [step.end if step else end for step, end in zip(row, ends, strict=True)]
            slices.append(self._ragged(row, positions, ends))
        return slices

    @property
    def in_prompt(self) -> bool:
        """Whether the next tokens belong to a prompt."""
        return not self.seen or any(seen < end for seen, end in zip(self.seen, self.prompt, strict=True))

    def _prompt_done(self, ends: Sequence[int], phase: Phase) -> bool:
        """Whether every prompt is complete after a step."""
        return phase == "decode" or all(end >= p for p, end in zip(self.prompt, ends, strict=True))

    def _start(self, batch: int, counts: list[int]) -> None:
        # Without a given length the first call is the whole prompt.
        self.prompt = list(counts) if self._given is None else self._lengths(self._given, batch)
        self.question = self._questions(self._given_question, self.prompt)
        self.seen, self.opened = [0] * batch, [0] * batch
        self.passed = self.passed or [0] * batch

    def _lengths(self, length: int | Sequence[int], batch: int) -> list[int]:
        """The prompt length of each sequence. ValueError for an invalid length."""
        lengths = list(length) if isinstance(length, Sequence) else [length] * batch
        if len(lengths) != batch:
            raise ValueError(f"prompt_length names {len(lengths)} sequences, the model was called with {batch}")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
            raise ValueError(f"a prompt's length must be a whole number of tokens of at least 1, got {length!r}")
        return lengths

    def _questions(self, question: int | Sequence[int] | None, lengths: Sequence[int]) -> list[int]:
        """The position of the question in each prompt; the prompt's end if the policy does not use it."""
        if not self._policy.needs.question:
            return list(lengths)
        if question is None:
            raise ValueError(
                f"{self._policy.name} needs the position of the question in the prompt: pass question=, the number of "
                "tokens before it"
            )
        begins = list(question) if isinstance(question, Sequence) else [question] * len(lengths)
        if len(begins) != len(lengths):
            raise ValueError(f"question names {len(begins)} sequences, the model was called with {len(lengths)}")
        for begin, length in zip(begins, lengths, strict=True):
            if isinstance(begin, bool) or not isinstance(begin, int) or not 0 <= begin < length:
                raise ValueError(f"question must be a position in its prompt, 0 to {length - 1} here, got {begin!r}")
        return begins

    def _check_prompt(self, counts: Sequence[int]) -> None:
        """ValueError for a call of several tokens that continues after the end of the prompt."""
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if count > 1 and seen + count > end:
                first = (
                    "" if self._given is not None or self.opened[row] else " (the first call, as no length was given)"
                )
                raise ValueError(
                    f"a call brings {count} tokens of sequence {row}, but its prompt ends after token {end}{first}: "
                    "pass KVCache(..., prompt_length=...) if a prompt is split into several calls, call "
                    "cache.next_prompt(length) before another turn, cache.reset() before another text"
                )

    def _check_single(self, counts: Sequence[int], generating: bool) -> None:
        """ValueError for a call of one token if the prompt length is missing or wrong."""
        if self._given is None and self.columns == 1:
            raise ValueError(
                "the first call brought one token and the next brings one more, so the end of the prompt is unknown: "
                "pass KVCache(..., prompt_length=...) if a prompt is split into several calls"
            )
        if not generating or self._last < 2:
            return
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if seen + count < end:
                raise ValueError(
                    f"decoding begins after token {seen} of sequence {row}, but prompt_length (or the length "
                    f"given to next_prompt) ends the prompt after token {end}: pass the length of the prompt"
                )

    def _check_rotation(self, switch: int, counts: Sequence[int]) -> None:
        """ValueError for a part of a prompt, if the model would rotate the parts with different frequencies."""
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if end > switch and 0 < count < end - self.opened[row] and seen < end:
                raise ValueError(
                    f"a call brings {count} tokens of sequence {row}, but its prompt ends after token {end}, and "
                    f"beyond {switch} tokens the model rotates keys by the length each call reaches (longrope, "
                    "dynamic NTK): process such a prompt in one call of the model"
                )

    def _steps(self, row: int, count: int) -> list[Step]:
        """The steps of the next `count` tokens of a sequence; the schedule counts from the start of its prompt."""
        begin = self.opened[row]
        steps = self._policy.schedule.steps(self.seen[row] - begin, count, self.prompt[row] - begin)
        if self._policy.reader is not None:  # sparse attention selects the tokens of each decoded query separately
            steps = [
                step._replace(start=place, end=place + 1) if step.phase == "decode" else step
                for step in steps
                for place in (range(step.start, step.end) if step.phase == "decode" else (step.start,))
            ]
        return [s._replace(start=s.start + begin, end=s.end + begin) for s in steps] if begin else steps

    def _aligned(self, step: Step, first: int, batch: int, device: torch.device) -> BatchStep:
        return BatchStep(
            columns=slice(step.start - first, step.end - first),
            positions=torch.arange(step.start, step.end, device=device).expand(batch, -1),
            opens=(step.opens,) * batch,
            evicts=(step.evicts,) * batch,
            seen=torch.full((batch,), step.end, device=device),
            ends=(step.end,) * batch,
            counts=(step.end - step.start,) * batch,
            phase=step.phase,
            prompt_done=self._prompt_done([step.end] * batch, step.phase),
            aligned=True,
            newest=step.end - 1,
        )

    def tick(self, steps: int) -> None:
        """Count decoding steps that a `DeviceBatch` took: one token of every sequence in each."""
        self.seen = [seen + steps for seen in self.seen]
        self.columns += steps

    def _ragged(self, row: tuple[Step | None, ...], positions: Tensor, ends: list[int]) -> BatchStep:
        start = positions.new_tensor([step.start if step else 0 for step in row])[:, None]
        end = positions.new_tensor([step.end if step else 0 for step in row])[:, None]
        turn = (positions >= start) & (positions < end)
        used = turn.any(0).nonzero()
        phase: Phase = next((step.phase for step in row if step and step.phase != "decode"), "decode")
        columns = slice(int(used[0]), int(used[-1]) + 1)
        return BatchStep(
            columns=columns,
            positions=torch.where(turn, positions, -1)[:, columns],
            opens=tuple(bool(step and step.opens) for step in row),
            evicts=tuple(bool(step and step.evicts) for step in row),
            seen=positions.new_tensor(ends),
            ends=tuple(ends),
            counts=tuple(step.end - step.start if step else 0 for step in row),
            phase=phase,
            prompt_done=self._prompt_done(ends, phase),
            aligned=False,
            newest=None,
        )
