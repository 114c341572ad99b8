"""lm-eval's own command line with the model `kvbench` in it: `python -m kvbench.lm_eval --model kvbench ...`.

lm-eval finds models in its own package only, so something has to import ours before its command line looks one up.
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry

from kvbench.tasks.lm_eval import squad


def main() -> None:
    """Make the model known, by name alone until it is asked for, and hand over to lm-eval."""
    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.lm:KVBenchLM")
    with squad.importable():
        cli_evaluate()


if __name__ == "__main__":
    main()
