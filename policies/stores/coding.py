"""What a codec says about its tokens, which are exact until the prompt is complete and evicted.

Shapes: B sequences (one), H KV heads, n tokens, D head dim, r query rows per KV head, C tokens of a layer.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvbench.kernels.code_formats import Format
from kvbench.kernels.group_formats import Form
from kvbench.policies.observation import Memory, Observation, State
from kvbench.policies.stores.code_attention import Outliers
from kvbench.policies.stores.store import Store


class Grouped(Protocol):
    """A layer of `kvbench.policies.stores.coded_layer`, for its codec."""

    used: int
    in_codes: list[int]
    notes: Memory
    prompt: int
    before: int

    @property
    def positions(self) -> Tensor: ...

    def exact_of(self, side: int) -> int: ...

    def oldest(self, side: int, tokens: int) -> Tensor: ...

    def codes_of(self, side: int) -> Mapping[str, Tensor]: ...

    def view(self, side: int) -> Tensor: ...

    def hold(self, side: int, tokens: int, codes: Mapping[str, Tensor], again: bool = False) -> None: ...


class Coding(Store):
    """A store of codes. Sides: 0 for keys, 1 for values.

    A prompt is exact until it is complete and evicted. From then on, every token is coded by itself at the end of its
    step, per KV head; other tokens keep their codes when one is evicted. (vLLM writes tokens before it attends, so that
    even a prompt's own queries read codes.) A codec that is `grouped` says with `due` how many of the exact tokens are
    coded at the end of a step. Codes are dequantised before attention: no kernel's 8-bit arithmetic is emulated.
    Positions are stored only after an eviction.
    """

    kinds: ClassVar[Mapping[str, str]] = {"codes": "codes"}
    """Name of a tensor: its kind in tables of bytes, by default "scales and minima"."""

    grouped: ClassVar[bool] = False
    """Whether tokens are coded together, so that no single one can be evicted from the codes."""

    def encode(self, x: Tensor, side: int) -> dict[str, Tensor]:
        """Codes of tokens x [B,H,n,D] in the model's dtype, by name; a codec with a `flush` of its own may have none.

        [B,H,n,...] if tokens are coded alone. Codes of groups that follow one another are [B,H,entries,...].
        """
        raise NotImplementedError(f"{type(self).__name__} codes tokens in `flush`")

    @abstractmethod
    def decode(self, codes: Mapping[str, Tensor], side: int, tokens: int, dim: int) -> Tensor:
        """The tokens of `encode` with D = `dim`, [B,H,n,D] or in m groups [B,H,m,n/m,D], in float32 (or float64)."""

    def due(self, side: int, exact: int) -> int:
        """How many of `exact` tokens to code at the end of a step, oldest first, if tokens are `grouped`."""
        return exact

    @property
    def reopens(self) -> bool:  # type: ignore[override]
        return not self.grouped

    def check_policy(self, name: str, evicts_in_decode: bool, per_head: bool) -> None:
        if evicts_in_decode and self.grouped:
            raise ValueError(
                f"{name} would evict single tokens while decoding, but its store holds tokens in a compressed form, "
                "from which no single token can be evicted: use decode=grow"
            )
        if per_head and self.apart:
            raise ValueError(f"{name} gives each KV head its own budget, {self.apart}")

    # --- tokens coded alone, with numbers of the layer -------------------------------------------------------------
    def fitted(self, keys: Tensor, values: Tensor, occupied: Tensor) -> "Coding":
        """The codec of one layer, given its prompt [B,H,n,D] and the slots with a token, bool [B,H,n]."""
        return self

    @property
    def fitted_tensors(self) -> Mapping[str, Tensor]:
        """Tensors of a fitted codec, which count as held: "keys KIND" and "values KIND"."""
        return {}

    # --- tokens coded alone: what more a kernel needs --------------------------------------------------------------
    @property
    def replayable(self) -> bool:  # type: ignore[override]
        return self.most_exact > 0 if self.grouped else self.format(0) is not None

    def format(self, side: int) -> Format | None:
        """The format of the codes, if the kernels for GPUs can read it."""
        return None

    def table(self, side: int, dim: int, device: torch.device) -> Tensor | None:
        """The numbers of codes of kind `table`, rising."""
        return None

    def scale(self, side: int) -> float | None:
        """A scale of all keys, or values, of the layer, stored in float32; None if there is none."""
        return None

    def limit(self, side: int) -> float | None:
        """The largest number that codes can hold, if no scale follows the numbers; larger ones are clipped."""
        return None

    def rotation(self, like: Tensor) -> Tensor | None:
        """The orthonormal matrix [D,D] by which vectors are multiplied before they are coded; None: the identity."""
        return None

    # --- tokens coded in groups: what differs from KIVI ------------------------------------------------------------
    statistics: ClassVar[tuple[str, ...]] = ()
    """Statistics of the prompt's tokens that the store itself keeps; `notes` has them once it is complete."""

    watches: ClassVar[bool] = False
    """Whether `observe` needs the queries of the prompt."""

    most_traced: ClassVar[int] = 0
    """Exact tokens that replace some of the codes, at most."""

    @property
    def most_exact(self) -> int:
        """Tokens with an exact key or value during a step, at most, if later codes extend earlier ones; 0: blocks."""
        return 0

    @property
    def apart(self) -> str:
        """Why all KV heads must hold equally many tokens; "" if they need not."""
        return ""

    def packed(self, side: int, dim: int) -> Form | None:
        """The form of codes that later ones extend."""
        return None

    def observe(self, notes: Memory, state: State, observation: Observation, prompt: int) -> None:
        """See a step of a prompt of `prompt` tokens before it evicts, if the codec `watches`.

        notes: of the layer, [1,H,...] by name. state: statistics of its tokens, which are changed in place.
        """

    def flush(self, held: Grouped, prompt: bool) -> None:
        """Code the tokens that are due at the end of a step; prompt: the first time, with the whole prompt exact."""
        for side in range(2):
            count = self.due(side, held.exact_of(side))
            if count:
                held.hold(side, count, self.encode(held.oldest(side, count), side))

    def traced(self, notes: Memory) -> Outliers | None:
        """Exact tokens that replace some of the codes."""
        return None

    def attended(self, held: Grouped, weights: Tensor, positions: Tensor) -> None:
        """See the attention weights [1,H,r,C] of queries at positions [1,M] while decoding."""
