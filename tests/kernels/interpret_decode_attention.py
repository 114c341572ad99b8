"""Run the Triton path of decode attention on the CPU: `TRITON_INTERPRET=1 python interpret_... calls.pt got.pt seed n`.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported. Beside the calls of the file it draws
n calls itself, and holds their results against the reference.
"""

import sys
from typing import Any

import torch
from decode_cases import DecodeCase
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.decode_attention import decode_attention_ref, decode_attention_triton
from kvbench.kernels.decode_attention_flat import decode_attention_flat_ref, decode_attention_flat_triton

new_empty = Tensor.new_empty
largest = 0  # numbers in a tensor that a kernel's launcher made


def poisoned(x: Tensor, *shape: Any, **how: Any) -> Tensor:
    """What a kernel forgets to write is not a number."""
    global largest
    fresh = new_empty(x, *shape, **how)
    largest = max(largest, fresh.numel())
    return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh


def run(call: dict[str, Any]) -> dict[str, Tensor | None]:
    """Every result of a call, by name; the sums are those that were handed in."""
    global largest
    largest = 0
    call = {name: x.clone() if name == "sums" and x is not None else x for name, x in call.items()}
    function = decode_attention_flat_triton if "starts" in call else decode_attention_triton
    return {**function(**call)._asdict(), "sums": call.get("sums"), "largest": torch.tensor(largest)}


def expected(call: dict[str, Any]) -> dict[str, Tensor | None]:
    call = {name: x.clone() if name == "sums" and x is not None else x for name, x in call.items() if name != "splits"}
    function = decode_attention_flat_ref if "starts" in call else decode_attention_ref
    return {**function(**call)._asdict(), "sums": call.get("sums")}


@given(data=st.data())
def whatever_the_call(data: st.DataObject) -> None:
    slots = data.draw(st.integers(0, 50))
    group = data.draw(st.integers(1, 8))
    case = DecodeCase(
        batch=data.draw(st.integers(1, 2)),
        heads=data.draw(st.integers(1, 2)),
        group=group,
        new=data.draw(st.integers(1, 4)),
        slots=slots,
        dim=data.draw(st.integers(1, 40)),
        value_dim=data.draw(st.integers(1, 40)),
        softcap=data.draw(st.none() | st.floats(0.5, 30.0)),
        sliding_window=data.draw(st.none() | st.integers(1, 80)),
        sinks=data.draw(st.booleans()),
        empty=data.draw(st.integers(0, slots)),
        padded=data.draw(st.booleans()),
        weights=data.draw(st.booleans()),
        sums=data.draw(st.sampled_from([0, 1, group])),
        splits=data.draw(st.none() | st.integers(1, 5)),
        flat=data.draw(st.booleans()),
    )
    call = case.draw(data.draw(st.integers(0, 2**16)))
    got = run(call)
    for name, value in expected(call).items():
        if value is not None:
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    Tensor.new_empty = poisoned  # type: ignore[method-assign, assignment]
    torch.save({name: run(call) for name, call in torch.load(sys.argv[1]).items()}, sys.argv[2])
    many = settings(
        max_examples=int(sys.argv[4]), deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    many(seed(int(sys.argv[3]))(whatever_the_call))()
