"""The progress of the sequences of a batch: tokens seen, the schedule's steps in a call of the model, and budgets.

Shapes: B batch, L layers, M new tokens of a call, m tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor

from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.constants import changing
from kvbench.policies.observation import Phase
from kvbench.policies.policy import Policy, layer_budgets, leaves_whole, shared_budgets
from kvbench.policies.policy_checks import least_budget
from kvbench.policies.schedule import Step
from kvbench.policies.selections.pages import Pages


@dataclass(eq=False)  # not frozen, because a frozen dataclass is slower to create
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

    def to(self, device: torch.device) -> "BatchStep":
        """The same step with its tensors on `device`."""
        return replace(self, positions=self.positions.to(device), seen=self.seen.to(device))


class Progress:
    """Counts the tokens of every sequence, and splits each call of the model into steps of the schedule.

    The newest prompt of sequence b has positions opened[b] to prompt[b] - 1, and its question begins at question[b].
    columns: tokens of all calls, padding included; before: those before the running call. passed: tokens of extra
    forward passes over each prompt; passed_entries: those they add to the footprint (`kvbench.cache.footprint`).
    forced: a call may bring several tokens after the prompt (teacher forcing).
    rope_switch: number of tokens from which on the model's rotary frequencies depend on the length of a call
    (`kvbench.cache.layout`); longer prompts need one call.
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
        self.passed_entries: list[float] = []
        self.columns = self.before = 0
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

    @property
    def in_prompt(self) -> bool:
        """Whether the next tokens belong to a prompt."""
        return not self.seen or any(seen < end for seen, end in zip(self.seen, self.prompt, strict=True))

    def tick(self, steps: int) -> None:
        """Count decoding steps that a `DeviceBatch` took: one token of every sequence in each."""
        self.seen = [seen + steps for seen in self.seen]
        self.columns += steps
        self.before = self.columns

    # --- the steps of a call ---------------------------------------------------------------------------------------
    def split(
        self, batch: int, new: int, mask: Tensor | None, device: torch.device, generating: bool = False
    ) -> list[BatchStep]:
        """The steps of a call of `new` tokens per sequence; mask [B,new] bool marks real tokens (None: all).

        generating: the caller is `model.generate`, which splits a prompt into parts of one size, the last one shorter.
        """
        first, late, aligned = self.seen, self._policy.schedule.late, mask is None and len(set(self.seen)) <= 1
        if aligned and new == 1 and self.columns > 1 and first[0] >= max(self.prompt) + late:
            place, evicts = first[0], self._policy.schedule.decode != "grow"
            positions, ends = torch.full((batch, 1), place, device=device), [place + 1] * batch
            decoded = Step(place, place + 1, opens=True, evicts=evicts, phase="decode")
            steps = [self._step((decoded,) * batch, positions, ends, aligned=True)]
            self.seen = ends
        else:
            counts = [new] * batch if mask is None else mask.sum(-1).tolist()
            if not self.seen:
                self._start(batch, counts)
            self._check(counts, new, generating)
            steps = self._scheduled(counts, new, mask, device)
            self.seen = [seen + count for seen, count in zip(self.seen, counts, strict=True)]
        self.columns += new
        self._last = new
        return steps

    def _scheduled(self, counts: list[int], new: int, mask: Tensor | None, device: torch.device) -> list[BatchStep]:
        """The steps of a call by the schedule of every sequence, which brings its next `counts` tokens."""
        rows = [self._steps(row, count) if count else [] for row, count in enumerate(counts)]
        offsets = changing(self.seen, device)[:, None]
        aligned = mask is None and len(set(self.seen)) == 1 and len(set(map(tuple, rows))) == 1
        if mask is None:
            positions = offsets + torch.arange(new, device=device)
        else:
            positions = torch.where(mask, offsets + mask.long().cumsum(-1) - 1, -1)
        steps, ends = [], list(self.seen)
        for row in zip_longest(*rows):
            ends = [step.end if step else end for step, end in zip(row, ends, strict=True)]
            steps.append(self._step(row, positions, ends, aligned, padded=mask is not None))
        return steps

    def _steps(self, row: int, count: int) -> list[Step]:
        """The steps of the next `count` tokens of a sequence; the schedule counts from the start of its prompt."""
        begin = self.opened[row]
        single = self._policy.reader is not None  # sparse attention selects the tokens of each decoded query separately
        steps = self._policy.schedule.steps(self.seen[row] - begin, count, self.prompt[row] - begin, single)
        return [s._replace(start=s.start + begin, end=s.end + begin) for s in steps] if begin else steps

    def _step(
        self, row: tuple[Step | None, ...], positions: Tensor, ends: list[int], aligned: bool, padded: bool = False
    ) -> BatchStep:
        """One step of every sequence, None for a sequence without one; positions [B,M] of the call's tokens."""
        if aligned and row[0] is not None:
            columns = slice(row[0].start - self.seen[0], row[0].end - self.seen[0])
            positions = positions[:, columns]
        else:
            start, end = ([getattr(step, edge, 0) for step in row] for edge in ("start", "end"))
            begin, until = (changing(edge, positions.device)[:, None] for edge in (start, end))
            here = (positions >= begin) & (positions < until)
            if padded:
                used = here.any(0).nonzero()
                columns = slice(int(used[0]), int(used[-1]) + 1)
            else:
                spans = [(s.start - seen, s.end - seen) for s, seen in zip(row, self.seen, strict=True) if s]
                columns = slice(min(first for first, _ in spans), max(last for _, last in spans))
            positions = torch.where(here, positions, -1)[:, columns]
        phase: Phase = next((step.phase for step in row if step and step.phase != "decode"), "decode")
        return BatchStep(
            columns=columns,
            positions=positions,
            opens=tuple(bool(step and step.opens) for step in row),
            evicts=tuple(bool(step and step.evicts) for step in row),
            seen=changing(ends, positions.device),
            ends=tuple(ends),
            counts=tuple(step.end - step.start if step else 0 for step in row),
            phase=phase,
            prompt_done=phase == "decode" or all(end >= p for p, end in zip(self.prompt, ends, strict=True)),
            aligned=aligned,
            newest=ends[0] - 1 if aligned else None,
        )

    # --- checks ----------------------------------------------------------------------------------------------------
    def _start(self, batch: int, counts: list[int]) -> None:
        # Without a given length the first call is the whole prompt.
        self.prompt = list(counts) if self._given is None else self._lengths(self._given, batch)
        self.question = self._questions(self._given_question, self.prompt)
        self.seen, self.opened = [0] * batch, [0] * batch
        self.passed = self.passed or [0] * batch
        self.passed_entries = self.passed_entries or [0.0] * batch

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

    def _check(self, counts: Sequence[int], new: int, generating: bool) -> None:
        """ValueError for a call that continues after the end of its prompt, and for a wrong or missing prompt length.

        Also for a part of a prompt, if the model would rotate the parts with different frequencies.
        """
        single, switch = new == 1 and not self._forced, self._rope_switch
        if single and self._given is None and self.columns == 1:
            raise ValueError(
                "the first call brought one token and the next brings one more, so the end of the prompt is unknown: "
                "pass KVCache(..., prompt_length=...) if a prompt is split into several calls"
            )
        within_prompt = new > 1 and (not self._forced or (generating and self._last == 1))
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if within_prompt and count > 1 and seen + count > end:
                known = self._given is not None or self.opened[row]
                first = "" if known else " (the first call, as no length was given)"
                raise ValueError(
                    f"a call brings {count} tokens of sequence {row}, but its prompt ends after token {end}{first}: "
                    "pass KVCache(..., prompt_length=...) if a prompt is split into several calls, call "
                    "cache.next_prompt(length) before another turn, cache.reset() before another text"
                )
            if single and generating and self._last >= 2 and seen + count < end:
                raise ValueError(
                    f"decoding begins after token {seen} of sequence {row}, but prompt_length (or the length "
                    f"given to next_prompt) ends the prompt after token {end}: pass the length of the prompt"
                )
            if switch is not None and end > switch and 0 < count < end - self.opened[row] and seen < end:
                raise ValueError(
                    f"a call brings {count} tokens of sequence {row}, but its prompt ends after token {end}, and "
                    f"beyond {switch} tokens the model rotates keys by the length each call reaches (longrope, "
                    "dynamic NTK): process such a prompt in one call of the model"
                )


class Budgets:
    """Slots per KV head of each layer, by sequence: even shares until an allocator has measured the layers."""

    def __init__(self, policy: Policy, layers: int, progress: Progress) -> None:
        self._policy = policy
        self._layers = layers
        self._progress = progress
        self._rows: dict[int, list[int]] = {}
        self._statistics: dict[int, list[list[float]]] = {}
        self._before: dict[int, list[int]] = {}  # allowed when the newest prompt began
        self._after: dict[int, list[int]] = {}  # allowed after the eviction of the newest prompt, once it is asked for

    def reopen(self, length: int | Sequence[int], question: int | Sequence[int] | None) -> None:
        """Begin another prompt, see `Progress.open`. Its budgets are computed when it is complete."""
        before = {row: self.promise(row, seen) for row, seen in enumerate(self._progress.seen) if self._policy.evicts}
        self._progress.open(length, question)
        self._before = before
        for computed in (self._rows, self._statistics, self._after):
            computed.clear()

    def row(self, row: int) -> list[int]:
        """Slots per KV head of each layer for one sequence. Tokens before its newest prompt count as prompt."""
        if row not in self._rows:
            prompt = self._progress.prompt[row]
            self._rows[row] = layer_budgets(self._policy, self._layers, prompt, prompt - self._progress.question[row])
        return self._rows[row]

    def of(self, layer: int, rows: Sequence[bool], read: Sequence[int] | None = None) -> tuple[int, ...]:
        """One layer's slots per KV head for the sequences selected by `rows`, 0 for the others.

        read: number of tokens of each sequence so far; None: its whole prompt. A layer that a cascading allocator has
        not reached has its even share.
        """
        known = self._rows
        found = [(known.get(row) or self.row(row))[layer] if selected else 0 for row, selected in enumerate(rows)]
        if read is not None:
            found = [self._share(row, n, seen) for row, (n, seen) in enumerate(zip(found, read, strict=True))]
        return tuple(found)

    def _share(self, row: int, budget: int, read: int) -> int:
        """The part of a layer's budget for the first `read` tokens of a prompt, at least the protected tokens."""
        share = self._policy.schedule.share(budget, read, self._progress.prompt[row])
        return budget if share == budget else min(budget, max(share, self._least))

    @cached_property
    def _least(self) -> int:
        """Slots per KV head for the protected tokens."""
        assert self._policy.scorer is not None
        return least_budget(self._policy.scorer, self._policy.allocator)

    def exceeded(self, rows: Sequence[bool]) -> tuple[bool, ...]:
        """Which of the selected sequences have a prompt that is longer than their budget."""
        lengths = [self._length(row) if selected else 0 for row, selected in enumerate(rows)]
        return tuple(length > 0 and not leaves_whole(self._policy, self._layers, length) for length in lengths)

    def measured(self, rows: Sequence[bool], statistic: Tensor) -> None:
        """Store the allocator's statistic [B,k] of one more layer, for the selected sequences."""
        for row, values in enumerate(statistic.tolist()):
            if rows[row]:
                self._statistics.setdefault(row, []).append(values)

    def share(self, rows: Sequence[bool]) -> None:
        """Divide the total budget among the layers measured so far, in the selected sequences."""
        for row, selected in enumerate(rows):
            if selected:
                shares = shared_budgets(self._policy, self._statistics[row], self._layers, self._length(row))
                self._rows[row] = shares + self.row(row)[len(shares) :]
                self._after.pop(row, None)

    def promise(self, row: int, seen: int) -> list[int]:
        """The most tokens per KV head that each layer may hold of a sequence after `seen` tokens."""
        schedule, prompt = self._policy.schedule, self._progress.prompt[row]
        if seen < prompt + schedule.late:
            return self._within_prompt(row, seen)
        if row not in self._after:
            self._after[row] = self._after_prompt(row)
        held, every, tokens = self._after[row], schedule.every, seen - prompt - schedule.late
        if schedule.decode != "evict" or tokens == 0:
            return [n + tokens for n in held]
        if isinstance(self._policy.selection, Pages):  # whole pages, of which the newest may be short, leave later
            return [min(n + tokens, b + every - 1) for n, b in zip(held, self._rows[row], strict=True)]
        return [  # a layer evicts `every` tokens at once, whenever it holds that many beyond its budget
            n + tokens if n + tokens < b + every else b + (tokens - max(1, b + every - n)) % every
            for n, b in zip(held, self._rows[row], strict=True)
        ]

    def _after_prompt(self, row: int) -> list[int]:
        """The most tokens per KV head after the eviction of the newest prompt."""
        length, whole = self._length(row), 0
        if isinstance(self._policy.allocator, StatisticAllocator):
            # An allocator may leave a prompt beyond the budget whole until decoding evicts.
            whole = length * leaves_whole(self._policy, self._layers, length)
        before, new = self._before.get(row, [0] * self._layers), length - self._progress.opened[row]
        return [max(min(budget, old + new), whole) for budget, old in zip(self.row(row), before, strict=True)]

    def _within_prompt(self, row: int, seen: int) -> list[int]:
        """The most tokens per KV head within a prompt: those left by its last eviction, and all later ones."""
        opened = self._progress.opened[row]
        settled = self._policy.schedule.settled(seen - opened)
        before = self._before.get(row, [0] * self._layers)
        if settled:
            read = opened + settled
            before = [min(self._share(row, budget, read), read) for budget in self.row(row)]
        return [held + seen - opened - settled for held in before]

    def _length(self, row: int) -> int:
        """Tokens of a sequence when its prompt is evicted."""
        return self._progress.prompt[row] + self._policy.schedule.late
