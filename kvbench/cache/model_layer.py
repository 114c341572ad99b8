"""A layer of the model, for parts that need it: its rotation of queries and keys, and its output projection.

Attention is handed its module alone, which knows the configuration but not the model. So the rotary embedding is made
anew from both, by the class the model's own code has for it, and is tried on the module: two random tokens go through
its projections with and without a rotation. Families differ in which numbers of a head are pairs, and some layers of a
family do not rotate at all; the trial finds out, and what it cannot explain is refused. A model that was cast after it
was loaded (`model.half()` casts its frequencies too) rotates otherwise than its configuration says, which nothing here
can see: load it in the dtype it is to have.

Shapes: B batch, H heads, n tokens, R rotated numbers of a head.
"""

import sys
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from kvbench.cache.hook import LayerCall
from kvbench.cache.interface import InterfaceError
from kvbench.cache.layout import layout_of
from kvbench.policies.model_layer import Rotation
from kvbench.policies.observation import AttentionParams

PROJECTIONS = ("o_proj", "out_proj", "dense")
PLACES = (1, 3)  # positions of the tokens of the trial

_LAYERS: WeakKeyDictionary[nn.Module, "ReadLayer"] = WeakKeyDictionary()


class Pairs(NamedTuple):
    """Which numbers of cos and sin, as the model's embedding gives them, rotate a head's pairs, and which are pairs."""

    numbers: slice
    interleaved: bool


def model_layer(reader: nn.Module, like: Tensor) -> "ReadLayer":
    """The layer of an attention module; like: a tensor of the dtype and on the device of its queries."""
    known = _LAYERS.get(reader)
    if known is None or not known.is_like(like):
        known = _LAYERS[reader] = ReadLayer(reader, like)
    return known


class ReadLayer:
    """What an attention module, which it does not keep alive, does beside attention."""

    def __init__(self, reader: nn.Module, like: Tensor) -> None:
        self._reader = ref(reader)
        self._like = like.new_empty(0)
        self._uniform = layout_of(self._module().config).uniform_length
        self._rotary: nn.Module | None = None
        self._pairs: Pairs | None = None

    def is_like(self, other: Tensor) -> bool:
        """Whether the model still computes in this dtype and on this device."""
        return (self._like.dtype, self._like.device) == (other.dtype, other.device)

    def rotation(self, positions: Tensor) -> Rotation:
        """The layer's rotation at positions [B,H,n]. Raises InterfaceError if it cannot be determined."""
        if self._rotary is None:
            rotary = self._made()
            try:
                self._pairs = self._tried(rotary)
            except InterfaceError:
                raise
            except Exception as error:  # whatever a module's own code makes of a trial apart from its model
                raise self._refused(f"cannot be tried apart from its model ({error})") from error
            self._rotary = rotary
        if self._pairs is None:  # the layer does not rotate
            none = self._like.new_zeros(*positions.shape, 0)
            return Rotation(none, none)
        if self._uniform is not None and positions.numel() and int(positions.max()) >= self._uniform:
            raise self._refused(f"rotates calls beyond {self._uniform} tokens by their length")
        cos, sin = self._cos_sin(self._rotary, positions.flatten(1))
        numbers, interleaved = self._pairs
        cos, sin = (x[..., numbers].unflatten(1, positions.shape[1:]) for x in (cos, sin))
        return Rotation(cos, sin, interleaved)

    def output_projection(self) -> Tensor:
        """[H_q,D,hidden]. Raises InterfaceError for a layer whose projection is no plain matrix."""
        reader = self._module()
        heads, hidden = reader.config.num_attention_heads, reader.config.hidden_size
        weights = [getattr(getattr(reader, name, None), "weight", None) for name in PROJECTIONS]
        for weight in weights:
            if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
                continue
            if weight.dim() == 2 and weight.shape[0] == hidden and weight.shape[1] % heads == 0:
                found: Tensor = weight.detach().T.unflatten(0, (heads, -1))
                return found
        raise self._refused(f"has no output projection ({', '.join(PROJECTIONS)}) that is a plain matrix at hand")

    # --- how it rotates --------------------------------------------------------------------------------------------
    def _made(self) -> nn.Module:
        """The rotary embedding of the model's code, for this configuration."""
        reader = self._module()
        kind, known = type(reader), {"self", "x", "position_ids", "layer_type"}
        family, code = kind.__name__.removesuffix("Attention"), sys.modules[kind.__module__]
        rotary = getattr(code, f"{family}RotaryEmbedding", None) or getattr(code, f"{family}TextRotaryEmbedding", None)
        if rotary is None or not signature(rotary.forward).parameters.keys() <= known:
            raise self._refused("has no rotary embedding that kvbench knows")
        made: nn.Module = rotary(config=reader.config).to(self._like.device)
        return made

    def _cos_sin(self, rotary: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own cos and sin at positions [B,n]."""
        more = {}
        if "layer_type" in signature(rotary.forward).parameters:
            reader = self._module()
            more["layer_type"] = reader.config.layer_types[reader.layer_idx]
        cos, sin = rotary(self._like, positions, **more)
        return cos, sin

    @torch.no_grad()
    def _tried(self, rotary: nn.Module) -> Pairs | None:
        """Which pairs explain what the layer does to two random tokens; None: it does nothing to them."""
        reader, like = self._module(), self._like
        drawn = torch.randn(1, 2, reader.config.hidden_size, generator=torch.Generator().manual_seed(0))
        dtype = next((weight.dtype for weight in reader.parameters() if weight.is_floating_point()), like.dtype)
        tokens = drawn.to(like.device, dtype)
        cos, sin = self._cos_sin(rotary, torch.tensor([PLACES], device=like.device))
        plain = self._projected(tokens, torch.ones_like(cos), torch.zeros_like(sin))
        rotated = self._projected(tokens, cos, sin)
        if all(_same(x, y) for x, y in zip(plain, rotated, strict=True)):
            return None
        half = cos.shape[-1] // 2
        for numbers in (slice(0, half), slice(0, None, 2), slice(None)):
            for interleaved in (False, True):
                found = Rotation(cos[:, None, :, numbers], sin[:, None, :, numbers], interleaved)
                fits = 2 * found.cos.shape[-1] <= plain[0].shape[-1]
                if fits and all(_same(found.apply(x), y) for x, y in zip(plain, rotated, strict=True)):
                    return Pairs(numbers, interleaved)
        raise self._refused("rotates queries and keys in a way that kvbench does not know")

    def _projected(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [1,H_q,2,D] and keys [1,H_kv,2,D] that the module hands to its attention with these cos and sin."""
        reader, taken = self._module(), _Taken()
        takes = signature(type(reader).forward).parameters
        if "position_embeddings" not in takes:
            raise self._refused("is not handed a rotary embedding")
        given = {"hidden_states": tokens, "position_embeddings": (cos, sin), "attention_mask": None}
        if "position_ids" in takes:  # Mistral 3 sharpens its queries by their place
            given["position_ids"] = torch.tensor([PLACES], device=tokens.device)
        reader.forward(**given, **{"layer_past" if "layer_past" in takes else "past_key_values": taken})
        return taken.queries, taken.keys

    def _module(self) -> Any:  # noqa: ANN401 - a module's attributes have no type
        reader = self._reader()
        assert reader is not None, "the model is gone, and its cache asks for it"
        return reader

    def _refused(self, why: str) -> InterfaceError:
        return InterfaceError(
            f"{type(self._module()).__name__} {why}, and the policy reads it: use another policy, such as snapkv, or "
            "a model such as Llama, Qwen3 or Mistral"
        )


class _Taken:
    """In place of a cache and of attention: takes what a module's projections give."""

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[LayerCall, LayerCall]:
        self.keys, self._values = keys, values
        call = LayerCall(0, self._attend)
        return call, call

    def _attend(self, reader: nn.Module, queries: Tensor, mask: Tensor | None, how: AttentionParams) -> Tensor:
        self.queries = queries
        return self._values.new_zeros(*queries.shape[:3], self._values.shape[-1])


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal but for the rounding of the model's dtype."""
    within = 16 * torch.finfo(y.dtype).eps * float(y.abs().max())
    return bool((x.to(torch.float64) - y.to(torch.float64)).abs().max() <= within)
