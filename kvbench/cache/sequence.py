"""One example under one policy: its tokens, the steps of the schedule in a call of the model, and its layers.

Shapes: H_q query heads, H_kv KV heads, m tokens of a step, D head dim.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import gt
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.cache.budgets import Budgets
from kvbench.cache.families import layout_of
from kvbench.cache.layer import Layer
from kvbench.cache.watcher import Watcher
from kvbench.errors import counted
from kvbench.policies.policy import Policy
from kvbench.policies.schedule import Span

_RULES: dict[object, object] = {}


class Holder(Protocol):
    """Holds the layers of sequences that decode together (`kvbench.cache.table`)."""

    def update(self, sequence: "CachedSequence") -> None:
        """Bring the layers of a sequence up to date."""

    def evicts_next(self, sequence: "CachedSequence") -> bool:
        """Whether it evicts several tokens after its next one, outside of the table."""

    def free(self, sequence: "CachedSequence") -> None:
        """Give a sequence its layers back, in memory of their own."""

    def free_all(self) -> None:
        """Give all sequences their layers back."""

    @property
    def is_tight(self) -> bool:
        """Whether all sequences that leave together can keep the memory."""

    @property
    def rows(self) -> "Sequence[CachedSequence | None]":
        """The sequences, and None for padding."""


class CachedSequence:
    """One example under one policy.

    row: its number in a batch, for messages. names: the model's indices of the layers. seen: tokens seen. columns:
    tokens of all calls, padding included; before: those before the running call. spans: the steps of the running call.
    shared: data that scorers of several layers exchange within a call. given: the same from outside of the model, for
    its next call. states: of layers without keys and values, [1,...] by name. passed, passes: tokens and calls of extra
    forward passes; passed_entries: those they add to the footprint. waits: the evictions of a prompt wait. isolated:
    an error is stored in `error` instead of raised, so that others continue. takes_several: a call may bring several
    tokens after the prompt, each of which counts as a decoded token. peak_nbytes: the most bytes held so far.
    on_change: called with a layer's index after every change of its contents. watchers: told what every call evicts.
    nan_layer: the first layer that had a NaN score. shares_layers: some layers of the model read the tokens of others.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        prompt_length: int | None = None,
        question: int | None = None,
        row: int = 0,
    ) -> None:
        """prompt_length: None: the first call is the whole prompt."""
        layout = layout_of(config)
        self.policy, self.row, self.names = policy, row, layout.attention
        self.budgets = Budgets(policy, len(self.names))
        self._layers = [Layer(policy, index) for index in range(len(self.names))]
        self.table: Holder | None = None
        self.seen = self.columns = self.before = self.passed = self.passes = 0
        self.passed_entries = 0.0
        self.started = False
        self.spans: list[Span] = []
        self.shared: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}
        self.error: Exception | None = None
        self.isolated = self.waits = False
        self.on_change: Callable[[int], None] | None = None
        self.watchers: list[Watcher] = []
        self._held: dict[int, Tensor] = {}  # [H_kv,T] bool by layer: tokens held when the watchers were told last
        self.nan_layer: int | None = None
        self.nan_flags: dict[int, Tensor] = {}  # [1] bool by layer: NaN scores of decoding steps on a GPU
        self.peak_nbytes = self._total_bytes = 0
        self._bytes = [0] * len(self.names)
        self._given = None if prompt_length is None else check_length(prompt_length)
        self._question = question
        self.takes_several = policy.store.exact and not policy.evicts
        self._rope_switch, self.shares_layers = layout.uniform_length, bool(layout.owners)
        self._last = 0  # columns of the last call
        self.clock: Tensor | None = None  # [1] tokens seen, on the device, while a block is recorded
        self._places: dict[tuple[Span, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def layers(self) -> list[Layer]:
        """The contents of every layer."""
        if self.table is not None:
            self.table.update(self)
        return self._layers

    @cached_property
    def rule(self) -> object:
        """Grouping key: sequences with equal keys select the evicted token in one batch, at any budget."""
        policy = self.policy
        stays = policy.schedule.protect, policy.schedule.spans
        parts = policy.scorer, policy.value, policy.selection, policy.merger, policy.granularity, policy.needs, stays
        try:
            return _RULES.setdefault(parts, object())
        except TypeError:  # a part with an unhashable field
            return object()

    @property
    def cost(self) -> tuple[bool, bool]:
        """Of several policies of one prompt, the one with the lowest cost computes the attention for all.

        That is one with KV heads as they are, and with sums over the attention of the prompt.
        """
        return self.policy.granularity == "query_head", self.policy.needs.sums is None

    @property
    def within_call(self) -> bool:
        """Whether a call of the model is running, or its evictions wait."""
        return self.before != self.columns or self.waits

    @property
    def in_prompt(self) -> bool:
        """Whether the next tokens belong to a prompt."""
        return not self.started or self.seen < self.budgets.prompt

    @property
    def decodes(self) -> bool:
        """Whether the next token is a decoded one, after which evictions follow the rule for decoded tokens."""
        return self.columns > 1 and self.started and self.seen >= self.budgets.prompt + self.policy.schedule.late

    @property
    def at_budget(self) -> bool:
        """Whether every layer holds exactly its budget."""
        return all(n == layer.count for n, layer in zip(self.budgets.shares, self.layers, strict=True))

    def fail(self, error: Exception) -> None:
        """Raise an error, or store it if other sequences of the cache continue."""
        if not self.isolated:
            raise error
        self.error = error

    # --- prompts -----------------------------------------------------------------------------------------------------
    def check_next_prompt(self, length: int | None) -> None:
        """ValueError if another prompt of `length` tokens cannot begin now."""
        if not self.started:
            raise ValueError("next_prompt was called before the first prompt, whose length is given already, is in")
        missing = self.budgets.prompt - self.seen
        if missing > 0:
            raise ValueError(
                f"next_prompt was called before the end of the last prompt of sequence {self.row}, which "
                f"still has {counted(missing, 'token')}"
            )
        check_length(length)

    def next_prompt(self, length: int | None, question: int | None) -> None:
        """Begin another prompt of `length` tokens, after `check_next_prompt`."""
        self._begin_prompt(check_length(length), question)
        for layer in self.layers:
            layer.recent.reopen(self.policy.needs.window)

    def _begin_prompt(self, length: int, question: int | None) -> None:
        """Begin a prompt; question: its position in it, for policies that use it."""
        begin = length
        if self.policy.needs.question:
            if question is None:
                raise ValueError(
                    f"{self.policy.name} needs the position of the question in the prompt: pass question=, the number "
                    "of tokens before it"
                )
            if isinstance(question, bool) or not isinstance(question, int) or not 0 <= question < length:
                raise ValueError(f"question must be a position in its prompt, 0 to {length - 1} here, got {question!r}")
            begin = question
        self.budgets.begin(self.seen, self.seen + length, self.seen + begin)

    def take_layer(self, index: int, other: "CachedSequence") -> None:
        """Take over a layer of another sequence of the same prompt, and evict nothing from it."""
        layer = self._layers[index] = other.layers[index]
        layer.policy, layer.count = self.policy, layer.positions.shape[-1]
        self.budgets.keep_all(index)
        self.note_bytes(index)

    # --- one call of the model ---------------------------------------------------------------------------------------
    def begin_call(self, count: int, columns: int, generating: bool = False) -> None:
        """Split a call that brings `count` tokens, `columns` with padding, into the steps of the schedule.

        generating: the caller is `model.generate`, which splits a prompt into parts of one size, the last one shorter.
        """
        self.shared |= self.given
        self.given = {}
        first, schedule = self.seen, self.policy.schedule
        if count == columns == 1 and self.decodes:
            self.spans = [Span(first, first + 1, True, schedule.decoding_evicts, "decode")]
        else:
            if not self.started:  # without a given length the first call is the whole prompt
                self.started = True
                if count or self._given is not None:
                    self._begin_prompt(self._given or count, self._question)
            self._check(count, columns, generating)
            self.spans = self._scheduled(count) if count else []
        self._places.clear()
        self.seen += count
        self.columns += columns
        self._last = columns

    def _scheduled(self, count: int) -> list[Span]:
        """The steps of the next `count` tokens; the schedule counts from the start of the prompt."""
        begin, prompt = self.budgets.opened, self.budgets.prompt
        single = self.policy.reader is not None  # sparse attention selects the tokens of each decoded query separately
        spans = self.policy.schedule.steps(self.seen - begin, count, prompt - begin, single)
        return [span._replace(start=span.start + begin, end=span.end + begin) for span in spans] if begin else spans

    def _check(self, count: int, columns: int, generating: bool) -> None:
        """ValueError for a call that continues after the end of its prompt, and for a wrong or missing prompt length.

        Also for a part of a prompt, if the model would rotate the parts with different frequencies.
        """
        single, switch, end = columns == 1 and not self.takes_several, self._rope_switch, self.budgets.prompt
        if single and self._given is None and self.columns == 1:
            raise ValueError(
                "the first call brought one token and the next brings one more, so the end of the prompt is unknown: "
                "pass KVCache(..., prompt_length=...) if a prompt is split into several calls"
            )
        within_prompt = columns > 1 and (not self.takes_several or (generating and self._last == 1))
        if within_prompt and count > 1 and self.seen + count > end:
            known = self._given is not None or self.budgets.opened
            first = "" if known else " (the first call, as no length was given)"
            raise ValueError(
                f"a call brings {counted(count, 'token')} of sequence {self.row}, but its prompt ends after "
                f"token {end}{first}: "
                "pass KVCache(..., prompt_length=...) if a prompt is split into several calls, call "
                "cache.next_prompt(length) before another turn, cache.reset() before another text"
            )
        if single and generating and self._last >= 2 and self.seen + count < end:
            raise ValueError(
                f"decoding begins after token {self.seen} of sequence {self.row}, but prompt_length (or the length "
                f"given to next_prompt) ends the prompt after token {end}: pass the length of the prompt"
            )
        if switch is not None and end > switch and 0 < count < end - self.budgets.opened and self.seen < end:
            raise ValueError(
                f"a call brings {counted(count, 'token')} of sequence {self.row}, but its prompt ends after "
                f"token {end}, and "
                f"beyond {switch} tokens the model rotates keys by the length each call reaches (longrope, "
                "dynamic NTK): process such a prompt in one call of the model"
            )

    def tick(self, steps: int) -> None:
        """Count decoding steps of its table: one token in each."""
        self.seen += steps
        self.columns += steps
        self.before, self._last = self.columns, 1

    def place(self, span: Span, device: torch.device) -> tuple[Tensor, Tensor]:
        """The positions [1,m] of a step, and the number of tokens after it [1], once for all layers."""
        if (span, device) not in self._places:
            positions = torch.arange(span.start, span.end, device=device)[None]
            if self.clock is not None:
                positions = self.clock[None] + torch.arange(span.end - span.start, device=device)
            self._places[span, device] = positions, positions[0, -1:] + 1  # a new tensor would make the host wait
        return self._places[span, device]

    def show_evicted(self) -> None:
        """After a call: tell the watchers which tokens each layer has evicted since the last time."""
        for layer in self.layers if self.watchers else ():
            if layer.opened:
                positions = layer.positions[0]
                held = positions.new_zeros(len(positions), self.seen + 1, dtype=torch.bool)
                held = held.scatter_(1, positions + 1, True)[:, 1:]  # the first column: empty slots
                before = self._held.get(layer.index, held[:, :0])
                new = before.new_ones(len(held), self.seen - before.shape[1])
                self._held[layer.index] = held
                for watcher in self.watchers:
                    watcher.evicted(layer.index, torch.cat([before, new], 1) & ~held, self.seen)

    def needs_check(self) -> bool:
        """End a call, whose evictions are done. Returns whether the audit has to look at the sequence.

        It has to if a layer holds more tokens than its policy promised, if a score was NaN, or if a GPU has flags of a
        complete prompt.
        """
        self.shared.clear()
        self._places.clear()
        flagged = bool(self.nan_flags) and any(span.phase == "prompt" for span in self.spans)
        self.spans = []
        if self.policy.scorer is not None and self.started and self.table is None:
            held = (layer.count for layer in self.layers)
            if any(map(gt, held, self.budgets.promise(self.seen))):
                return True
        return flagged or self.nan_layer is not None

    def note_bytes(self, index: int) -> None:
        """Update the total number of bytes and its peak after a layer changed."""
        now, before = self.layers[index].nbytes, self._bytes[index]
        self._bytes[index] = now
        self.note(now - before)
        if self.on_change is not None:
            self.on_change(index)

    def note(self, change: int = 0, beside: int = 0) -> None:
        """Change the total number of bytes, and update its peak, also for bytes that were held beside them."""
        self._total_bytes += change
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes + beside)

    def footprint(self, kept: Sequence[Sequence[int]], decode_steps: int) -> float:
        """Entries held, summed over the fed tokens and those of pre-passes: mean over layers and KV heads.

        kept [L][H_kv]: tokens held at the end. The host counts the mean budget of a layer; where its heads hold another
        number (official roundings), the difference at the end counts for every decoding step.
        """
        heads = [len(layer) for layer in kept]
        counted = sum(h * layer.footprint for h, layer in zip(heads, self.layers, strict=True))
        held = sum(h * (layer.count - layer.short) for h, layer in zip(heads, self.layers, strict=True))
        entries = counted + (sum(map(sum, kept)) - held) * decode_steps
        return entries / sum(heads) + self.passed_entries

    @property
    def state_nbytes(self) -> int:
        """Bytes of `states`."""
        return sum(state.nbytes for state in self.states.values())


def check_length(length: object) -> int:
    """The length of a prompt in tokens. ValueError for an invalid one."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"a prompt's length must be a whole number of tokens of at least 1, got {length!r}")
    return length


def spread(given: int | Sequence[int] | None, sequences: int, name: str) -> list[int | None]:
    """One number for each sequence, from one for all or a list. ValueError for a list of another length."""
    numbers: Sequence[int | None] = given if isinstance(given, Sequence) else [given] * sequences
    if len(numbers) != sequences:
        raise ValueError(f"{name} names {counted(len(numbers), 'sequence')}, the model was called with {sequences}")
    return list(numbers)
