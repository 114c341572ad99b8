"""Compiles the Triton kernels for NVIDIA GPUs without one: `python tests/support/kernel_compiled.py [CAPABILITY]`.

Every launch of a kernel becomes a compilation for the given compute capability (80, 90), with the Triton that Python
imports. Prints one JSON object: the version, and for each launch its error, or its bytes of shared memory and of
spilled registers, by name. With `--all` also the shapes that few models have.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvbench.kernels import decode, query_sums
from kvbench.kernels.devices import LITTLE
from kvbench.kernels.group_codes import Ring
from kvbench.kernels.references import NewTokens
from kvbench.kernels.selection import kept_slots
from kvbench.policies.observation import AttentionParams
from kvbench.policies.stores.codec import Codec
from kvbench.policies.stores.coding import Coding
from kvbench.policies.stores.group_step import form_of, group_step
from kvbench.policies.stores.kivi import Kcvc, Kivi
from kvbench.policies.stores.ott import Ott
from kvbench.policies.stores.per_token import Fp8, Fp8PerTokenHead, Int4, Int8, Nvfp4
from kvbench.policies.stores.token_codes import decode_step, encoded
from kvbench.policies.stores.turboquant import TurboQuant

H_KV, G, T = 2, 4, 256
BF16, FLOAT = torch.bfloat16, torch.float32
CODES = Fp8(), Int4(), TurboQuant()
ALL_CODES = (
    *(*CODES, Int8(), Nvfp4(), Fp8PerTokenHead(), Int8(official=True), Int4(rotate=False)),
    *(TurboQuant(3), TurboQuant(8)),
)

GROUPS = Kivi(), Kcvc()
ALL_GROUPS = *GROUPS, Kivi(bits=4), Kivi(bits=8), Kivi(group=32, residual=32), Kcvc(bits=4), Ott(), Ott(bits=8)


class Driver:
    """Names a GPU for Triton's compiler."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def decoding(dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Arguments of a decoded token over the slots of a dense store."""
    return {
        "queries": drawn(1, H_KV * G, 1, dim, dtype=dtype),
        "keys": drawn(1, H_KV, T, dim, dtype=dtype),
        "values": drawn(1, H_KV, T, dim, dtype=dtype),
        "query_positions": torch.zeros(1, 1, dtype=torch.int64),
        "key_positions": torch.zeros(1, H_KV, T, dtype=torch.int32),
        "scaling": dim**-0.5,
    }


def segments(dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Arguments of a decoded token over flat segments."""
    return {
        "queries": drawn(1, H_KV * G, 1, dim, dtype=dtype),
        "keys": drawn(H_KV * T, dim, dtype=dtype),
        "values": drawn(H_KV * T, dim, dtype=dtype),
        "query_positions": torch.zeros(1, 1, dtype=torch.int64),
        "key_positions": torch.zeros(H_KV * T, dtype=torch.int32),
        "starts": torch.zeros(1, H_KV, dtype=torch.int64),
        "counts": torch.full((1, H_KV), T),
        "most": T,
        "scaling": dim**-0.5,
    }


def sums(dtype: torch.dtype, dim: int, queries: int) -> dict[str, Any]:
    """Arguments of a statistic over the last queries of a prompt."""
    return {
        "queries": drawn(1, H_KV * G, queries, dim, dtype=dtype),
        "keys": drawn(1, H_KV, T, dim, dtype=dtype),
        "query_positions": torch.zeros(1, queries, dtype=torch.int64),
        "key_positions": torch.zeros(1, H_KV, T, dtype=torch.int64),
        "scaling": dim**-0.5,
        "log_sum_exp": torch.zeros(1, H_KV * G, queries),
    }


def decode_codes(store: Codec, dtype: torch.dtype, dim: int) -> None:
    """A decoding step over tokens in codes, with and without positions, a soft cap and a sliding window."""
    how, zeros = segments(dtype, dim), drawn(1, 1, H_KV * T, dim, dtype=dtype)
    memory = {name: x[0, 0] for name, x in (encoded(store, zeros, 0) | encoded(store, zeros, 1)).items()}
    new = drawn(1, H_KV, 1, dim, dtype=dtype)
    token = NewTokens(new, new, torch.zeros(1, H_KV, dtype=torch.int64))
    lengths, params = (how["starts"], how["counts"]), AttentionParams(dim**-0.5)
    clipped = None if store.limit(0) is None else torch.zeros(1, dtype=torch.int64)
    for places, own in ((how["key_positions"], params), (None, params._replace(softcap=50.0, sliding_window=64))):
        call = how["queries"], token, memory, (how["query_positions"], places), lengths, T, own
        decode_step(store, *call, clipped=clipped)


def decode_groups(codec: Coding, dtype: torch.dtype, dim: int) -> None:
    """A decoding step over tokens in codes of groups, with and without a soft cap, a sliding window and sinks."""
    how, memory, metadata = segments(dtype, dim), {}, torch.float32 if dtype == FLOAT else torch.float16
    for side, start in enumerate(("keys", "values")):
        form = form_of(codec, side, dim)
        for name, shape in form.shapes.items():
            own = torch.int32 if name == "words" else metadata
            memory[f"{start} {name}"] = torch.zeros(H_KV * T // form.tokens, *shape, dtype=own)
    exact, new = drawn(1, H_KV, codec.most_exact, dim, dtype=dtype), drawn(1, H_KV, 1, dim, dtype=dtype)
    ring = Ring(exact, exact, torch.zeros(exact.shape[:3], dtype=torch.int32))
    token, gone = NewTokens(new, new, torch.zeros(1, H_KV, dtype=torch.int64)), torch.zeros(1, H_KV, dtype=torch.int64)
    places, lengths = (how["query_positions"], how["key_positions"]), (how["starts"], how["counts"])
    params = AttentionParams(dim**-0.5)
    for own in (params, params._replace(softcap=50.0, sliding_window=64, sinks=torch.zeros(1, H_KV * G))):
        group_step(codec, how["queries"], token, gone, memory, ring, places, lengths, T, own)


def selections() -> Iterator[tuple[str, Callable[[], object]]]:
    """Selections with and without base scores, for one count and for one of each head."""
    scores, protected = torch.zeros(1, H_KV, T), torch.zeros(1, H_KV, T, dtype=torch.bool)
    positions = torch.zeros(1, H_KV, T, dtype=torch.int32)
    for case, ties, keep in (("", None, 9), ("base scores", scores, torch.full((1, H_KV), 9))):
        yield f"selection, {case}", partial(kept_slots, scores, ties, positions, protected, keep)


def launches(everything: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launchers with the arguments of presets, by name."""
    yield from selections()
    shapes = [(BF16, 128), (FLOAT, 128), (BF16, 64), (BF16, 256), (FLOAT, 64), (FLOAT, 256)]
    for dtype, dim in shapes if everything else shapes[:1]:
        name = f"{str(dtype)[6:]} D={dim}"
        for case, how in decode_cases(dtype, dim, everything).items():
            call = decode.decode_attention_flat if "starts" in how else decode.decode_attention
            yield f"decode, {name}, {case}", partial(call, **how)
        for store in ALL_CODES if everything else CODES:
            yield f"decode, {name}, {store}", partial(decode_codes, store, dtype, dim)
        for codec in ALL_GROUPS if everything else GROUPS:
            yield f"decode, {name}, {codec}", partial(decode_groups, codec, dtype, dim)
        how = sums(dtype, dim, 128)
        yield f"column sums, {name}", partial(query_sums.column_sums, **how, aligned=True)
        sliding = {**how, "sliding_window": 64, "softcap": 50.0}
        yield f"column sums in any order, {name}", partial(query_sums.column_sums, **sliding)
        if everything:
            alone = {**how, "sliding_window": 64}
            yield f"column sums of a window, {name}", partial(query_sums.column_sums, **alone)
        yield f"moments, {name}", partial(query_sums.attention_moments, **how)
        yield f"window of 32, {name}", partial(query_sums.window_statistics, **sums(dtype, dim, 32))


def decode_cases(dtype: torch.dtype, dim: int, everything: bool) -> dict[str, dict[str, Any]]:
    """Arguments of decode attention with and without everything that a preset may ask of it."""
    dense, flat, bias = decoding(dtype, dim), segments(dtype, dim), torch.zeros(1, H_KV, T)
    new = drawn(1, H_KV, 1, dim, dtype=dtype)
    token = NewTokens(new, new, torch.zeros(1, H_KV, dtype=torch.int64))
    cases = {
        "packed": {**dense, "packed": True},
        "flat, new tokens, sums": {**flat, "new_tokens": token, "sums": torch.zeros(H_KV * T, G)},
        "weights and a bias": {**dense, "weights": True, "bias": bias},
        "flat, new tokens, a bias": {**flat, "new_tokens": token, "bias": torch.zeros(H_KV * T)},
        "soft cap, window and sinks": {**dense, "softcap": 50.0, "sliding_window": 64, "sinks": torch.zeros(H_KV * G)},
        "one part, sinks": {**dense, "sinks": torch.zeros(H_KV * G), "programs": 1},
    }
    if everything:
        cases |= {
            "placed": dense,
            "packed, with a bias": {**dense, "packed": True, "bias": bias},
            "sums": {**dense, "sums": torch.zeros(1, H_KV, T, 1)},
            "window and sinks": {**dense, "sliding_window": 64, "sinks": torch.zeros(H_KV * G)},
            "flat": flat,
            "flat, one part, new tokens": {**flat, "new_tokens": token, "programs": 1},
        }  # fmt: skip
    return cases


def spilled(cubin: bytes, tool: str) -> int:
    """Bytes of local memory of a compiled kernel: its spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    words = [word for word in shown.stdout.split() if word.startswith(("LOCAL:", "STACK:"))]
    assert words, shown.stdout
    return max(int(word.split(":")[1]) for word in words)


def compile_all(capability: int, everything: bool) -> dict[str, Any]:
    """Compile every launch; see the module."""
    triton.runtime.driver.set_active(Driver(capability))
    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    run, compiled = JITFunction.run, dict[str, dict[str, Any]]()
    made: list[tuple[str, Any]] = []

    def warm_up(self: Any, *args: Any, grid: object, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=(1,), warmup=True, **kwargs)
        made.append((self.__name__, kernel))
        return kernel

    JITFunction.run = warm_up
    torch.Tensor.is_cuda = property(lambda x: True)  # bfloat16 stays bfloat16, as on a GPU
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    known: dict[int, int] = {}
    for name, launch in launches(everything):
        made.clear()
        try:
            launch()
        except Exception as error:
            compiled[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
            continue
        for _, kernel in made:
            if id(kernel) not in known:
                known[id(kernel)] = spilled(kernel.asm["cubin"], tool)
        compiled[name] = {
            "kernels": [kernel_name for kernel_name, _ in made],
            "spilled": max(known[id(kernel)] for _, kernel in made),
            "shared": max(kernel.metadata.shared for _, kernel in made),
        }
    return {"triton": triton.__version__, "capability": capability, "most_shared": LITTLE, "launches": compiled}


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    sys.stdout.write(json.dumps(compile_all(numbers[0] if numbers else 90, "--all" in sys.argv), indent=1) + "\n")
