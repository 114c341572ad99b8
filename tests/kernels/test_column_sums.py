"""Column sums in PyTorch: the reference by hand, the blocks against the reference."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels import softmax_blocks
from kvbench.kernels.column_sums import column_sums, column_sums_blocked, column_sums_ref

FLOAT32: dict[str, Any] = {
    "rtol": 1e-5,
    "atol": 1e-5,
}  # sums of up to a few hundred weights; a wrong term moves them by 1e-2


@pytest.mark.parametrize("path", [column_sums, column_sums_ref, column_sums_blocked])
def test_two_queries_by_hand(path: Any) -> None:
    got = path(
        queries=torch.tensor([[[[1.0], [1.0]]]]),
        keys=torch.tensor([[[[5.0], [5.0 + math.log(2.0)]]]]),
        query_positions=torch.tensor([[3, 4]]),
        key_positions=torch.tensor([[[3, 4]]]),
        scaling=1.0,
    )
    # the first query sees the first slot alone: 1, 0; the second both, at odds of 1 to 2: 1/3, 2/3
    torch.testing.assert_close(got, torch.tensor([[[[4 / 3, 2 / 3]]]]))


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_blocks_equal_the_reference_whatever_the_call(data: st.DataObject, seed: int) -> None:
    from_to = {"batch": (1, 3), "heads": (1, 3), "group": (1, 4), "new": (1, 60), "slots": (1, 70), "dim": (1, 33)}
    sizes = {size: data.draw(st.integers(*bounds), label=size) for size, bounds in from_to.items()}
    random = torch.Generator().manual_seed(seed)
    call = {
        "queries": torch.randn(
            sizes["batch"], sizes["heads"] * sizes["group"], sizes["new"], sizes["dim"], generator=random
        ),
        "keys": torch.randn(sizes["batch"], sizes["heads"], sizes["slots"], sizes["dim"], generator=random),
        "query_positions": torch.randint(-1, 90, (sizes["batch"], sizes["new"]), generator=random),
        "key_positions": torch.randint(-1, 90, (sizes["batch"], sizes["heads"], sizes["slots"]), generator=random),
        "scaling": data.draw(st.floats(0.05, 3.0), label="scaling"),
        "softcap": data.draw(st.none() | st.floats(0.5, 50.0), label="softcap"),
        "sliding_window": data.draw(st.none() | st.integers(1, 90), label="sliding_window"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_blocks, "LOGITS_AT_ONCE", data.draw(st.sampled_from([1, 2**12, 2**21]), label="at once"))
        torch.testing.assert_close(column_sums_blocked(**call), column_sums_ref(**call), **FLOAT32)


def test_the_module_can_be_imported_where_triton_cannot() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kvbench.kernels.column_sums import column_sums\n"
        "x = torch.zeros(1, 1, 9, 4); at = torch.arange(9)[None]\n"
        "print(column_sums(x, x, at, at[None], 1.0)[0, 0, 0, -1].item() * 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1.0)  # the last slot draws 1/9 of the last query


@settings(max_examples=40)
@given(
    new=st.integers(9, 40),
    before=st.integers(0, 20),
    loudness=st.sampled_from([0.01, 1.0, 30.0, 1e4]),
    softcap=st.sampled_from([None, 5.0, 300.0]),
    seed=st.integers(0, 2**16),
)
def test_slots_in_order_give_what_shuffled_ones_give_at_any_size_of_logits(
    new: int, before: int, loudness: float, softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    slots = before + new
    queries, keys = torch.randn(2, 4, new, 3) * loudness, torch.randn(2, 2, slots, 3)
    asked, stored = torch.arange(before, slots).expand(2, -1), torch.arange(slots).expand(2, 2, -1)
    order = torch.randperm(slots)
    straight = column_sums_blocked(queries, keys, asked, stored, 1.0, softcap)
    shuffled = column_sums_blocked(queries, keys[:, :, order], asked, stored[:, :, order], 1.0, softcap)
    exact = column_sums_ref(queries.double(), keys.double(), asked, stored, 1.0, softcap)
    torch.testing.assert_close(straight[..., order], shuffled, **FLOAT32)
    if loudness <= 30:  # beyond, single precision itself cannot tell close logits apart
        torch.testing.assert_close(straight.double(), exact, rtol=1e-3, atol=1e-3)
