"""The identity of a run follows the code that computes it, and nothing else of the code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kvbench import tasks
from kvbench.identity.cell import COMPUTES, describe
from kvbench.identity.code_digest import _definitions, code_digest, modules_of, reached
from kvbench.policies.scorers.knorm import KNorm
from kvbench.policies.scorers.snapkv import SnapKV

SCORER = '''
"""Scores."""

from {name}.helper import weight


class Mine:
    """Keeps the heavy."""

    def score(self, x: int) -> int:
        """A number."""
        return weight(x) + 1  # why
'''
HELPER = """
def weight(x: int) -> int:
    return 2 * x
"""
Digest = Callable[..., str]
number = itertools.count()


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """The digest of a package of these files (without .py), rooted in its module `scorer`; a new package every time."""
    monkeypatch.syspath_prepend(tmp_path)

    def of(root: str = "scorer", **files: str) -> str:
        name = f"parts_{next(number)}"
        (tmp_path / name).mkdir()
        for file, text in {"__init__": "", "helper": HELPER, "scorer": SCORER, **files}.items():
            (tmp_path / name / f"{file}.py").write_text(text.replace("{name}", name))
        return code_digest([f"{name}.{root}"])

    return of


def test_comments_docstrings_and_layout_do_not_count(digest: Digest) -> None:
    changed = SCORER.replace("  # why", "").replace('"""Scores."""', '"""What it scores."""\n# a comment')
    changed = changed.replace('        """A number."""\n', "").replace(
        "weight(x) + 1", "(\n            weight(x) + 1\n        )"
    )
    assert changed != SCORER
    assert digest(scorer=changed) == digest()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("scorer", "+ 1", "+ 2"), ("helper", "2 * x", "3 * x"), ("scorer", "def score", "def rank")],
)
def test_what_the_code_does_counts_in_a_module_and_in_those_it_imports(
    digest: Digest, file: str, old: str, new: str
) -> None:
    text = {"scorer": SCORER, "helper": HELPER}[file]
    assert digest(**{file: text.replace(old, new)}) != digest()


def test_what_no_module_of_the_run_imports_does_not_count(digest: Digest) -> None:
    assert digest(table="WIDTH = 80") == digest(table="WIDTH = 100") == digest()


@pytest.mark.parametrize(
    "place",
    [
        "def late():\n    {}",
        "class Late:\n    def late(self):\n        {}",
        "try:\n    import nothing_of_the_kind\nexcept ImportError:\n    {}",
        "try:\n    pass\nfinally:\n    {}",
        "if 1 > 2:\n    pass\nelse:\n    {}",
        "with memoryview(b''):\n    {}",
        "while False:\n    pass\nelse:\n    {}",
        "match 1:\n    case 2:\n        {}",
    ],
)
def test_imports_are_followed_wherever_they_stand(digest: Digest, place: str) -> None:
    lazy = place.format("from . import extra")
    assert digest(helper=HELPER + lazy, extra="N = 1") != digest(helper=HELPER + lazy, extra="N = 2")


TELLING = """
import logging

log = logging.getLogger(__name__)


def weight(x: int) -> int:
    assert x >= 0, "negative"
    if x > 9:
        raise ValueError(f"x={x} is above 9", x)
    log.warning("weighing %d", x)
    return 2 * x
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"negative"', '"x is negative"'),
        ('f"x={x} is above 9"', '"x must be at most 9"'),
        ('log.warning("weighing %d", x)', 'log.info("x=%d", x)'),
    ],
)
def test_messages_do_not_count(digest: Digest, old: str, new: str) -> None:
    assert TELLING.replace(old, new) != TELLING
    assert digest(helper=TELLING.replace(old, new)) == digest(helper=TELLING)


TWO = "def light(x: int) -> int:\n    return x\n\n\ndef heavy(x: int) -> int:\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("imports", "others"),
    [
        ("from {name}.two import light as weight, heavy", "from {name}.two import light, heavy as weight"),
        (
            "from {name}.helper import weight\nfrom {name}.other import weight as unused",
            "from {name}.other import weight\nfrom {name}.helper import weight as unused",
        ),
    ],
)
def test_what_an_imported_name_stands_for_counts(digest: Digest, imports: str, others: str) -> None:
    files = {"two": TWO, "other": HELPER.replace("2 * x", "3 * x")}
    first, again, swapped = (
        digest(**files, scorer=SCORER.replace("from {name}.helper import weight", text))
        for text in (imports, imports, others)
    )
    assert first == again != swapped


CACHE = """attention audit budgets cache caller chunks device_batch device_evict device_slots evict evict_batches
    group group_attention hook interface join layer layer_rows layout model_layer pending pressed read_counts reading
    recent_queries recurrent registration rerotate rotary saving shared state step steps uncompiled"""
ENGINE = "answers batch device_memory likelihood one_by_one prefill prefill_examples prompts scheduler sequence"
IDENTITY = "reading"
INFERENCE = (
    "answer calls context cuda_graph generate generation logits pre_pass press rating sampling teacher_forcing turns"
)
KERNELS = "decode prompt query_sums references tiles"
POLICIES = """allocators.allocator allocators.uniform checks constants contents describe latents
    layer_budgets mergers.drop mergers.merger model_layer needs observation policy policy_checks
    pre_passes.pre_pass press ranking readers.reader schedule scorers.knorm scorers.scorer select
    selections.selection stacked stores.batch stores.combined stores.dense stores.per_sequence stores.ragged
    stores.slots stores.store values.value"""
RECORDS = "kept_heads sample"


def test_what_a_run_of_knorm_on_needles_reads() -> None:
    rooms = {
        "cache": CACHE,
        "engine": ENGINE,
        "identity": IDENTITY,
        "inference": INFERENCE,
        "kernels": KERNELS,
        "models": "cache_shapes loading prompts shared tokens trial",
        "policies": POLICIES,
        "records": RECORDS,
        "tasks": "haystack niah ruler.templates scores task text_files words",
    }
    read = {f"kvbench.{room}.{name}" for room, names in rooms.items() for name in names.split()} | {"kvbench.cache"}
    assert reached([*COMPUTES, *modules_of(describe(KNorm())), "kvbench.tasks.niah"]) == read


def test_the_tables_that_a_module_of_tasks_names_count() -> None:
    content = Path(tasks.__file__).with_name("data").joinpath("words.json").read_bytes()
    named = {
        name
        for name in ("words", "haystack", "niah")
        if sha256(content).hexdigest() in _definitions(f"kvbench.tasks.{name}")
    }
    assert named == {"words"}


def test_two_classes_of_the_same_name_are_two_policies() -> None:
    assert describe(SnapKV())["class"] == "kvbench.policies.scorers.snapkv.SnapKV"
