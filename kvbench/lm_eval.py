"""lm-eval's command line with the model `kvbench`: `kvbench lm-eval --model kvbench ...`."""

import sys
from collections.abc import Sequence

import click

from kvbench.errors import from_extra
from kvbench.terminal.command import leave, program

HELP = """\
The command line of lm-eval with the additional model `kvbench`:

  kvbench lm-eval --model kvbench --tasks gsm8k \\
      --model_args pretrained=my/model,policy=snapkv,budget=256

The help of lm-eval follows.

"""


_SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}


@click.command("lm-eval", context_settings=_SETTINGS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def cli(words: Sequence[str]) -> None:
    """Register the model and run lm-eval's command line."""
    sys.argv = ["kvbench lm-eval", *words]  # which it reads
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(HELP)
    with from_extra("lm-eval", "this command"):
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    from kvbench.tasks.lm_eval.load import provide_squad_metrics

    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.tools.harness_model:KVBenchLM")
    provide_squad_metrics()
    cli_evaluate()


main = program(cli)


if __name__ == "__main__":
    leave(main())
