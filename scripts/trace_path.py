"""Count the files and functions of kvbench that one decoded token, and one sweep of two runs, enter.

python scripts/trace_path.py                # the token: pocket model, caote_snapkv, budget 64, evicting
python scripts/trace_path.py --list         # the files, and the functions of each
python scripts/trace_path.py --sweep        # a sweep: two policies, one example

Modules and class bodies, which run once at import, are not counted as functions. A file counts once one of its
functions is entered.
"""

from __future__ import annotations

import argparse
import inspect
import runpy
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from transformers import AutoModelForCausalLM

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


def sweep() -> Entered:
    """A sweep of two runs by the command line, imports included."""
    with tempfile.TemporaryDirectory() as out:
        line = ["kvbench", "-m", "policy=snapkv,tova", "budget=64", "limit=1", f"out={out}"]
        sys.argv = line

        def run() -> None:
            try:
                runpy.run_module("kvbench", run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise

        return traced(run)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="a sweep of two runs instead of a token")
    parser.add_argument("--list", action="store_true", help="every file with its functions")
    given = parser.parse_args()
    entered = sweep() if given.sweep else token()
    if given.list:
        for path, names in sorted(entered.items()):
            print(f"{path}: {', '.join(sorted(names))}")
    print(f"{len(entered)} files, {sum(map(len, entered.values()))} functions")


if __name__ == "__main__":
    main()
