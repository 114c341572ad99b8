"""Count the files, functions and lines of kvbench that a token, a block and a run enter.

python scripts/trace_path.py                # pocket model, caote_snapkv, budget 64, evicting
python scripts/trace_path.py --list         # the files of a token, and the functions of each

A token and a block of a prompt are traced with both backends, PyTorch and interpreted Triton, and the union is counted;
a run is `kvbench` for one example. Modules and class bodies, which run once at import, are not counted as functions. A
file counts once one of its functions is entered, with all of its lines. The last lines count what does not depend on a
trace: files that ask for a device, by themselves or by `kernels/devices.py`, lines of code, and the members of classes
that hold tokens: methods, fields and attributes, private ones included.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
OURS = ("kvbench", "policies", "kernels", "tasks", "hydra_plugins", "src")
PROMPT, BLOCK, TOKENS = 192, 32, 4
DEVICE = re.compile(r"is_cpu|INTERPRETED|is_cuda|\.type [!=]= .(cuda|cpu).")
BY_NAME = re.compile(r"use_triton|on_host\(|on_gpu\(")
HOLDING = "kvbench/cache", "kvbench/engine", "policies/stores"
"""The folders of what holds tokens and feeds them."""

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


def _prompt() -> tuple[Any, Any]:
    """A model, and a cache whose prompt is complete up to its last block."""
    from kvbench import KVCache, make_policy

    model = AutoModelForCausalLM.from_pretrained(ROOT / "kvbench" / "pocket").eval()
    model.set_attn_implementation("kvbench")
    cache = KVCache(model.config, make_policy("caote_snapkv", 64, block=BLOCK), prompt_length=PROMPT)
    with torch.inference_mode():
        for start in range(0, PROMPT - BLOCK, BLOCK):
            model(torch.arange(start, start + BLOCK)[None], past_key_values=cache)
    return model, cache


@torch.inference_mode()
def block() -> Entered:
    """The last block of a prompt, whose budget is full."""
    model, cache = _prompt()
    return traced(lambda: model(torch.arange(PROMPT - BLOCK, PROMPT)[None], past_key_values=cache))


@torch.inference_mode()
def token() -> Entered:
    """One decoding step after others, so that everything that is made once is made."""
    model, cache = _prompt()
    model(torch.arange(PROMPT - BLOCK, PROMPT)[None], past_key_values=cache)
    for _ in range(TOKENS):
        model(torch.tensor([[7]]), past_key_values=cache)
    return traced(lambda: model(torch.tensor([[7]]), past_key_values=cache))


def run() -> Entered:
    """`kvbench` for one example, from the command to its row."""
    from kvbench.cli import main as command

    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        words = ["policy=caote_snapkv", "budget=64", "limit=1", f"out={folder}"]
        return traced(lambda: command(words))


def interpreted(name: str) -> Entered:
    """The same trace in a process whose Triton kernels are interpreted."""
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import trace_path; trace_path.print_trace(sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), name]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    entered: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {path: set(names) for path, names in entered.items()}


def print_trace(name: str) -> None:
    """Print the functions of a trace by file as JSON."""
    entered = TRACES[name]()
    print(json.dumps({path: sorted(names) for path, names in entered.items()}))


TRACES = {"token": token, "block": block}


def both(name: str) -> Entered:
    """The union of the traces with both backends."""
    first, second = TRACES[name](), interpreted(name)
    return {path: first.get(path, set()) | second.get(path, set()) for path in first.keys() | second.keys()}


def sources(*folders: str) -> dict[str, str]:
    """The text of every file of some folders, by path."""
    files = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(files)}


def members(found: ast.ClassDef) -> int:
    """Number of methods, fields and attributes of a class, without those of its bases."""
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    for node in found.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return len(names)


def print_code() -> None:
    """Print what is counted in the code itself."""
    texts = sources(*OURS[:4])
    direct = [path for path, text in texts.items() if DEVICE.search(text)]
    asking = [path for path, text in texts.items() if DEVICE.search(text) or BY_NAME.search(text)]
    print(f"files that ask for a device: {len(asking)}, of which by themselves {', '.join(direct)}")
    lines = {folder: sum(len(text.splitlines()) for text in sources(folder).values()) for folder in HOLDING}
    print(f"lines: {', '.join(f'{folder} {count}' for folder, count in lines.items())}, together {sum(lines.values())}")
    trees = [ast.parse(text) for text in sources(*HOLDING, "policies").values()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    largest = sorted(((members(found), found.name) for found in classes), reverse=True)[:5]
    print(f"members of the largest classes: {', '.join(f'{name} {count}' for count, name in largest)}")


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="every file of a token with its functions")
    given = parser.parse_args()
    found = {"token": both("token")}
    if given.list:
        for path, names in sorted(found["token"].items()):
            print(f"{path}: {', '.join(sorted(names))}")
    found |= {"block": both("block"), "run": run()}
    for title, entered in found.items():
        lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in entered)
        own = sum(len(text.splitlines()) for path, text in sources("kvbench/cache").items() if path in entered)
        counts = f"{len(entered)} files, {sum(map(len, entered.values()))} functions, {lines} lines"
        print(f"{title}: {counts}, of them {own} in kvbench/cache")
    print_code()


if __name__ == "__main__":
    main()
