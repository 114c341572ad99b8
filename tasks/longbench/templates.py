"""LongBench's prompt templates: read from the installed lm-eval, mended where it differs, checked by their hash."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import yaml

from kvbench.tasks.longbench.subsets import Subset

SLOTS = {"{{context}}": "{context}", "{{question}}": "{input}", "{{input}}": "{input}"}

# lm-eval 0.4.13 dropped white space from six of them.
_MENDED = {
    "triviaqa": ("{context}\n{input}", "{context}\n\n{input}"),
    "samsum": ("{context}\n{input}", "{context}\n\n{input}"),
    "passage_count": ("answer is:", "answer is: "),
    "passage_retrieval_en": ("answer is:", "answer is: "),
    "lcc": ("line of code:", "line of code:\n"),
    "repobench-p": ("line of code:", "line of code:\n"),
}


class _Loader(yaml.SafeLoader):
    """Plain YAML, in which lm-eval's `!function` is a word like any other."""


_Loader.add_constructor("!function", lambda _, node: node.value)


@cache
def template(subset: Subset) -> str:
    """The official template, with slots {context} and {input}.

    Raises ValueError if the installed lm-eval has no such template, or another one than was published.
    """
    spec = find_spec("lm_eval")  # finds the package without importing it
    assert spec is not None, "lm-eval is a dependency"
    assert spec.origin is not None
    path = Path(spec.origin).parent / "tasks" / "longbench" / f"{subset.name}.yaml"
    try:
        text: str = yaml.load(path.read_text(encoding="utf-8"), _Loader)["doc_to_text"]
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise _other_version(subset, type(error).__name__) from error
    for theirs, ours in SLOTS.items():
        text = text.replace(theirs, ours)
    text = text.replace(*_MENDED.get(subset.name, ("", "")))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if not digest.startswith(subset.sha):
        raise _other_version(subset, f"sha256 {digest[:12]} is not {subset.sha}")
    return text


def _other_version(subset: Subset, what: str) -> ValueError:
    return ValueError(
        f"subset={subset.name}: lm-eval {version('lm-eval')} does not hold LongBench's template as it was published "
        f"({what}): pip install lm-eval==0.4.13"
    )
