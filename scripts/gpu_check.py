"""Check kvbench on a new GPU: `python scripts/gpu_check.py [NUMBER ...] [--dry]`.

Runs ten measurements, the most important first, and prints each result with its bound. NUMBER selects some of them.
--dry runs small versions on a CPU with the pocket model, to check the script; its times are meaningless. The exit code
is 1 if a bound does not hold or a measurement fails.
"""

from __future__ import annotations

import csv
import functools
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kernel_bench
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from kvbench import KVCache, generate, make_policy
from kvbench.tools.bench.model import build

ROOT = Path(__file__).resolve().parent.parent
SIX = ("snapkv", "h2o", "caote_snapkv", "d2o", "cake", "ada_snapkv")
PROGRAM = """import functools, runpy, sys, torch
torch.cuda.graph = functools.partial(torch.cuda.graph, check_input_liveness=True)
sys.argv[0] = "kvbench"
runpy.run_module("kvbench", run_name="__main__", alter_sys=True)"""
"""`python -m kvbench` with CUDA graphs that fail if their input memory was freed."""
Found = Sequence[tuple[str, float, str, float]]
"""A measured value: its name, the value, `<=` or `>=`, and the bound."""


class Check:
    """The sizes and devices of all measurements."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.model = "pocket" if dry else "smollm2"
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu_check_"))

    def sized(self, full: int, dry: int) -> int:
        return dry if self.dry else full

    @functools.cached_property
    def loaded(self) -> Any:  # noqa: ANN401 - a model of any family
        """The model in float32 on the device."""
        model = build(self.model, "float32", torch.device(self.device))[0]
        model.set_attn_implementation("kvbench")
        return model

    def prompt(self, tokens: int, seed: int = 0) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        vocabulary = self.loaded.config.get_text_config().vocab_size
        return torch.randint(vocabulary, (1, tokens), generator=random).to(self.device)

    def run(self, *arguments: str) -> str:
        """Run `python ARGUMENTS` in the repository and return what it printed. RuntimeError if it fails."""
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:]
            )
        return done.stdout

    def bench(self, name: str, *arguments: str) -> list[dict[str, str]]:
        """The rows of a benchmark of kvbench.bench in bfloat16 (dry: in float32)."""
        out = self.scratch / f"bench{len(list(self.scratch.iterdir()))}"
        dtype = f"dtype={'float32' if self.dry else 'bfloat16'}"
        own = [name] if name else []
        self.run("-m", "kvbench.bench", *own, f"model={self.model}", dtype, f"device={self.device}", f"out={out}",
                 f"rounds={self.sized(5, 1)}", f"new_tokens={self.sized(64, 4)}", *arguments)  # fmt: skip
        with next(out.glob("*.csv")).open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def outputs(self, *arguments: str) -> list[dict[str, Any]]:
        """The samples of all runs of a kvbench command, in the order of their folders."""
        out = self.scratch / f"runs{len(list(self.scratch.iterdir()))}"
        self.run("-c", PROGRAM, *arguments, f"model={self.model}", f"device={self.device}", f"out={out}")
        files = sorted(out.rglob("samples.jsonl"), key=lambda file: file.parent.name.rpartition("-")[0])
        return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def kernels(check: Check) -> Found:
    """Kernel tests in bfloat16 against the references."""
    printed = check.run("-m", "pytest", "tests/kernels", "-m", "gpu", "-p", "no:cacheprovider")
    word = "skipped" if check.dry else "passed"
    count = next((line.split(f" {word}")[0].split()[-1] for line in printed.splitlines() if f" {word}" in line), "0")
    return [(f"kernel tests {word}", float(count), ">=", 1)]


@torch.inference_mode()
def logits(check: Check) -> Found:
    """`full` against transformers' own cache, with the same tokens."""
    model, ids = check.loaded, check.prompt(check.sized(1024, 64))
    found = []
    caches = {"sdpa": DynamicCache(config=model.config), "kvbench": KVCache(model.config, make_policy("full"))}
    for attention, cache in caches.items():
        model.set_attn_implementation(attention)
        parts = ids[:, :-16], *ids[:, -16:].split(1, 1)
        found.append(torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1))
    theirs, ours = found
    same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    return [("largest difference of a logit", float((theirs - ours).abs().max()), "<=", 1e-2),
            ("same most likely token", float(same), ">=", 0.999)]  # fmt: skip


def kept(check: Check) -> Found:
    """Kept positions after a prompt and 32 tokens, on the GPU against the CPU, both in float32."""
    found = []
    model, cpu = check.loaded, build(check.model, "float32", torch.device("cpu"))[0]
    ids, new = check.prompt(check.sized(1000, 200)), check.sized(32, 4)
    for slug in SIX:
        sets = []
        for each in (model, cpu):
            done = generate(each, ids, make_policy(slug, 128), max_new_tokens=new, min_new_tokens=new)
            sets.append([layer.positions.sort(-1).values.cpu() for layer in done.cache.layers])
        pairs = [(set(a.tolist()), set(b.tolist())) for x, y in zip(*sets, strict=True)
                 for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)]  # fmt: skip
        equal, all_kept = sum(len(a & b) for a, b in pairs), sum(len(b) for _, b in pairs)
        found.append((f"equal kept tokens, {slug}", equal / all_kept, ">=", 0.99))
    return found


def graphs(check: Check) -> Found:
    """Recorded steps against eager ones; at the larger budget every sequence stays below its budget."""
    arguments = "-m", "policy=h2o", "budget=64,100000", "task=niah", "task.lengths=[512]", f"limit={check.sized(8, 1)}"
    eager, recorded = (check.outputs(*arguments, f"engine.cuda_graph={how}") for how in ("false", "auto"))
    same = [a["output"] == b["output"] for a, b in zip(eager, recorded, strict=True)]
    return [("same answers", sum(same) / len(same), ">=", 1)]


def step(check: Check) -> Found:
    """A decoding step after a prompt of 8k tokens at budget 1,024, against transformers with flash attention."""
    found = []
    for batch in (1, check.sized(32, 2)):
        length, budget = check.sized(8192, 256), check.sized(1024, 64)
        sizes = f"lengths={length}", f"batches={batch}", f"budgets={budget}", "policies=snapkv,h2o"
        flash = transformers_step(check, batch, length)
        for row in check.bench("", *sizes, "decode=evict", "baselines=[]"):
            name = f"{row['policy']} over transformers, batch {batch}"
            found.append((name, float(row["decode_ms"]) / flash, "<=", 1.5))
    return found


@torch.inference_mode()
def transformers_step(check: Check, batch: int, length: int) -> float:
    """Milliseconds of a decoding step of transformers' own cache, its attention pinned to flash on a GPU."""
    model = check.loaded if check.dry else check.loaded.to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    cache, ids = DynamicCache(config=model.config), check.prompt(length).expand(batch, -1)
    with sdpa_kernel([SDPBackend.MATH] if check.dry else [SDPBackend.FLASH_ATTENTION]):
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return kernel_bench.timed(lambda: model(ids[:, :1], past_key_values=cache, use_cache=True))[1]


def prefill(check: Check) -> Found:
    """Prefill of policies that read windows or sums, against full, at 8k and 32k tokens."""
    lengths = f"lengths={check.sized(8192, 128)},{check.sized(32768, 256)}"
    rows = check.bench("", lengths, f"budgets={check.sized(1024, 64)}", "policies=full,snapkv,h2o", "baselines=[]")
    times = {(row["policy"], row["prompt"]): float(row["prefill_ms"]) for row in rows}
    bounds = {"full": 1.0, "snapkv": 1.1, "h2o": 1.6}
    return [
        (f"{slug} over full, {length} tokens", ms / times["full", length], "<=", bounds[slug])
        for (slug, length), ms in times.items()
    ]


def decode_kernel(check: Check) -> Found:
    """The decode kernel: share of the rate of a copy, and against FlashInfer if that is installed."""
    found, ours = list[tuple[str, float, str, float]](), dict[str, float]()
    for row in kernel_bench.rows(["decode"]):
        if row["method"] == "kvbench":
            ours[row["case"]] = row["ms"]
            found.append((f"{row['case']}, of copy rate", row["of copy rate"], ">=", 0.6))
        elif row["method"] == "flashinfer":
            found.append((f"{row['case']}, over flashinfer", ours[row["case"]] / row["ms"], "<=", 1.2))
    return found


def codes(check: Check) -> Found:
    """Attention on codes: wall time against attention in 16 bits of as many tokens, the other launches included."""
    tokens, found = check.sized(32768, 512), []
    full = kernel_bench.timed(kernel_bench.decoding(1, tokens).ours)[1]
    for bits in (2, 4):
        ms = kernel_bench.timed(kernel_bench.codes(bits, tokens).ours)[1]
        found.append((f"{bits} bits over 16 bits", ms / full, "<=", 1.0))
    return found


def sweep(check: Check) -> Found:
    """36 variants of one prompt as one batch, against single runs."""
    smaller = ("policies=snapkv,h2o", "budgets=32,64") if check.dry else ()
    rows = check.bench("sweep", f"lengths={check.sized(4096, 128)}", *smaller)
    shared = next(row for row in rows if row["runs"] == "shared")
    return [
        ("shared over single", float(shared["ratio"]), "<=", 0.4),
        ("same answers", float(shared["equal_answers"]), ">=", 0.9),
    ]


def needles(check: Check) -> Found:
    """A real run: 20 needles under the full cache, and under SnapKV at 512 tokens."""
    samples = check.outputs("-m", "policy=full,snapkv", "budget=512", "task=niah", f"limit={check.sized(20, 1)}")
    half = len(samples) // 2
    scores = [sum(sample["score"] for sample in part) / half for part in (samples[:half], samples[half:])]
    return [
        ("score of full", scores[0], ">=", 0.5),
        ("score of snapkv, less than full by", scores[0] - scores[1], "<=", 0.3),
    ]


CHECKS: tuple[Callable[[Check], Found], ...] = (
    kernels, logits, kept, graphs, step, prefill, decode_kernel, codes, sweep, needles,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the measurements and return the exit code; in a dry run only failures count, not the bounds of times."""
    check = Check("--dry" in arguments)
    chosen = [int(word) for word in arguments if word.isdigit()] or range(1, len(CHECKS) + 1)
    lost = 0
    for number in chosen:
        measure = CHECKS[number - 1]
        print(f"{number}. {(measure.__doc__ or '').splitlines()[0]}", flush=True)
        try:
            found = measure(check)
        except Exception:  # continue with the other measurements
            lost += 1
            traceback.print_exc()
            continue
        for name, value, sign, bound in found:
            holds = value <= bound if sign == "<=" else value >= bound
            lost += not holds and not check.dry
            verdict = "" if check.dry else " holds" if holds else " DOES NOT HOLD"
            print(f"   {name}: {value:.4g} (bound {sign} {bound:g}){verdict}", flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
