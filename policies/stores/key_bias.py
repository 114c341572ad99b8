"""Codes of keys without the bias of the model's key projection.

Shapes: B batch, H KV heads, n tokens, D head dim.
"""

from collections.abc import Callable

from torch import Tensor

from kvbench.kernels.references import widen
from kvbench.policies.model_layer import ModelLayer
from kvbench.policies.observation import Observation
from kvbench.policies.stores.token_codes import TokenCodeLayer


class UnbiasedLayer(TokenCodeLayer):
    """Codes of k - R_p b for a key k at position p, with the rotation R_p and the bias b of the model's keys.

    R_p b is computed again whenever keys are read. The kernels for GPUs cannot do that, so that steps are not recorded.
    """

    _model: ModelLayer | None = None  # set by the first step

    @property
    def watching(self) -> bool:
        return self._model is None

    def observe(self, observation: Observation, prompt: int) -> None:
        self._model = observation.model

    @property
    def step_format(self) -> None:
        return None

    def _bias(self, positions: Tensor) -> Tensor:
        """R_p b at positions [B,H,n], of any value in empty slots: [B,H,n,D] float32."""
        assert self._model is not None, "the step of a prompt is observed"
        bias = widen(self._model.key_bias())
        bias = bias.repeat_interleave(positions.shape[1] // len(bias), dim=0)[None, :, None]
        places = positions[:, :1] if self._whole else positions  # equal in all heads
        return self._model.rotation(places.clamp(min=0).long()).apply(bias.expand(*positions.shape, -1))

    def _to_code(self, x: Tensor, side: int, positions: Tensor) -> Tensor:
        return x if side or x.is_meta else widen(x) - self._bias(positions)

    def _block(self, side: int) -> Callable[[slice], Tensor]:
        unbiased, positions = super()._block(side), self.positions

        def block(some: slice) -> Tensor:
            x, bias = unbiased(some), self._bias(positions[:, :, some])
            rotation = self.codec.rotation(bias)
            return x + (bias if rotation is None else bias @ rotation)[:, :, None]

        return unbiased if side else block
