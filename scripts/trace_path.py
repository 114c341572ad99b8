"""Count the files, functions and lines of kvbench that one decoded token enters.

python scripts/trace_path.py                # the token: pocket model, caote_snapkv, budget 64, evicting
python scripts/trace_path.py --list         # the files, and the functions of each

The token takes both paths: on a CPU, and in the batch of a GPU, whose Triton kernels are interpreted. The last line
counts their union. Modules and class bodies, which run once at import, are not counted as functions. A file counts once
one of its functions is entered, with all of its lines.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
OURS = ("kvbench", "policies", "kernels", "tasks", "hydra_plugins", "src")
PROMPT, TOKENS = 200, 4

Entered = dict[str, set[str]]


def traced(call: Callable[[], object]) -> Entered:
    """The functions that `call` enters, by file."""
    entered: defaultdict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and function:  # comprehensions and lambdas are part of their function
            path = _ours(code.co_filename)
            if path is not None:
                entered[path].add(code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return dict(entered)


@cache
def _ours(file: str) -> str | None:
    """The path of a file of kvbench in the repository; None for other files."""
    path = Path(file).resolve()
    ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS
    return str(path.relative_to(ROOT)) if ours else None


def token() -> Entered:
    """One decoding step after others, so that everything that is made once is made."""
    from kvbench import KVCache, make_policy

    model = AutoModelForCausalLM.from_pretrained(ROOT / "kvbench" / "pocket").eval()
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy("caote_snapkv", 64))
    with torch.inference_mode():
        model(torch.arange(PROMPT)[None], past_key_values=cache)
        for _ in range(TOKENS):
            model(torch.tensor([[7]]), past_key_values=cache)
        return traced(lambda: model(torch.tensor([[7]]), past_key_values=cache))


def gpu_token() -> Entered:
    """The same step in the batch of a GPU, in a process whose Triton kernels are interpreted."""
    program = "import sys, json; sys.path.insert(0, sys.argv[1]); import trace_path; trace_path.print_gpu_token()"
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    entered: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {path: set(names) for path, names in entered.items()}


def print_gpu_token() -> None:
    """Trace the call of the model in a step of a batch; print the functions by file as JSON."""
    from kvbench import make_policy
    from kvbench.engine.batch import DecodeBatch
    from kvbench.engine.sequence import Request

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, intermediate_size=32, **sizes)).eval()
    model.set_attn_implementation("kvbench")
    batch, policy = DecodeBatch(model), make_policy("caote_snapkv", 24, window=8)
    batch.admit(Request(torch.arange(32)[None], max_new_tokens=2 * TOKENS), [policy])
    for _ in range(TOKENS):
        batch.step()
    (cache,), tokens = batch.devices, torch.tensor([[7]])  # the batch of a GPU takes the steps
    with torch.inference_mode():
        entered = traced(lambda: model(tokens, position_ids=cache.positions.clone(), past_key_values=cache))
    print(json.dumps({path: sorted(names) for path, names in entered.items()}))


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="every file with its functions")
    given = parser.parse_args()
    parts = {"CPU": token(), "GPU, interpreted": gpu_token()}
    union: defaultdict[str, set[str]] = defaultdict(set)
    for part in parts.values():
        for path, names in part.items():
            union[path] |= names
    if given.list:
        for path, names in sorted(union.items()):
            print(f"{path}: {', '.join(sorted(names))}")
    for title, entered in [*parts.items(), ("together", dict(union))]:
        lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in entered)
        print(f"{title}: {len(entered)} files, {sum(map(len, entered.values()))} functions, {lines} lines")


if __name__ == "__main__":
    main()
