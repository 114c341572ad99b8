"""A process that starts and leaves quickly leaves nothing out."""

import gc
import subprocess
import sys
from contextlib import suppress

from kvbench.terminal.console import started, starting

LEAVING = """
import atexit, tempfile
from pathlib import Path
from kvbench.terminal.console import leave
folder = tempfile.TemporaryDirectory()
atexit.register(lambda: print("told at the end", Path(folder.name).exists()))
print("printed before", end=" ")
leave(3)
"""


def test_a_process_that_leaves_says_all_it_had_to_say_and_ends_with_its_code() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "printed before told at the end True\n", "")


def test_garbage_is_searched_for_again_once_all_has_started_and_ended_however_that_was() -> None:
    with suppress(ValueError), starting():
        assert not gc.isenabled()
        raise ValueError("no such policy")
    assert gc.isenabled()
    with suppress(ValueError), started():
        assert gc.get_freeze_count() > 0
        raise ValueError("no such model")
    assert gc.get_freeze_count() == 0
