"""lm-eval's command line with the model `kvbench`: `python -m kvbench.lm_eval --model kvbench ...`.

The model is registered before lm-eval's command line runs, because lm-eval only finds models of its own package.
"""

import sys
from collections.abc import Sequence

from kvbench.errors import UsageError
from kvbench.terminal.command import command, our_version

__all__ = ["main"]
HELP = """\
The command line of lm-eval with the additional model `kvbench`:

  python -m kvbench.lm_eval --model kvbench --tasks gsm8k \\
      --model_args pretrained=my/model,policy=snapkv,budget=256

The help of lm-eval follows.

"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Register the model and run lm-eval's command line, which reads `sys.argv`; returns the exit code."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(HELP)
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise UsageError("lm-eval is not installed: pip install 'lm-eval>=0.4.13'") from error
    from kvbench.tasks.lm_eval import squad

    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.tools.harness_model:KVBenchLM")
    squad.provide()
    try:
        cli_evaluate()
    except ValueError as error:
        if str(error).startswith("Tasks not found"):
            raise UsageError(f"--tasks: {error} (`python -m kvbench.lm_eval ls tasks` lists all)") from error
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
