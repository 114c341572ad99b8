"""A worker ends with the process that started it; how it is asked to stop otherwise: `kvbench.terminal.signals`."""

from __future__ import annotations

import os
import signal
import threading


def end_with_parent() -> None:
    """Stop this process, in order, once the one at the other end of its stdin is gone."""

    def watch() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock would be held when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
