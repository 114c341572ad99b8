"""The rotation and the output projection of a layer of the model, for parts of policies that need them.

An attention module knows the configuration but not the model, so the rotary embedding is created from the class in the
model's code. Families differ in which channels of a head are pairs, and some layers do not rotate. A trial determines
this: the module projects two random tokens with and without a rotation. InterfaceError if no known rotation explains
the result. A model that was cast after loading (`model.half()` also casts frequencies) rotates differently, which is
not detected: load it in its final dtype.

Shapes: B batch, H heads, n tokens, D head dim.
"""

from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from kvbench.cache.calls import Columns
from kvbench.cache.families import OUTPUTS, InterfaceError, layout_of, rotary_arguments, rotary_of
from kvbench.cache.hook import LayerCall
from kvbench.policies.model_layer import Rotation
from kvbench.policies.observation import AttentionParams

POSITIONS = (1, 3)  # of the tokens of the trial
OTHERS = "another policy, such as snapkv, or a model such as Llama, Qwen3 or Mistral"

_LAYERS: WeakKeyDictionary[nn.Module, "RealLayer"] = WeakKeyDictionary()


def model_layer(module: nn.Module, like: Tensor) -> "RealLayer":
    """The layer of an attention module. like: a tensor with the dtype and device of its queries."""
    known = _LAYERS.get(module)
    if known is None or (known.like.dtype, known.like.device) != (like.dtype, like.device):
        known = _LAYERS[module] = RealLayer(module, like.new_empty(0))
    return known


class RealLayer:
    """The rotation and the output projection of an attention module, which it does not keep alive."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        self.like = like
        self._ref = ref(module)
        self._uniform = layout_of(self._module.config).uniform_length
        self._rotary: nn.Module | None = None
        self._pairs: tuple[slice, bool] | None = None  # see `_try_out`
        self._key_bias: Tensor | None = None

    @property
    def _module(self) -> Any:  # noqa: ANN401 - a module's attributes have no type
        module = self._ref()
        assert module is not None, "the model was deleted"
        return module

    def _loaded_rotary(self) -> nn.Module:
        """The rotary embedding, after a trial of the module. Raises InterfaceError if none explains its result."""
        if self._rotary is None:
            rotary = rotary_of(self._module)
            if rotary is None:
                raise self._error("has no rotary embedding that kvbench knows")
            rotary = rotary.to(self.like.device)
            try:
                self._pairs = self._try_out(rotary)
            except InterfaceError:
                raise
            except Exception as error:  # any error of a module that is called outside of its model
                raise self._error(f"cannot be called outside of its model ({error})") from error
            self._rotary = rotary
        return self._rotary

    def rotation(self, positions: Tensor) -> Rotation:
        """The layer's rotation at positions [B,H,n]. Raises InterfaceError if it cannot be determined."""
        rotary = self._loaded_rotary()
        if self._pairs is None:
            none = self.like.new_zeros(*positions.shape, 0)
            return Rotation(none, none)
        if self._uniform is not None and positions.numel() and int(positions.max()) >= self._uniform:
            raise self._error(f"rotates calls beyond {self._uniform} tokens by their length")
        channels, interleaved = self._pairs
        cos, sin = self._cos_sin(rotary, positions.flatten(1))
        cos, sin = (x[..., channels].unflatten(1, positions.shape[1:]) for x in (cos, sin))
        return Rotation(cos, sin, interleaved)

    @torch.no_grad()
    def key_bias(self) -> Tensor:
        """The key, before the rotation, of a hidden state of 0: [H_kv,D]. Raises InterfaceError if it is 0."""
        if self._key_bias is None:
            positions = torch.tensor([[0]], device=self.like.device)
            cos, sin = self._cos_sin(self._loaded_rotary(), positions)
            state = torch.zeros(1, 1, self._module.config.hidden_size, dtype=self._dtype, device=self.like.device)
            _, keys = self._projected(state, positions, torch.ones_like(cos), torch.zeros_like(sin))
            if not bool(keys.any()):
                raise self._error("has keys without a bias", "unbias_keys=false, or a model such as Qwen2")
            self._key_bias = keys[0, :, 0].clone()
        return self._key_bias

    def output_projection(self) -> Tensor:
        """[H_q,D,hidden]. Raises InterfaceError unless the projection is a plain matrix."""
        module = self._module
        heads, hidden = module.config.num_attention_heads, module.config.hidden_size
        for name in OUTPUTS:
            weight = getattr(getattr(module, name, None), "weight", None)
            if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
                continue
            if weight.dim() == 2 and weight.shape[0] == hidden and weight.shape[1] % heads == 0:
                found: Tensor = weight.detach().T.unflatten(0, (heads, -1))
                return found
        raise self._error(f"has no output projection ({', '.join(OUTPUTS)}) that is a plain matrix")

    def _cos_sin(self, rotary: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own cos and sin at positions [B,n]."""
        cos, sin = rotary(self.like, positions, **rotary_arguments(rotary, self._module))
        return cos, sin

    @property
    def _dtype(self) -> torch.dtype:
        weights = (weight for weight in self._module.parameters() if weight.is_floating_point())
        return next((weight.dtype for weight in weights), self.like.dtype)

    @torch.no_grad()
    def _try_out(self, rotary: nn.Module) -> tuple[slice, bool] | None:
        """The channels of cos and sin that rotate, and whether pairs are neighbours; None without a rotation."""
        module, like = self._module, self.like
        drawn = torch.randn(1, 2, module.config.hidden_size, generator=torch.Generator().manual_seed(0))
        tokens, positions = drawn.to(like.device, self._dtype), torch.tensor([POSITIONS], device=like.device)
        cos, sin = self._cos_sin(rotary, positions)
        plain = self._projected(tokens, positions, torch.ones_like(cos), torch.zeros_like(sin))
        rotated = self._projected(tokens, positions, cos, sin)
        if all(map(_equal, plain, rotated)):
            return None
        half = cos.shape[-1] // 2
        for channels in (slice(0, half), slice(0, None, 2), slice(None)):
            for interleaved in (False, True):
                found = Rotation(cos[:, None, :, channels], sin[:, None, :, channels], interleaved)
                fits = 2 * found.cos.shape[-1] <= plain[0].shape[-1]
                if fits and all(map(_equal, map(found.apply, plain), rotated)):
                    return channels, interleaved
        raise self._error("rotates queries and keys in an unknown way")

    def _projected(self, tokens: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [1,H_q,2,D] and keys [1,H_kv,2,D] that the module computes with these cos and sin."""
        parameters, cache = signature(type(self._module).forward).parameters, _Capture()
        if "position_embeddings" not in parameters:
            raise self._error("does not receive a rotary embedding")
        given = {"hidden_states": tokens, "position_embeddings": (cos, sin), "attention_mask": None}
        if "position_ids" in parameters:  # Mistral 3 scales queries by position
            given["position_ids"] = positions
        given["layer_past" if "layer_past" in parameters else "past_key_values"] = cache
        self._module.forward(**given)
        return cache.queries, cache.keys

    def _error(self, why: str, instead: str = OTHERS) -> InterfaceError:
        return InterfaceError(f"{type(self._module).__name__} {why}, and the policy needs it: use {instead}")


class _Capture:
    """A cache that records the keys and queries of one call, and returns zeros as attention."""

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[LayerCall, LayerCall]:
        self.keys = keys
        call = LayerCall(self, 0, keys, values)
        return call, call

    def attend(
        self, call: LayerCall, module: nn.Module, queries: Tensor, columns: Columns, params: AttentionParams
    ) -> Tensor:
        self.queries, values = queries, call.new_values
        return values.new_zeros(*queries.shape[:3], values.shape[-1])


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether tensors are equal up to rounding."""
    within = 16 * torch.finfo(y.dtype).eps * float(y.abs().max())
    return bool((x.to(torch.float64) - y.to(torch.float64)).abs().max() <= within)
