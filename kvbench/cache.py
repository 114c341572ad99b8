"""The cache: one layer object per model layer, each holding what its policy keeps, and an audit of all of them.

Shapes: B batch, L layers, H_q query heads, H_kv KV heads, M new tokens, C slots, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.cache_utils import Cache

from kvbench.budgets import Budgets
from kvbench.layer import KVLayer
from kvbench.policies.allocators.allocator import StatisticAllocator
from kvbench.policies.policy import Policy
from kvbench.progress import Progress, Slice
from kvbench.together import Due, give_up


class BudgetError(RuntimeError):
    """The cache held more than its policy promised, or held it wrongly: the run would not measure what it claims."""


class KVCache(Cache):
    """A cache that holds what its policy keeps; pass it to `model.generate` or to the model itself.

    prompt_length: tokens of the prompt, one number or one per sequence; without it the first call is the whole prompt
    (schedule `prompt`), or every call of more than one token is a block (schedule `blocks`).
    Raises ValueError for a model that does not follow transformers' attention interface.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(
        self, config: PreTrainedConfig, policy: Policy, prompt_length: int | Sequence[int] | None = None
    ) -> None:
        self.config = config.get_text_config(decoder=True)
        check_interface(self.config)
        if policy.filter is not None:
            raise ValueError(f"{policy.name} rewrites the prompt before it is cached: use kvbench.generate.greedy")
        self.policy = policy
        self._prompt_length = prompt_length
        self._progress = Progress(policy, prompt_length)
        self._slices: list[Slice] = []
        self.waiting: list[Callable[[], None]] = []  # evictions after a decoded token, until the last layer is through
        self.due: list[Due] = []  # those of them that can be settled together
        self.budgets = Budgets(policy, self.config.num_hidden_layers, self._progress)
        self.shared: dict[str, Tensor] = {}
        self._surprisal: Tensor | None = None  # of the tokens of the next call
        self._surprisal_follows = False
        super().__init__(layers=[KVLayer(self, index) for index in range(self.config.num_hidden_layers)])
        self._bytes = [0] * len(self.layers)
        self._total_bytes = 0
        self.peak_nbytes = 0

    def reset(self) -> None:
        """Forget everything: the cache is as it was made."""
        self.__init__(self.config, self.policy, self._prompt_length)  # type: ignore[misc]

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
    def prompts(self) -> list[int | None]:
        """Prompt length of every sequence in tokens, None while unknown."""
        return self._progress.prompt

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def spare_nbytes(self) -> int:
        """Those of them in which no token lies: room for tokens to come, and slots of evicted ones."""
        return sum(layer.spare_nbytes for layer in self.layers)

    def expect(self, tokens: int) -> None:
        """The prompt is in, and no more than so many tokens follow it: no more room is made for them."""
        for layer in self.layers:
            layer.expect(tokens)

    def kept_tokens(self) -> Tensor:
        """[L,B,H_kv] tokens held."""
        return torch.stack([layer.kept_tokens() for layer in self.layers])

    def check_attention(self) -> None:
        if self.config._attn_implementation != "kvbench":
            raise ValueError(
                f"the model computes attention with {self.config._attn_implementation!r}, which cannot read a KVCache: "
                'call model.set_attn_implementation("kvbench") first'
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
            self._settle()  # of a model whose last layers hold no cache of their own
            if self.policy.needs_surprisal:
                self._take_surprisal()
            self._slices = self._progress.split(queries.shape[0], queries.shape[2], mask, queries.device)
        return self._slices

    @property
    def gives_up_together(self) -> bool:
        """Whether layers may leave the eviction of this call's decoded token to the last layer."""
        return len(self._slices) == 1 and self.policy.gives_up_together

    def layer_done(self, index: int) -> None:
        """Layer `index` is through with a call of a single step."""
        if index == len(self.layers) - 1:
            self._settle()

    def _settle(self) -> None:
        """Carry out the evictions that waited, side by side where that is possible."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        for evict in waiting:
            evict()
        due, self.due = self.due, []
        give_up(self.policy, due)

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
        for layer in self.layers:
            layer.surprised()
        del self.shared["surprisal"]

    def _take_surprisal(self) -> None:
        """ValueError if the tokens of a call come without what their scorer needs to know of them."""
        if self._surprisal is None and not self._surprisal_follows:
            raise ValueError(
                f"{self.policy.name} scores tokens by the model's own probabilities, which model.generate does not "
                "tell its cache: use kvbench.generate.greedy"
            )
        self.shared.pop("surprisal", None)
        if self._surprisal is not None:
            self.shared["surprisal"], self._surprisal = self._surprisal, None

    def allocate(self, index: int, rows: Sequence[bool], statistic: Tensor, prompt_done: bool) -> None:
        """Layer `index` has its prompt in and was measured: settle the shares as far as the allocator can.

        A cascading allocator brings all layers so far to their share at once; the others wait for the last layer.
        """
        allocator = self.policy.allocator
        assert isinstance(allocator, StatisticAllocator)
        self.budgets.measured(rows, statistic)
        last = index == len(self.layers) - 1
        if allocator.cascades or last:
            self.budgets.share(rows)
            for layer in self.layers[: index + 1]:
                layer.shrink_pending(rows)
        if last:
            for layer in self.layers:
                layer.allocated(prompt_done)

    def audit(self) -> None:
        """Raise BudgetError unless every layer holds at most what the policy promises, at valid positions.

        The promise: the layer's budget for every KV head, or for their mean where heads may get different shares;
        beside it, where decoding grows, the decoded tokens.
        """
        if not self.policy.evicts or not self._progress.seen:
            return
        self._settle()
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


def check_interface(config: PreTrainedConfig) -> None:
    """ValueError unless the model of this config follows transformers' attention interface."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None and not model_class._supports_attention_backend:
        raise ValueError(
            f"{model_class.__name__} does not follow transformers' attention interface (its attention is written into "
            "the model), so kvbench cannot hold its cache; use one that does, such as Llama, Mistral, Qwen or Gemma"
        )
