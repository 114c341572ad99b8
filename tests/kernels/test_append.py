"""One token of every KV head into flat storage: by hand, and the kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_interpreted import Interpreter
from torch import Tensor

from kvbench.kernels.append import append, append_ref, append_triton


def drawn(seed: int) -> dict[str, Any]:
    """A call of sizes that only the seed knows: any statistics, odd heads, strides as a model hands tokens over."""
    random = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    batch, heads, dim, wide = some(1, 3), some(1, 4), some(1, 130), some(1, 70)
    dtype = (torch.float32, torch.float16, torch.bfloat16)[some(0, 2)]
    room = torch.randint(1, 9, (batch, heads), generator=random)
    ends = room.flatten().cumsum(0).view_as(room)
    count, slots = int(ends.max()), (torch.rand(batch, heads, generator=random) * room).long()
    flat = {
        "keys": torch.randn(count, dim, generator=random).to(dtype),
        "values": torch.randn(count, wide, generator=random).to(dtype),
        "positions": torch.randint(-1, 99, (count,), generator=random, dtype=torch.int32),
        **{f"state {i}": torch.rand(count, some(1, 3), generator=random) for i in range(some(0, 6))},
    }
    tokens = {
        name: torch.randn(batch, 1, heads, x + 3, generator=random).to(dtype)[..., 2 : 2 + x].transpose(1, 2)
        for name, x in (("keys", dim), ("values", wide))
    }
    tokens["positions"] = torch.randint(99, (batch, 1, 1), generator=random).expand(-1, heads, -1)
    return {"flat": flat, "tokens": tokens, "starts": ends - room, "slots": slots}


def after(function: Any, **call: Any) -> dict[str, Tensor]:
    """The storage as a call leaves it."""
    function(**call)
    return dict(call["flat"])


def test_a_token_enters_each_head_at_its_own_slot() -> None:
    flat = {"keys": torch.zeros(5, 1), "positions": torch.full((5,), -1), "sums": torch.ones(5, 1)}
    tokens = {"keys": torch.tensor([[[[7.0]], [[8.0]]]]), "positions": torch.tensor([[[3], [3]]])}
    append(flat, tokens, torch.tensor([[0, 2]]), torch.tensor([[1, 2]]))
    assert flat["keys"].flatten().tolist() == [0, 7, 0, 0, 8]
    assert flat["positions"].tolist() == [-1, 3, -1, -1, 3]
    assert flat["sums"].flatten().tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("seed", range(2))
def test_the_kernel_writes_the_same_bits(seed: int, interpret: Interpreter) -> None:
    expected = after(append_ref, **drawn(seed))
    got = interpret(after, function=append_triton, **drawn(seed))
    assert all(torch.equal(got[name], x) for name, x in expected.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("seed", range(20, 60))
def test_a_cuda_device_writes_the_same_bits(seed: int) -> None:
    def there(x: Any) -> Any:
        return {name: y.cuda() for name, y in x.items()} if isinstance(x, dict) else x.cuda()

    expected = after(append_ref, **drawn(seed))
    got = after(append, **{name: there(x) for name, x in drawn(seed).items()})
    assert all(torch.equal(got[name].cpu(), x) for name, x in expected.items())
