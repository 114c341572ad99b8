"""OTT: KIVI's groups, with the tokens that would stretch them traced and kept exact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.kernels.quantised_attention import Outliers
from kvbench.policies.checks import choice, layers_exist, whole_number, whole_numbers
from kvbench.policies.contents import saved
from kvbench.policies.stores.codes import ChannelCodes, TokenCodes
from kvbench.policies.stores.column import Beyond, Column, most
from kvbench.policies.stores.dense import GROWTH, DenseStore
from kvbench.policies.stores.outliers import Pools, Tracing
from kvbench.policies.stores.quantised import QuantisedLayerStore, QuantisedStore, value_group
from kvbench.policies.stores.store import LayerStore


@saved
class OttStore(QuantisedLayerStore):
    """Keys and values become codes together, `group` tokens at a time; traced tokens' slots show the exact ones."""

    def __init__(
        self, dense: DenseStore, keys: Column, values: Column, tracing: Tracing, group: int, residual: int
    ) -> None:
        super().__init__(dense, keys, values)
        self._tracing, self._group = tracing, group
        self._rule = Beyond(residual, group)
        self.pools: Pools | None = None  # opened when the first group is quantised

    @property
    def keys(self) -> Tensor:
        return super().keys if self.pools is None else self.pools.cover(super().keys, self.pools.keys)

    @property
    def values(self) -> Tensor:
        return super().values if self.pools is None else self.pools.cover(super().values, self.pools.values)

    def parts(self) -> dict[str, int]:
        return {**super().parts(), "outlier pool": 0 if self.pools is None else self.pools.nbytes}

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.pools is None else self.pools.nbytes)

    def flush(self, prompt: bool) -> None:
        keys, values = self._columns
        counts = keys.due(self._rule)
        if most(counts) == 0:
            return
        if self._tracing.capacity == 0:
            keys.quantise(counts)
            values.quantise(counts)
            return
        new_keys, new_values = keys.oldest(counts), values.oldest(counts)
        if self.pools is None:
            self.pools = Pools(self._tracing, new_keys, new_values)
        coded = keys.coded_lengths()
        shown = self.pools.trace(
            new_keys, new_values, self._group, coded, counts if isinstance(counts, Tensor) else None
        )
        for column, (x, filled) in zip(self._columns, shown, strict=True):
            column.quantise(counts, x, filled=filled)

    @property
    def outliers(self) -> Outliers | None:
        return None if self.pools is None else Outliers(self.pools.keys, self.pools.values, self.pools.slots)

    def logits(self, rows: Tensor, ordered: bool = True) -> Tensor:
        logits = super().logits(rows)
        return logits if self.pools is None else self.pools.cover_logits(logits, rows)

    def mix(self, weights: Tensor, ordered: bool = True) -> Tensor:
        if self.pools is None:
            return super().mix(weights)
        weights, traced = self.pools.uncover(weights)
        return super().mix(weights) + traced


@dataclass(frozen=True)
class Ott(QuantisedStore):
    """KIVI's groups, flushed together every `group` tokens past a residual; tokens of small keys are kept out of them.

        s_j = sum_d |k_(j,d)|, "kept exactly: the" outliers "tokens of least" s

    At each flush the group's tokens compete with the pool of exact ones per KV head; the smallest keys win and the mean
    of the group stands in for them. The defeated stay exact in the auxiliary pool; when that would overflow, the head's
    pools freeze.

    group: tokens that become codes together. residual: newest tokens that are exact. outliers: size of the pool.
    auxiliary: size of the auxiliary pool. skip_layers: layers that trace nothing. norm: of the key, l1 or l2. trace:
    the smallest keys, the largest, or a random choice. fill: what stands in for a traced token, the mean of all tokens
    of its group or of the others (`inlier_mean`). prefill_mode: the prompt competes group by group, or once (`joint`).
    on_evict: the defeated stay exact in the auxiliary pool, or are discarded. pool_scope: every KV head has its own
    tokens, or all heads of a layer share them (scores summed). seed: of trace=random.
    Source: Su et al. 2025, arXiv 2505.10938, section 3.2 and appendix E.
    """

    slug_letters: ClassVar[Mapping[str, str]] = {
        "g": "group",
        "r": "residual",
        "n": "outliers",
        "skip": "skip_layers",
        "int": "bits",
    }

    group: int = 128
    residual: int = 32
    outliers: int = 3
    auxiliary: int = 32
    skip_layers: Sequence[int] = (0, 1)
    norm: Literal["l1", "l2"] = "l1"
    trace: Literal["smallest", "largest", "random"] = "smallest"
    fill: Literal["mean", "inlier_mean"] = "mean"
    prefill_mode: Literal["sequential", "joint"] = "sequential"
    on_evict: Literal["pool", "discard"] = "pool"
    pool_scope: Literal["head", "layer"] = "head"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_numbers("skip_layers", self.skip_layers, 0)
        object.__setattr__(self, "skip_layers", tuple(self.skip_layers))  # a YAML gives a list
        for name, least in (("group", 1), ("residual", 0), ("outliers", 0), ("auxiliary", 0), ("seed", 0)):
            whole_number(name, getattr(self, name), least)
        choice("norm", self.norm, "l1", "l2")
        choice("trace", self.trace, "smallest", "largest", "random")
        choice("fill", self.fill, "mean", "inlier_mean")
        choice("prefill_mode", self.prefill_mode, "sequential", "joint")
        choice("on_evict", self.on_evict, "pool", "discard")
        choice("pool_scope", self.pool_scope, "head", "layer")

    def check_layers(self, layers: int) -> None:
        layers_exist("skip_layers", self.skip_layers, layers)

    def for_layer(self, index: int) -> "Ott":
        return replace(self, outliers=0) if index in self.skip_layers else self

    @property
    def tracing(self) -> Tracing:
        return Tracing(
            capacity=self.outliers,
            auxiliary=self.auxiliary,
            norm=self.norm,
            trace=self.trace,
            fill=self.fill,
            on_evict=self.on_evict,
            scope=self.pool_scope,
            joint=self.prefill_mode == "joint",
            seed=self.seed,
        )

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        super().check_policy(name, evicts_in_decode, per_head)
        if self.pool_scope == "layer":
            raise ValueError(
                f"{name} keeps other tokens in every KV head, so heads cannot share traced ones: use pool_scope=head"
            )

    def check_shape(self, heads: int, dim: int) -> None:
        value_group(self.group, dim)

    def open(self, keys: Tensor, values: Tensor, statistics: tuple[str, ...], width: int) -> LayerStore:
        return OttStore(
            DenseStore(keys, values, statistics, width),
            Column(ChannelCodes(self.quantiser, self.group)),
            Column(TokenCodes(self.quantiser, value_group(self.group, values.shape[-1]), GROWTH)),
            self.tracing,
            self.group,
            self.residual,
        )
