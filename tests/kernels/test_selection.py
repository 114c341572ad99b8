"""The kernel that selects slots keeps those that sorting keeps, for ties, NaN, infinities and empty slots."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from kernel_interpreted import Interpreter

from kvbench.kernels import selection
from kvbench.kernels.selection import kept_slots


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | int, bool]:
    """Scores with ties, base scores, positions, protected slots, how many to keep, and whether slots are in order."""
    random = torch.Generator().manual_seed(seed)
    batch, heads, slots = 1 + seed % 2, 1 + seed % 3, int(torch.randint(1, 150, (), generator=random))

    def drawn(most: int) -> torch.Tensor:
        return torch.randint(most, (batch, heads, slots), generator=random)

    scores, special, in_order = drawn(5).float(), drawn(20), seed % 4 == 0
    for index, number in enumerate((torch.nan, torch.inf, -torch.inf)):
        scores[special == index] = number
    tie_break = drawn(4).float() if seed % 3 else None
    positions = drawn(200).int()  # some are equal
    positions[special == 4] = -1
    if in_order:
        positions = torch.arange(slots).expand(batch, heads, -1)
    keep = drawn(slots + 1)[..., 0] if seed % 2 else int(drawn(slots + 1)[0, 0, 0])
    return scores, tie_break, positions, (special == 5) & (positions >= 0), keep, in_order


def kept(seed: int, device: str = "cpu") -> torch.Tensor:
    *keys, _ = case(seed)
    return kept_slots(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in keys)).cpu()


def by_sorting(seed: int) -> torch.Tensor:
    *keys, in_order = case(seed)
    with patch.object(selection, "use_triton", lambda x: False):
        return selection.select(*keys, in_order, in_order)


def test_interpreted_selection_equals_sorting(interpret: Interpreter) -> None:
    for seed in range(4):
        assert torch.equal(interpret(kept, seed=seed), by_sorting(seed)), seed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_compiled_selection_equals_sorting() -> None:
    for seed in range(60):
        assert torch.equal(kept(seed, "cuda"), by_sorting(seed)), seed
