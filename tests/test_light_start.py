"""What the start of kvbench imports: seconds of every command and of every process of a sweep."""

import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
LIBRARIES = ("datasets", "evaluate", "itables", "lm_eval", "matplotlib", "nltk", "sklearn", "submitit", "wandb")
"""Packages that only some tasks, reports and loggers use."""


def imported(program: str) -> set[str]:
    """The modules of a process that ran a program."""
    show = "\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program + show], capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_a_cache_needs_neither_models_nor_a_compiler() -> None:
    found = imported("from kvbench import KVCache, make_policy\nmake_policy('snapkv', 64)")
    assert "torch" in found
    assert not found & {"transformers.modeling_utils", "scipy", "pandas", *COMPILER, *LIBRARIES}


@pytest.mark.slow("a run in a process of its own")
def test_a_run_needs_no_library_of_other_tasks_or_of_reports(tmp_path: Path) -> None:
    found = imported(f"from kvbench.cli import main\nassert main(['limit=1', 'out={tmp_path}']) == 0")
    assert not found & {*LIBRARIES}


def test_a_command_ends_with_its_code_after_what_was_registered_for_the_end() -> None:
    program = (
        "import atexit, threading, time\nfrom kvbench.terminal.command import leave\natexit.register(print, 'third')\n"
        "print('first')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('second'))).start()\nleave(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, ["first", "second", "third"], "")
