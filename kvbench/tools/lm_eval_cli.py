"""lm-eval's own command line with the model `kvbench` in it: `lm_eval --model kvbench ...`.

lm-eval finds models in its own package only, so something has to name ours before its command line looks one up. For
that the script `lm_eval` is ours; where lm-eval was installed again later, `python -m kvbench.lm_eval` is the same.
"""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

from kvbench.tasks.lm_eval import squad
from kvbench.terminal.errors import UsageError
from kvbench.terminal.signals import exit_code, sigterm_as_interrupt


def main() -> None:
    """Make the model known, by name alone until it is asked for, and hand over to lm-eval."""
    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.tools.harness_model:KVBenchLM")
    try:
        with sigterm_as_interrupt(), squad.importable():
            cli_evaluate()
    except UsageError as error:
        sys.stderr.write(f"kvbench: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt as error:
        sys.stderr.write("kvbench: interrupted\n")
        sys.exit(exit_code(error))
