"""How far every sequence of a batch has come, and how a call of the model is cut into the steps of the schedule.

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
    """One step of a call, for all sequences at once.

    columns: where its tokens lie in the call. positions [B,m]: their original positions, -1 = not this sequence's turn.
    opens: per sequence, whether a block begins. evicts: whether it ends, so that the sequence goes back to budget.
    seen [B]: tokens of each sequence after the step; ends: the same on the host.
    counts: tokens each sequence adds. prompt_done: whether every prompt is in after the step.
    aligned: all sequences are at the same positions and nothing is padded. newest: then the highest position, unless
    only the device knows it (`Progress.clock`).
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
        """The positions as stores hold them, int32 [B,m]: made once for all layers."""
        return self.positions.to(torch.int32)

    @cached_property
    def _parts(self) -> dict[tuple[int, int], "BatchStep"]:
        return {}

    def of(self, rows: slice) -> "BatchStep":
        """The same step of some of the sequences, made once for all layers."""
        part = self._parts.get((rows.start, rows.stop))
        if part is None:
            part = self._parts[rows.start, rows.stop] = replace(
                self,
                positions=self.positions[rows],
                opens=self.opens[rows],
                evicts=self.evicts[rows],
                seen=self.seen[rows],
                ends=self.ends[rows],
                counts=self.counts[rows],
            )
        return part

    def to(self, device: torch.device) -> "BatchStep":
        """The same step where a layer on `device` takes it."""
        if self.positions.device == device:
            return self
        return replace(self, positions=self.positions.to(device), seen=self.seen.to(device))


def decoded(places: Tensor, evicts: bool, ends: tuple[int, ...]) -> BatchStep:
    """A decoded token of every sequence, at places [B,1] that only the device knows."""
    batch = len(places)
    return BatchStep(
        columns=slice(0, 1),
        positions=places,
        opens=(True,) * batch,
        evicts=(evicts,) * batch,
        seen=places[:, 0] + 1,
        ends=ends,
        counts=(1,) * batch,
        phase="decode",
        prompt_done=True,
        aligned=True,
        newest=None,
    )


def _apart(step: Step) -> list[Step]:
    """Decoded tokens one by one."""
    if step.phase != "decode":
        return [step]
    return [step._replace(start=place, end=place + 1) for place in range(step.start, step.end)]


class Progress:
    """How far every sequence of the batch has come; splits each call of the model into the steps of the schedule.

    A sequence's newest prompt takes positions opened[b] to prompt[b] - 1; without a later prompt it began at 0. Its
    question, where the policy asks for it, begins at question[b].
    passed: tokens that went through the model in pre-passes over it, beside its own.
    forced: tokens after it may come several at once (they are given); else such a call is refused. alike: tokens up to
    which all calls of the model rotate keys alike (see `kvbench.cache.rotary`); longer prompts come in one call.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_length: int | Sequence[int] | None,
        forced: bool = False,
        alike: int | None = None,
        question: int | Sequence[int] | None = None,
    ) -> None:
        self._policy = policy
        self._given = prompt_length
        self._asked = question
        self._forced = forced
        self._alike = alike
        self.seen: list[int] = []
        self.opened: list[int] = []
        self.prompt: list[int] = []
        self.question: list[int] = []
        self.passed: list[int] = []
        self.columns = 0
        self._last = 0  # columns of the last call
        self.clock: Tensor | None = None  # [B,1] where the next token stands, on the device: while steps are recorded

    @staticmethod
    def of_rows(rows: Sequence[tuple["Progress", int]]) -> "Progress":
        """Sequences that come from elsewhere, under policies of one schedule, each where it stands."""
        first = rows[0][0]
        found = Progress(first._policy, [part.prompt[row] for part, row in rows], first._forced, first._alike)
        for name in ("seen", "opened", "prompt", "question", "passed"):
            setattr(found, name, [getattr(part, name)[row] for part, row in rows])
        found.columns = max(found.seen)
        return found

    def open(self, length: int | Sequence[int], question: int | Sequence[int] | None = None) -> None:
        """Let the next `length` tokens be another prompt. ValueError for a wrong length or while a prompt comes in."""
        if not self.seen:
            if self._given is not None:
                raise ValueError("next_prompt was called before the first prompt, whose length is given already, is in")
            self._given, self._asked = length, question
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
        """The steps of a call of `new` tokens per sequence; mask [B,new] bool marks real tokens (None: all are).

        generating: `model.generate` calls, which feeds a prompt in parts of one size, the last one shorter.
        """
        counts = [new] * batch if mask is None else mask.sum(-1).tolist()
        if not self.seen:
            self._start(batch, counts)
        if new > 1 and (not self._forced or (generating and self._last == 1)):
            self._check_prompt(counts)
        if new == 1 and not self._forced:
            self._check_single(counts, generating)
        if self._alike is not None:
            self._check_rotation(self._alike, counts)
        steps = [self._steps(row, count) if count else [] for row, count in enumerate(counts)]
        first, self.seen = self.seen, [s + c for s, c in zip(self.seen, counts, strict=True)]
        self.columns += new
        self._last = new
        if self.clock is not None:
            assert mask is None, "a replayed step takes a token in every sequence"
            return [self._ticking(self.clock)]
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
        """Whether the next tokens are a prompt's."""
        return not self.seen or any(seen < end for seen, end in zip(self.seen, self.prompt, strict=True))

    def _prompt_done(self, ends: Sequence[int], phase: Phase) -> bool:
        """Whether every prompt is in after a step."""
        return phase == "decode" or all(end >= p for p, end in zip(self.prompt, ends, strict=True))

    def _start(self, batch: int, counts: list[int]) -> None:
        # Without a given length the first call is the whole prompt.
        self.prompt = list(counts) if self._given is None else self._lengths(self._given, batch)
        self.question = self._questions(self._asked, self.prompt)
        self.seen, self.opened = [0] * batch, [0] * batch
        self.passed = self.passed or [0] * batch

    def _lengths(self, length: int | Sequence[int], batch: int) -> list[int]:
        """A prompt's length for each sequence; ValueError where it is none."""
        lengths = list(length) if isinstance(length, Sequence) else [length] * batch
        if len(lengths) != batch:
            raise ValueError(f"prompt_length names {len(lengths)} sequences, the model was called with {batch}")
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
            raise ValueError(f"a prompt's length must be a whole number of tokens of at least 1, got {length!r}")
        return lengths

    def _questions(self, question: int | Sequence[int] | None, lengths: Sequence[int]) -> list[int]:
        """Where the question of each prompt begins; its end where no policy asks. ValueError for a wrong one."""
        if not self._policy.needs.question:
            return list(lengths)
        if question is None:
            raise ValueError(
                f"{self._policy.name} asks where the question of a prompt begins: say it with question=, the number of "
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
        """ValueError for several tokens at once of which some come after the prompt."""
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if count > 1 and seen + count > end:
                first = (
                    "" if self._given is not None or self.opened[row] else " (the first call, as no length was given)"
                )
                raise ValueError(
                    f"a call brings {count} tokens of sequence {row}, but its prompt ends after token {end}{first}: "
                    "pass KVCache(..., prompt_length=...) where a prompt comes in several calls, call "
                    "cache.next_prompt(length) before another turn, cache.reset() before another text"
                )

    def _check_single(self, counts: Sequence[int], generating: bool) -> None:
        """ValueError for a call of one token that shows that the prompt's length is wrong, or missing."""
        if self._given is None and self.columns == 1:
            raise ValueError(
                "the first call brought one token and the next brings one more, so nothing tells where the prompt "
                "ends: pass KVCache(..., prompt_length=...) where a prompt comes in several calls"
            )
        if not generating or self._last < 2:
            return
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if seen + count < end:
                raise ValueError(
                    f"decoding begins after token {seen} of sequence {row}, but its prompt was said to end after token "
                    f"{end}: prompt_length (or next_prompt's length) must be the prompt's own"
                )

    def _check_rotation(self, alike: int, counts: Sequence[int]) -> None:
        """ValueError for a part of a prompt whose other parts the model would rotate otherwise."""
        for row, (seen, count, end) in enumerate(zip(self.seen, counts, self.prompt, strict=True)):
            if end > alike and 0 < count < end - self.opened[row] and seen < end:
                raise ValueError(
                    f"a call brings {count} tokens of sequence {row}, whose prompt ends after token {end}, but beyond "
                    f"{alike} tokens the model rotates keys by the length each call reaches (longrope, dynamic NTK): "
                    "such a prompt has to come in one call of the model"
                )

    def _steps(self, row: int, count: int) -> list[Step]:
        """How the next `count` tokens of a sequence are read; the schedule counts from where its prompt begins."""
        begin = self.opened[row]
        steps = self._policy.schedule.steps(self.seen[row] - begin, count, self.prompt[row] - begin)
        if self._policy.reader is not None:  # each decoded query reads tokens of its own
            steps = [part for step in steps for part in _apart(step)]
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

    def _ticking(self, clock: Tensor) -> BatchStep:
        """A decoded token whose place the device reads off its own clock, so that the step can be replayed."""
        return decoded(clock, self._policy.schedule.decode == "evict", tuple(self.seen))

    def tick(self, steps: int) -> None:
        """So many steps were taken elsewhere: every sequence has a token more for each."""
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
