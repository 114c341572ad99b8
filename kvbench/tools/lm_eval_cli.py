"""lm-eval's own command line with the model `kvbench` in it: `python -m kvbench.lm_eval --model kvbench ...`.

lm-eval finds models in its own package only and reads no entry points: ours is registered before its command line runs.
Below lm-eval's table of scores stands one of what the caches held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lm_eval.utils
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
        return WRONG, f"--tasks: {error} (`python -m kvbench.lm_eval ls tasks` lists all)"
    return explain(error)


@partial(command, explains=_explain)
def _run(arguments: Sequence[str] | None = None) -> int:
    """lm-eval's command line, which reads `sys.argv` itself."""
    theirs = lm_eval.utils.make_table
    lm_eval.utils.make_table = partial(_with_cache, theirs)  # which the command line looks up when it prints
    try:
        with squad.importable():
            cli_evaluate()
    finally:
        lm_eval.utils.make_table = theirs
    return 0


def _with_cache(make_table: Callable[..., str], results: Mapping[str, Any], column: str = "results") -> str:
    """lm-eval's table, and after that of the tasks the tokens and bytes that the caches of our model held."""
    table, held = make_table(results, column), results["config"]
    if column != "results" or held.get("kept_tokens") is None:
        return table
    cells = {
        "Budget": held["budget"] or "",
        "Requests": held["requests"],
        "Evicted": f"{held['requests_with_eviction']:.1%}",
        "Kept/KV head": f"{held['kept_tokens']:,.1f}",
        "Cache MiB": f"{held['cache_bytes'] / 2**20:,.3f}",
        "Peak MiB": f"{held['peak_bytes'] / 2**20:,.3f}",
    }
    rows = (cells.keys(), ["---:"] * len(cells), map(str, cells.values()))
    return "\n".join([table, *(f"|{'|'.join(row)}|" for row in rows)])
