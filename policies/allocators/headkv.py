"""HeadKV: static budgets per head from measured head importance.

Shapes: B batch, L layers, H_q query heads, H KV heads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import ConfigError, counted
from kvbench.policies.allocators.allocator import Allocator, check_equal_heads, required_length
from kvbench.policies.allocators.rounding import largest_remainders
from kvbench.policies.checks import number
from kvbench.policies.constants import on_device
from kvbench.policies.describe import FILE
from kvbench.policies.ranking import Ranking


def read_importance(path: str) -> Tensor:
    """Importance of every query head, [L,H_q]: the mean of the scores under `"layer-head"`; negative scores count as 0.

    The file is JSON: {"0-0": [0.1, ...], "0-1": ..., ...}, one entry for every head (a single number is accepted too).
    Raises ValueError for an invalid file.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError("importance", path, why="is not a file")
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        heads = {tuple(int(part) for part in name.split("-")): value for name, value in entries.items()}
        means = {k: (sum(v) / len(v) if isinstance(v, list) else float(v)) for k, v in heads.items()}
        layers, width = (max(k[axis] for k in means) + 1 for axis in (0, 1))
    except OSError as error:
        raise ConfigError("importance", path, why=f"cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, TypeError, ZeroDivisionError, IndexError, RecursionError) as error:
        raise ConfigError("importance", path, why='must be JSON of the form {"layer-head": [scores], ...}') from error
    if len(means) != layers * width:
        raise ConfigError(
            "importance", path, why=f"has {len(means)} entries, but {layers} layers x {width} heads need one each"
        )
    table = torch.tensor([[means[layer, head] for head in range(width)] for layer in range(layers)])
    if not 0 < float(table.clamp(min=0).sum()) < inf:
        raise ConfigError("importance", path, why="must have at least one positive score and only finite scores")
    return table.clamp(min=0).double()


@dataclass(frozen=True)
class HeadKV(Allocator):
    """An even floor per head plus a shared pool that is distributed in proportion to head importance.

        b_h = base - m + s_h / (sum_i s_i) * m * L * H, m = floor(base / beta)

    m of each head's base slots (the budget without protected tokens) go into the pool of all L * H heads; the rest is
    its floor. Totals are exact: largest remainders over the layers, then over the heads of a layer (the released code
    rounds each head separately).

    importance: a JSON file of scores per head, see `read_importance`; the scores of a group's query heads are averaged.
    beta: a larger value makes the pool smaller. temperature: above 1 sharpens the shares, below 1 flattens them.
    Source: Fu et al. 2024, arXiv 2410.19258, section 3.2, and its code.
    """

    per_head: ClassVar[bool] = True

    importance: str = field(default="", metadata={"decides": FILE})
    beta: float = 1.005
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 1 < self.beta < inf:
            raise ConfigError("beta", self.beta, "above 1")
        number("temperature", self.temperature, 0)
        if not self.importance:
            raise ConfigError(
                "importance",
                "",
                why="must be the path of a JSON file with scores per head, such as /path/to/scores.json with "
                "{'layer-head': [scores], ...}",
            )
        _ = self._shares  # read at construction: the file may change later

    @cached_property
    def _shares(self) -> Tensor:
        """[L,H_q] shares of the pool, summing to 1."""
        scores = read_importance(self.importance) ** self.temperature
        return scores / scores.sum()

    def check_heads(self, heads: Sequence[int]) -> None:
        check_equal_heads(heads)

    def split(self, total: int, layers: int, length: int | None, floor: int) -> list[int]:
        if layers != self._shares.shape[0]:
            raise ConfigError(
                "importance", self.importance, why=f"has {counted(len(self._shares), 'layer')}, the model has {layers}"
            )
        length = required_length(length, "headkv")
        base = total / layers - floor
        pool = base // self.beta
        targets = self._shares.sum(-1) * pool * layers + (base - pool)
        caps = torch.full((1, layers), max(length, -(-total // layers)) - floor)
        slots = largest_remainders(targets[None], torch.tensor([total - floor * layers]), caps)
        return [int(n) + floor for n in slots[0]]

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor:
        heads = ranking.scores.shape[1]
        if self._shares.shape[1] % heads:
            raise ConfigError(
                "importance",
                self.importance,
                why=f"has {self._shares.shape[1]} heads per layer, which is no multiple of {heads}",
            )
        shares = self._shares[layer].view(heads, -1).sum(-1).to(ranking.scores.device)
        fixed = ranking.protected.sum(-1)
        base = (on_device(tuple(budgets), ranking.seen.device)[:, None] - fixed).clamp(min=0)
        pool = (base / self.beta).floor().double()
        targets = shares * pool * self._shares.shape[0] * heads + (base - pool)
        totals = base.sum(-1)
        targets = targets * (totals / targets.sum(-1).clamp(min=1e-9))[:, None]
        candidates = (ranking.occupied & ~ranking.protected).sum(-1)
        return fixed + largest_remainders(targets, totals, candidates)
