"""The cache: one layer object per model layer, each holding what its policy keeps, and an audit of all of them.

Shapes: B batch, L layers, H_q query heads, H_kv KV heads, M new tokens, C slots, D head dim.
"""

from collections.abc import Collection, Sequence
from operator import gt
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from kvbench.cache.budgets import Budgets
from kvbench.cache.evidence import Evidence
from kvbench.cache.interface import NoStates, check_interface
from kvbench.cache.layer import KVLayer
from kvbench.cache.queue import EvictionQueue
from kvbench.cache.registration import unwrap
from kvbench.cache.rotary import uniform_length
from kvbench.cache.saving import load, save
from kvbench.cache.steps import Progress, Slice
from kvbench.policies.policy import Policy


class BudgetError(RuntimeError):
    """The cache held more than its policy promised, or held it wrongly: the run would not measure what it claims."""


class ScoreError(FloatingPointError):
    """Tokens were scored by what is no number (NaN), so that nothing says which of them are to stay."""

    sequences: Collection[int] = ()
    """In which this came about."""


class KVCache(NoStates, Cache):
    """A cache that holds what its policy keeps; pass it to `model.generate` or to the model itself.

    prompt_length: tokens of the prompt, one number or one per sequence. Without it the first call is the whole prompt:
    where it comes in several (`generate(..., prefill_chunk_size=...)`), nothing else tells the cache.
    Tokens after the prompt come one by one: several at once are refused until `next_prompt` opened another prompt
    (except by `full` outside of `generate`, to which it makes no difference).
    Raises ValueError for a model that does not follow transformers' attention interface.

    With `next_prompt` all that was seen before counts as part of the new prompt, which is taken in by the policy's
    schedule:
    - Its end (every block of it, counted from its own first token) brings the whole cache to the budget: kept tokens,
      generated ones and new ones compete. What was evicted does not come back, so that a layer or a KV head may hold
      less than its share.
    - A budget that is a share, and every allocator, counts all tokens seen until the new prompt's end; statistics over
      layers are measured anew, on what is stored.
    - Observation windows hold the newest queries at hand: of this prompt, and, where the policy holds its window while
      decoding, of before. Running statistics (H2O, RoCo, D2O, ...) and a merger's thresholds go on; queries of tokens
      that decoding took in without evicting (`grow`) are in no statistic.
    - Sinks are the first tokens of all, recent windows the newest. SirLLM gives a prompt's first token surprisal 0.
    - A policy that keeps every token in a quantised store takes the new prompt in exactly and then quantises it as it
      does generated tokens; one that evicts has to be refused: quantised groups give no token up.

    A long document is compressed once and asked about later, in another process or on another machine:

        cache = KVCache(model.config, policy)
        with torch.inference_mode():
            model(document, past_key_values=cache)          # ids [1,T]
        cache.save("document.safetensors")

        cache = KVCache.load("document.safetensors", model.config, policy, device=model.device)
        ids = torch.cat([document, question], dim=1)        # `generate` takes the ids of the whole conversation
        cache.next_prompt(question.shape[1])
        answer = model.generate(ids, past_key_values=cache, max_new_tokens=64, do_sample=False)
    """

    layers: list[KVLayer]  # type: ignore[assignment]
    teacher_forced: ClassVar[bool] = False
    """Whether tokens after the prompt are given and may come several at once, each a decoded one all the same."""

    def __init__(
        self, config: PreTrainedConfig, policy: Policy, prompt_length: int | Sequence[int] | None = None
    ) -> None:
        self.config = config.get_text_config(decoder=True)
        check_interface(self.config)
        if not isinstance(policy, Policy):
            raise ValueError(f"policy must be a Policy, such as make_policy('snapkv', 512) gives, got {policy!r}")
        if policy.filter is not None:
            raise ValueError(
                f"{policy.name} rewrites the prompt before it is cached: use kvbench.inference.generate.greedy"
            )
        self.policy = policy
        self._prompt_length = prompt_length
        # Where every token stays as it came, nothing depends on where a prompt ends.
        forced = self.teacher_forced or (policy.store.exact and not policy.evicts)
        self._progress = Progress(policy, prompt_length, forced, uniform_length(self.config))
        self._slices: list[Slice] = []
        self._reader: ReferenceType[nn.Module] | None = None  # the first attention of the model that calls
        self.queue = EvictionQueue()
        self._leads = True  # its own last layer ends a call
        self._broken: dict[int, int] = {}  # see `note_broken`
        self.error: Exception | None = None  # why it was given up, as one of several that are called together
        self.budgets = Budgets(policy, self.config.num_hidden_layers, self._progress)
        self.shared: dict[str, Tensor] = {}
        self._surprisal: Tensor | None = None  # of the tokens of the next call
        self._surprisal_follows = False
        super().__init__(layers=[KVLayer(self, index) for index in range(self.config.num_hidden_layers)])
        self._is_user_defined = False  # transformers sets it where `model.generate` is given the cache
        self._called: int | None = None  # tokens seen before the call that is running
        self._bytes = [0] * len(self.layers)
        self._total_bytes = 0
        self.peak_nbytes = 0
        self.peaks: list[int] = []  # of its sequences, before they came together

    def reset(self) -> None:
        """Forget everything: the cache is as it was made."""
        self.__init__(self.config, self.policy, self._prompt_length)  # type: ignore[misc]

    def next_prompt(self, length: int | Sequence[int]) -> None:
        """Let the next `length` tokens, one number or one per sequence, be another prompt (a turn of a conversation).

        `model.generate` feeds what the cache has not seen, the last answer's last token included: for the ids of the
        whole conversation [1,T] that is T - cache.seen tokens. Raises ValueError while a prompt is still coming in,
        and for policies that could not keep their promise then.
        """
        self.policy.check_next_prompt()
        self.queue.end_call()
        promised = self.budgets.promised() if self.policy.evicts else {}
        self._progress.open(length)
        self.budgets.reopen(promised)
        for layer in self.layers:
            layer.reopen()

    def take_over(self, progress: Progress, budgets: Budgets, layers: list[KVLayer]) -> None:
        """Hold these sequences, which other caches held: see `kvbench.cache.joining`."""
        self._progress, self.budgets, self.layers = progress, budgets, layers
        for index in range(len(layers)):
            self.note_bytes(index)

    @property
    def sequences(self) -> int:
        """How many sequences it holds, or, before its first call, was told of; 0: nobody said it yet."""
        told = self._prompt_length
        return len(self._progress.seen) or (len(told) if isinstance(told, Sequence) else 0)

    def save(self, path: str | Path) -> None:
        """Write all it holds and knows to one safetensors file, about as large as `nbytes`; see `kvbench.cache.saving`.

        Works between any two calls of the model once a prompt is in, between replays of a CUDA graph too. Raises
        ValueError while a prompt is coming in, and for parts from elsewhere that cannot be told as plain data; OSError
        where nothing can be written.
        """
        save(self, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, config: PreTrainedConfig, policy: Policy, device: torch.device | str = "cpu"
    ) -> Self:
        """The cache that `save` wrote, on `device`: what follows comes out as it would have from the saved one.

        config, policy: those it was made with. Raises ValueError where the file is missing, damaged or another's, and
        where it was saved under another policy or from a model of another shape (a configuration does not tell the
        weights apart: load it for the very model that read the document).
        """
        cache = cls(config, policy)
        load(cache, Path(path), device)
        return cache

    @property
    def within_call(self) -> bool:
        """Whether a call of the model is running, or its evictions wait for the surprisal of its tokens."""
        return self._called is not None or self._surprisal_follows

    @property
    def seen(self) -> int:
        """Tokens seen, padding columns included: where the next token of an unpadded sequence stands."""
        return self._progress.columns

    @property
    def progress(self) -> Progress:
        """How far every sequence has come."""
        return self._progress

    @property
    def at_budget(self) -> bool:
        """Whether every layer holds exactly its budget in every sequence."""
        return all(layer.at_budget for layer in self.layers)

    @property
    def prompts(self) -> list[int]:
        """Where the newest prompt of every sequence ends: its length in tokens, with all that was seen before it."""
        return self._progress.prompt

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def spare_nbytes(self) -> int:
        """Bytes reserved but unused: capacity for new tokens and the slots of evicted tokens."""
        return sum(layer.spare_nbytes for layer in self.layers)

    @property
    def held_nbytes(self) -> int:
        """Bytes in use, `nbytes` less the spare ones: what tables, dashboards and pictures call bytes held."""
        return self.nbytes - self.spare_nbytes

    def expect(self, tokens: int) -> None:
        """The prompt is in, and no more than so many tokens follow it: no more room is made for them."""
        for layer in self.layers:
            layer.expect(tokens)

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held."""
        first = self.layers[0].positions.device  # of a model on several devices
        return torch.stack([layer.kept_tokens().to(first) for layer in self.layers])

    def check_attention(self) -> None:
        """ValueError if attention that cannot read the cache follows; it asks for ours, which is then what it gets."""
        unwrap()
        if self.config._attn_implementation != "kvbench":
            raise ValueError(
                f"the configuration of this cache asks for attention with {self.config._attn_implementation!r}, which "
                'cannot read a KVCache: call model.set_attn_implementation("kvbench") first, and make the cache with '
                "that model.config"
            )

    def check_model(self, module: nn.Module) -> None:
        """ValueError if the model whose first attention runs is not of the kind the cache was made for, or another."""
        reader = None if self._reader is None else self._reader()
        if reader is module:
            return
        if reader is not None:
            raise ValueError(
                "this KVCache holds what another model computed: make a cache for each model, KVCache(model.config, "
                "policy), or call cache.reset() first"
            )
        self._check_kind(module.config)
        self._reader = ref(module)

    def _check_kind(self, config: Any) -> None:  # noqa: ANN401 - a module's attributes have no type
        for field in ("model_type", "num_hidden_layers", "hidden_size"):
            mine, its = getattr(self.config, field, None), getattr(config, field, None)
            if mine != its:
                raise ValueError(
                    f"this KVCache was made from another model's configuration ({field}={mine}, the model has {its}): "
                    "make it with KVCache(model.config, policy)"
                )

    def note_bytes(self, index: int) -> None:
        """Keep the running total and its peak true after layer `index` changed what it holds."""
        now = self.layers[index].nbytes
        self._total_bytes += now - self._bytes[index]
        self._bytes[index] = now
        self.peak_nbytes = max(self.peak_nbytes, self._total_bytes)

    def slices(self, index: int, queries: Tensor, mask: Tensor | None) -> list[Slice]:
        """The steps of the current call; computed by the first layer, shared by the others."""
        if index == 0:
            if self._leads:
                self.queue.end_call()  # of a model whose last layers hold no cache of their own
            if self.policy.needs_surprisal:
                self._take_surprisal()
            before = self.seen
            size = queries.shape[0], queries.shape[2]
            self._slices = self._progress.split(*size, mask, queries.device, self._is_user_defined)
            self._called = before
        if all(part.positions.device == queries.device for part in self._slices):
            return self._slices
        return [part.to(queries.device) for part in self._slices]

    @property
    def seen_before(self) -> int:
        """Tokens seen before the call that is running; between calls all that were seen."""
        return self.seen if self._called is None else self._called

    def evict(self, index: int, shown: Evidence) -> None:
        """Layer `index` attended: its eviction is due, and comes when what it waits for is known."""
        self.queue.put(self.layers[index], shown)

    def layer_done(self, index: int) -> None:
        """Layer `index` is through with a call of the model."""
        if index == len(self.layers) - 1:
            self._called = None
            if self._leads:
                self.queue.end_call()
                self.end_call()

    def lead_by(self, queue: EvictionQueue) -> None:
        """From now on it is called together with others, and whoever calls them ends the calls: see `RowsCache`."""
        self.queue, self._leads = queue, False

    def fail(self, error: Exception) -> None:
        """Something went wrong in a call: raised, or remembered where others are called together with this cache."""
        if self._leads:
            raise error
        self.error = error

    def end_call(self) -> None:
        """A call is over and its evictions are done; one that waits for surprisal ends when that is told."""
        if not self._surprisal_follows:
            self._finish()

    def _finish(self) -> None:
        """A call is over, its evictions are done: check what layers count, and drop what they told each other."""
        self.shared.clear()
        self._slices = []  # a prompt's positions are of no use to anyone any more
        if self.policy.evicts:
            self._audit_counts()
        if self._broken:
            raise self._score_error()

    def note_broken(self, index: int, sequences: Sequence[int]) -> None:
        """Scores of a layer are no numbers in these sequences: the call goes on for the others and ends in an error."""
        for sequence in sequences:
            self._broken.setdefault(sequence, index)

    def _score_error(self) -> ScoreError:
        error = ScoreError(
            f"{self.policy.name} gave tokens of layer {min(self._broken.values())} scores that are not numbers (NaN): "
            "its scorer divides 0 by 0 or takes infinity from infinity, or the model's numbers overflow in this dtype"
        )
        error.sequences, self._broken = set(self._broken), {}
        return error

    def _audit_counts(self) -> None:
        """The cheap part of the audit: the tokens that every layer counts, which cost no look at the device."""
        for row, seen in enumerate(self._progress.seen):
            promised = self.budgets.promise(row, seen)
            held = [layer.counts[row] if layer.counts else 0 for layer in self.layers]
            if any(map(gt, held, promised)):
                self._audit_sums(row, torch.tensor(held, dtype=torch.float), torch.tensor(promised))

    def expect_surprisal(self) -> None:
        """The next call takes a prompt in, and `tell_surprisal` follows as soon as its layers are done."""
        self._surprisal_follows = True

    def tell_surprisal(self, surprisal: Tensor) -> None:
        """-log p of every token, [B,M] float32: of the prompt just taken in, or of the token decoded next, [B,1]."""
        if not self._surprisal_follows:
            self._surprisal = surprisal
            return
        self._surprisal_follows = False
        (prompt,) = self._slices
        self.shared["surprisal"] = surprisal[:, prompt.columns]
        self.queue.surprisal_told()
        self._finish()

    def _take_surprisal(self) -> None:
        """ValueError if the tokens of a call come without what their scorer needs to know of them."""
        if self._surprisal is None and not self._surprisal_follows:
            raise ValueError(
                f"{self.policy.name} scores tokens by the model's own probabilities, which model.generate does not "
                "tell its cache: use kvbench.inference.generate.greedy"
            )
        if self._surprisal is not None:
            self.shared["surprisal"], self._surprisal = self._surprisal, None

    def audit(self) -> None:
        """Raise BudgetError unless every layer holds at most what the policy promises, at valid positions.

        The promise: the layer's budget for every KV head, or for their mean where heads may get different shares;
        beside it, where decoding grows, the decoded tokens.
        """
        if not self.policy.evicts or not self._progress.seen:
            return
        self.queue.end_call()
        kept = self.kept_tokens().cpu()
        for row, seen in enumerate(self._progress.seen):
            # An official rounding may be off by up to one token per head in every layer.
            promised = torch.tensor(self.budgets.promise(row, seen)) + (not self.policy.allocator.exact)
            heads = kept[:, row].float()
            most = heads.mean(-1) if self.policy.allocator.per_head else heads.amax(-1)
            self._audit_sums(row, most, promised)
            self._audit_positions(row, seen)

    def _audit_sums(self, row: int, most: Tensor, promised: Tensor) -> None:
        """Tokens per KV head [L] that are held, and those promised: all layers together, then each by itself."""
        if float(most.sum()) > int(promised.sum()):
            raise BudgetError(
                f"sequence {row} holds {float(most.sum()):g} tokens per KV head over its {len(most)} layers, "
                f"{self.policy.name} promised at most {int(promised.sum())}"
            )
        over = (most > promised).nonzero().flatten().tolist()
        if over:
            raise BudgetError(
                f"layer {over[0]} holds {float(most[over[0]]):g} tokens per KV head of sequence {row}, "
                f"{self.policy.name} promised at most {int(promised[over[0]])} there"
            )

    def _audit_positions(self, row: int, seen: int) -> None:
        for index, layer in enumerate(self.layers):
            positions = layer.positions[row].sort(-1).values
            twice = (positions[:, 1:] == positions[:, :-1]) & (positions[:, 1:] >= 0)
            if bool(twice.any()) or bool((positions >= seen).any()):
                raise BudgetError(f"layer {index} holds a token twice or one it never saw, in sequence {row}")
