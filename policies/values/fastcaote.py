"""FastCAOTE: CAOTE measured from the plain mean of the values."""

from dataclasses import dataclass

from torch import Tensor

from kvbench.policies.values.caote import Caote


@dataclass(frozen=True)
class FastCaote(Caote):
    """CAOTE with the unweighted mean of all stored values instead of the attention output.

        c_j = alpha_j / (1 - alpha_j) * ||bar(v) - v_j||_2
        alpha_j = s_j / (sum_i s_i), bar(v) = 1 / n sum_i v_i

    alpha is the normalised score, as in CAOTE; protected tokens are included. Source: Goel et al. 2025, arXiv
    2504.14051, eq. 23.
    """

    def centre(self, alpha: Tensor, values: Tensor, counted: Tensor | None) -> Tensor:
        number = values.shape[2] if counted is None else counted.sum(-1, keepdim=True).clamp(min=1)
        mean = values.sum(-2) / number
        return mean[:, :, None].expand(-1, -1, alpha.shape[2], -1)
