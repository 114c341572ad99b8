"""How a process of ours behaves on a machine it shares: threads that sleep, messages on stderr, no foreign bars."""

import io
import logging
import os
import sys


def write_what_can_be() -> None:
    """Let stdout and stderr take every text: a question mark stands for what their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def share_cores() -> None:
    """Let torch's threads spin for microseconds while they wait, then sleep; OpenMP reads this once, as torch comes in.

    They spin for milliseconds otherwise, and where other work wants the cores each of the many small steps of a small
    model waits for a whole time slice: 0.5 s instead of 15.9 s of prefill (pocket model, 2,048 tokens, 2 cores under a
    load of 8). Threads that never spin have to be woken for each step: twice the time of decoding on a quiet machine.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def log_to_stderr() -> None:
    """Warnings on stderr; on a terminal also what is going on."""
    level = logging.INFO if sys.stderr.isatty() else logging.WARNING
    logging.basicConfig(format="kvbench: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("kvbench").setLevel(level)


def quiet() -> None:
    """For a cell, also where a launcher put it: our log lines, and the libraries' bars on a terminal only."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    log_to_stderr()
    if not sys.stderr.isatty():
        disable_progress_bars()
        disable_progress_bar()
