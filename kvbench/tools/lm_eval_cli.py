"""lm-eval's own command line with the model `kvbench` in it: `lm_eval --model kvbench ...`.

lm-eval finds models in its own package only, so something has to name ours before its command line looks one up. For
that the script `lm_eval` is ours; where lm-eval was installed again later, `python -m kvbench.lm_eval` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

from kvbench.tasks.lm_eval import squad
from kvbench.terminal.command import WRONG, command, explain


def main() -> None:
    """Make the model known, by name alone until it is asked for, and hand over to lm-eval."""
    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.tools.harness_model:KVBenchLM")
    code = _run()
    if code:
        sys.exit(code)


def _explain(error: BaseException) -> tuple[int, str]:
    """As `explain`, and lm-eval's answer to an unknown name as a wrong value."""
    if isinstance(error, ValueError) and str(error).startswith("Tasks not found"):
        return WRONG, f"--tasks: {error} (`lm_eval ls tasks` lists all)"
    return explain(error)


@partial(command, explains=_explain)
def _run(arguments: Sequence[str] | None = None) -> int:
    """lm-eval's command line, which reads `sys.argv` itself."""
    with squad.importable():
        cli_evaluate()
    return 0
