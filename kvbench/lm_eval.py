"""lm-eval's command line with the model `kvbench`: `python -m kvbench.lm_eval --model kvbench ...`."""

import sys
from collections.abc import Sequence

from kvbench.errors import UsageError
from kvbench.terminal.command import command

HELP = """\
The command line of lm-eval with the additional model `kvbench`:

  python -m kvbench.lm_eval --model kvbench --tasks gsm8k \\
      --model_args pretrained=my/model,policy=snapkv,budget=256

The help of lm-eval follows.

"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Register the model and run lm-eval's command line, which reads `sys.argv`; returns the exit code."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(HELP)
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        raise UsageError("lm-eval is not installed: pip install 'lm-eval>=0.4.13'") from error
    from kvbench.tasks.lm_eval.load import provide_squad_metrics

    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.tools.harness_model:KVBenchLM")
    provide_squad_metrics()
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
