"""`kvbench bench`: see `kvbench.tools.bench.cli`."""

from kvbench.terminal.command import leave, share_cores

share_cores()
from kvbench.tools.bench.cli import cli, main  # noqa: E402 - OpenMP reads the setting when torch is imported

__all__ = ["cli", "main"]

if __name__ == "__main__":
    leave(main())
