"""Exact bytes of a policy's cache after a prompt, computed without weights.

    python -m kvbench.memory model=llama2_7b policy=ott,kivi,full \\
        length=4096,32768 batch=1,64

model: a name of conf/model, or a folder with a config.json.
policy: names of policies. length: prompt lengths. batch: batch sizes.
budget, dtype (of keys and values) and any field of a policy, such as bits=4,
apply to all policies. --config-dir my_conf: your own models and policies.

The stores run on tensors without data, so that a prediction equals a
measurement.
"""

import sys
from collections.abc import Sequence

from kvbench.terminal.command import command, our_version


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m kvbench.memory key=value ...`; returns the exit code. See `kvbench.tools.cache_bytes`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(f"{__doc__}")
        return 0
    if "--version" in arguments:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    from kvbench.tools import cache_bytes  # imported here: torch takes two seconds

    return cache_bytes.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
