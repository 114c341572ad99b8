"""`python -m kvbench.lm_eval`, and the script `lm_eval`: see `kvbench.tools.lm_eval_cli`."""

import sys

from kvbench.terminal.command import WRONG, say
from kvbench.terminal.console import open_closed_streams

__all__ = ["main"]


def main() -> None:
    """Run lm-eval's command line; one sentence where there is none."""
    open_closed_streams()
    try:
        from kvbench.tools.lm_eval_cli import main as command_line
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        say("lm-eval is not installed: pip install 'lm-eval>=0.4.13'")
        sys.exit(WRONG)
    command_line()


if __name__ == "__main__":
    main()
