"""SQuAD's two scores under the module name that lm-eval's tasks import, which transformers 5 no longer has.

Source: Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1: exact match and F1 over words, ignoring articles and
punctuation; with SQuAD 2.0's rule that an empty answer is matched by an empty answer alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from kvbench.tasks.longbench.metrics import plain
from kvbench.tasks.scores import bag_f1

PACKAGE = "transformers.data.metrics"


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    return " ".join(plain(text).split())


def compute_exact(reference: str, answer: str) -> int:
    """1 if both are the same once normalised."""
    return int(normalize_answer(reference) == normalize_answer(answer))


def compute_f1(reference: str, answer: str) -> float:
    """Harmonic mean of the shares of their words that both have, counted as often as they stand."""
    wanted, found = normalize_answer(reference).split(), normalize_answer(answer).split()
    return bag_f1(found, wanted) if wanted and found else float(wanted == found)


@contextmanager
def importable() -> Iterator[None]:
    """While tasks are loaded, `transformers.data.metrics.squad_metrics` is there: its own, or else this module."""
    if find_spec(PACKAGE) is not None:
        yield
        return
    package = ModuleType(PACKAGE)
    package.squad_metrics = sys.modules[__name__]  # type: ignore[attr-defined]
    ours = {PACKAGE: package, f"{PACKAGE}.squad_metrics": sys.modules[__name__]}
    sys.modules.update(ours)
    try:
        yield
    finally:  # these two alone: what else was imported meanwhile stays
        for name in ours:
            del sys.modules[name]
