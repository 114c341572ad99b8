"""`kvbench memory`: exact bytes of a policy's cache after a prompt; see `kvbench.tools.cache_bytes`."""

from collections.abc import Sequence
from pathlib import Path

import click

from kvbench.config.completion import complete_overrides
from kvbench.terminal.command import PATH, Command, leave, program


@click.command("memory", cls=Command, no_args_is_help=True)
@click.argument("words", nargs=-1, metavar="KEY=VALUE...", shell_complete=complete_overrides)
@click.option("-cd", "--config-dir", type=PATH, help="Folder with your own models and policies.")
def cli(words: Sequence[str], config_dir: Path | None) -> None:
    """Exact bytes of a policy's cache after a prompt, computed without weights.

    \b
      kvbench memory model=llama2_7b policy=ott,kivi,full \\
          length=4096,32768 batch=1,64

    \b
    model: a name of conf/model, or a folder with a config.json
    policy: names of policies
    length, batch: prompt lengths, batch sizes
    budget, dtype (of keys and values) and any field of a policy, such as bits=4, apply to all policies

    The stores run on tensors without data, so that a prediction equals a measurement.
    """
    from kvbench.tools import cache_bytes  # imported here: torch takes two seconds

    cache_bytes.print_sizes(words, config_dir)


main = program(cli)

if __name__ == "__main__":
    leave(main())
