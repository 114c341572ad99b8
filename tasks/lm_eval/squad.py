"""SQuAD's two scores under the module name that lm-eval's tasks import, which transformers 5 no longer has.

Source: Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1: exact match and F1 over words, ignoring articles and
punctuation; with SQuAD 2.0's rule that an empty answer is matched by an empty answer alone.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

from kvbench.tasks.longbench.metrics import plain
from kvbench.tasks.scores import bag_f1

PACKAGE = "transformers.data.metrics"


def compute_exact(reference: str, answer: str) -> int:
    """1 if both are the same once normalised."""
    return int(plain(reference).split() == plain(answer).split())


def compute_f1(reference: str, answer: str) -> float:
    """Harmonic mean of precision and recall over words, repeated words counted."""
    wanted, found = plain(reference).split(), plain(answer).split()
    return bag_f1(found, wanted) if wanted and found else float(wanted == found)


def provide() -> None:
    """Make `transformers.data.metrics.squad_metrics` importable if transformers does not have it."""
    if PACKAGE not in sys.modules and find_spec(PACKAGE) is None:
        package = ModuleType(PACKAGE)
        package.squad_metrics = sys.modules[__name__]  # type: ignore[attr-defined]
        sys.modules |= {PACKAGE: package, f"{PACKAGE}.squad_metrics": sys.modules[__name__]}
