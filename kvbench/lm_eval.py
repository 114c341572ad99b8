"""`python -m kvbench.lm_eval`: see `kvbench.tools.lm_eval_cli`."""

import sys

from kvbench.terminal.command import WRONG, our_version, say
from kvbench.terminal.folding import fold, help_width

__all__ = ["main"]
HELP = """\
lm-eval's own command line, with a model `kvbench` in it, whose arguments are a model, a policy and a budget:

  python -m kvbench.lm_eval --model kvbench --tasks gsm8k \\
      --model_args pretrained=my/model,policy=snapkv,budget=256

What lm-eval says of itself:
"""


def main() -> None:
    """Run lm-eval's command line; one sentence where there is none."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{our_version()}\n")
        return
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(f"{fold(HELP, help_width())}\n")
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
