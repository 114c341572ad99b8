"""Settings of a process: waiting threads, messages on stderr, progress bars of libraries."""

import io
import logging
import os
import shutil
import sys


def replace_unencodable() -> None:
    """Write a question mark to stdout and stderr for characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def share_cores() -> None:
    """Let torch's waiting threads spin for microseconds, then sleep. OpenMP reads this once, when torch is imported.

    By default they spin for milliseconds. On a busy machine, each of the many small steps of a small model then waits
    for a whole time slice: prefill takes 15.9 s instead of 0.5 s (pocket model, 2,048 tokens, 2 cores, a load of 8).
    Threads that never spin must be woken for each step, which doubles the decoding time on a quiet machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def log_to_stderr() -> None:
    """Log warnings to stderr; on a terminal, also information."""
    level = logging.INFO if sys.stderr.isatty() else logging.WARNING
    logging.basicConfig(format="kvbench: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("kvbench").setLevel(level)


def quiet() -> None:
    """Logging of a run: kvbench's log lines; progress bars of libraries only on a terminal."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    log_to_stderr()
    if not sys.stderr.isatty():
        disable_progress_bars()
        disable_progress_bar()


def terminal_width() -> int | None:
    """Characters per line if stdout is a terminal, otherwise None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
