"""What a policy's cache holds after a prompt, in exact bytes, without weights.

    python -m kvbench.memory model=llama2_7b policy=ott,kivi,full \\
        length=4096,32768 batch=1,64

model: a name of conf/model, or a folder with a config.json. policy: slugs.
length: of the prompt. batch: sequences.
--config-dir my_conf: models and policies of your own.
budget, dtype (of keys and values) and any field of a policy, such as bits=4,
apply to all of them.

The stores themselves run, on tensors without data; so a prediction is what
would be measured.
"""

import sys
from collections.abc import Sequence

from kvbench.terminal.command import command, our_version


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m kvbench.memory key=value ...`; returns the exit code. What it shows: `kvbench.tools.cache_bytes`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(f"{__doc__}")
        return 0
    if "--version" in arguments:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    from kvbench.tools.cache_bytes import tell  # here: torch is two seconds, which help need not wait for

    return tell(arguments)


if __name__ == "__main__":
    sys.exit(main())
