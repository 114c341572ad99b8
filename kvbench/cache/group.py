"""The sequences of a cache under one policy; their budgets may differ."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.cache.budgets import Budgets
from kvbench.cache.layout import layout_of
from kvbench.cache.rotary import uniform_length
from kvbench.cache.state import Context, LayerState
from kvbench.cache.steps import BatchStep, Progress
from kvbench.policies.observation import StepCache
from kvbench.policies.policy import Policy
from kvbench.policies.pre_passes.pre_pass import TokenRating
from kvbench.policies.ranking import Ranking

_PARTS: dict[object, object] = {}


def same(*parts: object) -> object:
    """The same object for equal parts: hashing them anew for every layer and token costs more than an eviction."""
    try:
        return _PARTS.setdefault(parts, object())
    except TypeError:  # a part from elsewhere, with a list among its knobs
        return object()


class PolicyGroup:
    """How far these sequences came, their budgets, and what every layer holds of them.

    several_tokens: tokens after the prompt may come several at once. shared: what scorers of several layers tell
    each other within a call. names: the model's indices of the layers. states: of recurrent layers, [B,...] by
    name. isolated: an error ends this group alone; error: then, what it was. peak_nbytes: the most bytes held at
    any time; peaks: those of each sequence before it joined this group. on_change: called with a layer's index
    whenever what it holds changed; on_evict: with a layer, its scores and what stays, bool [B,H_kv,T], before
    several tokens are evicted.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: Policy,
        prompt_length: int | Sequence[int] | None,
        several_tokens: bool = False,
        question: int | Sequence[int] | None = None,
    ) -> None:
        layout = layout_of(config)
        self.names = layout.attention
        layers = len(self.names)
        self.policy = policy
        self.progress = Progress(policy, prompt_length, several_tokens, uniform_length(config), question)
        self.budgets = Budgets(policy, layers, self.progress)
        self.layers = [LayerState(policy, index) for index in range(layers)]
        self.shared: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}
        self.error: Exception | None = None
        self.isolated = False
        self.on_change: Callable[[int], None] | None = None
        self.on_evict: Callable[[LayerState, Ranking, Tensor], None] | None = None
        self.peak_nbytes = 0
        self.peaks: list[int] = []
        self.waits_for_pre_pass = False  # it was announced, and is not over
        self.not_numbers: dict[int, int] = {}  # sequences with a score that is NaN, and the first layer that had one
        self._told = len(prompt_length) if isinstance(prompt_length, Sequence) else 1
        self._ratings: Tensor | None = None  # of the token of the next call
        self._steps: list[BatchStep] = []
        self._seen_before: int | None = None  # by the call that is running
        self._bytes = [0] * layers
        self._total_bytes = 0

    @cached_property
    def rule(self) -> object:
        """What decides over one token of a layer, whatever its budget: one object for all policies that agree in it."""
        policy = self.policy
        parts = policy.scorer, policy.value, policy.selection, policy.merger, policy.granularity
        return same(*parts, policy.needs.query_heads)

    @property
    def size(self) -> int:
        """Sequences it holds, or, before its first call, is to hold."""
        return len(self.progress.seen) or self._told

    @property
    def seen_before(self) -> int:
        """Tokens seen before the call that is running; between calls all that were seen."""
        return self.progress.columns if self._seen_before is None else self._seen_before

    @property
    def within_call(self) -> bool:
        """Whether a call of the model is running, or its evictions wait for a pre-pass."""
        return self._seen_before is not None or self.waits_for_pre_pass

    @property
    def at_budget(self) -> bool:
        """Whether every layer holds exactly its budget in every sequence."""
        rows = [True] * self.size
        return all(layer.counts and tuple(layer.counts) == self.budgets.of(layer.index, rows) for layer in self.layers)

    def take(self, progress: Progress, budgets: Budgets, layers: list[LayerState], states: dict[str, Tensor]) -> None:
        """Hold these sequences, which other groups held."""
        self.progress, self.budgets, self.layers = progress, budgets, layers
        for name, state in states.items():
            self.hold_state(name, state)
        for index in range(len(layers)):
            self.note_bytes(index)

    def fail(self, error: Exception) -> None:
        """Something went wrong in a call: raised, or remembered where other groups of the cache go on."""
        if not self.isolated:
            raise error
        self.error = error

    # --- one call of the model -------------------------------------------------------------------------------------
    def begin_call(self, queries: Tensor, mask: Tensor | None, generating: bool = False) -> None:
        """Cut a call of queries [B,H_q,M,D] into the steps of the schedule; mask [B,M] bool marks real tokens.

        generating: it is `model.generate` that calls.
        """
        self.begin_step()
        before = self.progress.columns
        self._steps = self.progress.split(queries.shape[0], queries.shape[2], mask, queries.device, generating)
        self._seen_before = before

    def begin_step(self) -> None:
        """ValueError if a call's tokens come without what only our own loop finds out for the policy."""
        if self.policy.pre_pass is None or self.waits_for_pre_pass:
            return
        if self.progress.in_prompt:
            raise ValueError(
                f"{self.policy.name} has the model look at a prompt again before it evicts, which model.generate does "
                "not: use kvbench.generate"
            )
        if self.policy.rates:
            if self._ratings is None:
                raise ValueError(
                    f"{self.policy.name} scores tokens by the model's own probabilities, which model.generate does not "
                    "tell its cache: use kvbench.generate"
                )
            self.shared["ratings"], self._ratings = self._ratings, None

    def steps_on(self, like: Tensor) -> list[BatchStep]:
        """The steps of the current call, on the device of a layer's tensors."""
        return [step.to(like.device) for step in self._steps]

    def layers_done(self) -> None:
        """The last layer is through."""
        self._seen_before = None

    def end_call(self) -> None:
        """A call is over and its evictions are done."""
        self.shared.clear()
        self._steps = []  # a prompt's positions are of no use to anyone any more

    def context(self, known: StepCache | None = None) -> Context:
        """What a layer needs to know for a step."""
        return Context(self.budgets, self.progress.prompt, self.progress.question, self.shared, known)

    def note_bytes(self, index: int) -> None:
        """Keep the running total and its peak true after layer `index` changed what it holds."""
        now = self.layers[index].nbytes
        self._total_bytes += now - self._bytes[index]
        self._bytes[index] = now
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes)
        if self.on_change is not None:
            self.on_change(index)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the recurrent layers' states."""
        return sum(state.nbytes for state in self.states.values())

    def hold_state(self, name: str, state: Tensor) -> None:
        """Hold another state [B,...] of a recurrent layer than before."""
        before = self.states.get(name)
        self.states[name] = state
        self._total_bytes += state.nbytes - (0 if before is None else before.nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes)

    def free_state(self, name: str) -> None:
        """Let a state be written to outside of inference mode, where it was made inside."""
        if name in self.states and self.states[name].is_inference() and not torch.is_inference_mode_enabled():
            self.states[name] = self.states[name].clone()

    def settle(self, index: int, prompt_done: bool) -> None:
        """A step of layer `index` is over: once every prompt is in, the store brings it into its final form."""
        layer = self.layers[index]
        if prompt_done and not layer.unsettled:
            layer.store.settle()
        self.note_bytes(index)

    def count_evicted(self, layer: LayerState, rows: slice, evicted: Sequence[int]) -> None:
        """Subtract tokens that are about to be evicted from the counts of these sequences."""
        counts = layer.counts[rows]
        layer.counts[rows] = [count - max(n, 0) for count, n in zip(counts, evicted, strict=True)]

    # --- pre-passes ------------------------------------------------------------------------------------------------
    def rate_next(self, logits: Tensor, tokens: Tensor) -> None:
        """The tokens [B,1] of the next call under the logits [B,V] before them, where the policy rates tokens."""
        if isinstance(self.policy.pre_pass, TokenRating):
            self._ratings = self.policy.pre_pass.rate(logits[:, None], tokens)

    def rated(self, ratings: Tensor) -> None:
        """What the policy's pre-pass made of the logits of the prompt just read, [B,T]."""
        (prompt,) = self._steps
        self.shared["ratings"] = ratings[:, prompt.columns]


def in_order(groups: Sequence[PolicyGroup]) -> Iterator[tuple[PolicyGroup, slice]]:
    """Every group, and which rows of a batch are its sequences."""
    first = 0
    for group in groups:
        yield group, slice(None) if len(groups) == 1 else slice(first, first + group.size)
        first += group.size
