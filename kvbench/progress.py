"""How far every sequence of a batch has come, and how a call of the model is cut into the steps of the schedule.

Shapes: B batch, M new tokens of a call, m tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from kvbench.policies.observation import Phase
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Step


@dataclass(frozen=True)
class Slice:
    """One step of a call, for all sequences at once.

    columns: where its tokens lie in the call. positions [B,m]: their original positions, -1 = not this sequence's turn.
    opens: per sequence, whether a block begins. evicts: whether it ends, so that the sequence goes back to budget.
    seen [B]: tokens of each sequence after the step.
    counts: tokens each sequence adds. prompt_done: whether every prompt is in after the step.
    aligned: all sequences are at the same positions and nothing is padded. newest: then the highest position, unless
    only the device knows it (`Progress.clock`).
    """

    columns: slice
    positions: Tensor
    opens: tuple[bool, ...]
    evicts: tuple[bool, ...]
    seen: Tensor
    counts: tuple[int, ...]
    phase: Phase
    prompt_done: bool
    aligned: bool
    newest: int | None


class Progress:
    """How far every sequence of the batch has come; splits each call of the model into the steps of the schedule."""

    def __init__(self, policy: Policy, prompt_length: int | Sequence[int] | None) -> None:
        self._policy = policy
        self._given = prompt_length
        self.seen: list[int] = []
        self.prompt: list[int | None] = []
        self.columns = 0
        self.clock: Tensor | None = (
            None  # [B,1] on the device, where the next token stands: set while steps are replayed
        )

    def split(self, batch: int, new: int, mask: Tensor | None, device: torch.device) -> list[Slice]:
        """The steps of a call of `new` tokens per sequence; mask [B,new] bool marks real tokens (None: all are)."""
        counts = [new] * batch if mask is None else mask.sum(-1).tolist()
        if not self.seen:
            self._start(batch, counts)
        first, self.seen = self.seen, [s + c for s, c in zip(self.seen, counts, strict=True)]
        self.columns += new
        if self.clock is not None:
            assert mask is None, "a replayed step takes a token in every sequence"
            return [self._ticking(self.clock)]
        prompts = self._prompts_now(first, counts)
        steps = [
            self._policy.schedule.steps(f, c, p) if c else [] for f, c, p in zip(first, counts, prompts, strict=True)
        ]
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

    def _prompt_done(self, ends: Sequence[int], phase: Phase) -> bool:
        """Whether every prompt is in after a step; where its length is unknown, the first decoded token tells."""
        return phase == "decode" or all(p is not None and end >= p for p, end in zip(self.prompt, ends, strict=True))

    def _start(self, batch: int, counts: list[int]) -> None:
        self.seen = [0] * batch
        if self._given is None:
            # Without a given length the first call is the whole prompt, unless blocks are expected.
            whole = self._policy.schedule.first_call_is_prompt
            self.prompt = list(counts) if whole else [None] * batch
        elif isinstance(self._given, int):
            self.prompt = [self._given] * batch
        else:
            self.prompt = list(self._given)
            if len(self.prompt) != batch:
                raise ValueError(f"prompt_length names {len(self.prompt)} sequences, the model was called with {batch}")

    def _prompts_now(self, first: list[int], counts: list[int]) -> list[int | None]:
        """Prompt lengths for this call; where unknown, a single token after the first call is a decoded one."""
        unknown_decodes = [p is None and c == 1 and f > 0 for p, c, f in zip(self.prompt, counts, first, strict=True)]
        return [0 if decodes else p for p, decodes in zip(self.prompt, unknown_decodes, strict=True)]

    def _aligned(self, step: Step, first: int, batch: int, device: torch.device) -> Slice:
        return Slice(
            columns=slice(step.start - first, step.end - first),
            positions=torch.arange(step.start, step.end, device=device).expand(batch, -1),
            opens=(step.opens,) * batch,
            evicts=(step.evicts,) * batch,
            seen=torch.full((batch,), step.end, device=device),
            counts=(step.end - step.start,) * batch,
            phase=step.phase,
            prompt_done=self._prompt_done([step.end] * batch, step.phase),
            aligned=True,
            newest=step.end - 1,
        )

    def _ticking(self, clock: Tensor) -> Slice:
        """A decoded token whose place the device reads off its own clock, so that the step can be replayed."""
        batch = len(clock)
        return Slice(
            columns=slice(0, 1),
            positions=clock,
            opens=(True,) * batch,
            evicts=(self._policy.schedule.decode == "evict",) * batch,
            seen=clock[:, 0] + 1,
            counts=(1,) * batch,
            phase="decode",
            prompt_done=True,
            aligned=True,
            newest=None,
        )

    def tick(self) -> None:
        """A step was replayed: every sequence has one token more."""
        self.seen = [seen + 1 for seen in self.seen]
        self.columns += 1

    def _ragged(self, row: tuple[Step | None, ...], positions: Tensor, ends: list[int]) -> Slice:
        start = positions.new_tensor([step.start if step else 0 for step in row])[:, None]
        end = positions.new_tensor([step.end if step else 0 for step in row])[:, None]
        turn = (positions >= start) & (positions < end)
        used = turn.any(0).nonzero()
        phase = next((step.phase for step in row if step and step.phase != "decode"), "decode")
        columns = slice(int(used[0]), int(used[-1]) + 1)
        return Slice(
            columns=columns,
            positions=torch.where(turn, positions, -1)[:, columns],
            opens=tuple(bool(step and step.opens) for step in row),
            evicts=tuple(bool(step and step.evicts) for step in row),
            seen=positions.new_tensor(ends),
            counts=tuple(step.end - step.start if step else 0 for step in row),
            phase=phase,
            prompt_done=self._prompt_done(ends, phase),
            aligned=False,
            newest=None,
        )
