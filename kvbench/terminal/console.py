"""How a process of ours behaves on a machine it shares: threads that sleep, messages on stderr, no foreign bars."""

import codecs
import io
import logging
import os
import sys
from unicodedata import normalize


def open_closed_streams() -> None:
    """Where stdin, stdout or stderr were closed before Python started (`2>&-`), nobody reads: /dev/null instead.

    Their numbers are taken with it, or the next file that is opened would get what libraries write to stderr.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def write_what_can_be() -> None:
    """Let stdout and stderr take every text: what their encoding lacks is written in letters that it has.

    Bytes of a file's name that are no text come out as they went in.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """In place of what cannot be encoded: the byte it was, a likeness, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter, after = error.object[error.start], error.start + 1
    if "\udc80" <= letter <= "\udcff":  # as os.fsdecode has it
        return bytes([ord(letter) - 0xDC00]), after
    bare = normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return _LIKE.get(letter, bare or "?"), after


_PLAIN = "kvbench.plainly"
_LIKE = dict(
    zip("“”„‘’–—−…×·≤≥→", ('"', '"', '"', "'", "'", "-", "-", "-", "...", "x", "*", "<=", ">=", "->"), strict=True)
)
codecs.register_error(_PLAIN, _plainly)


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
