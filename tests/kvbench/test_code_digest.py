"""The digest of the code that computes: other code, other digest; other words, the same one."""

import sys
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.identity import code_digest as digests

CODE = '"""A part."""\n\nX = 1  # one\n\n\ndef f(a: int) -> int:\n    """Doc."""\n    return a + X\n'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_part", raising=False)
    return tmp_path / "own_part.py"


def digest(module: Path, text: str) -> str:
    module.write_text(text)
    sys.modules.pop("own_part", None)
    __import__("own_part")
    digests._digest.cache_clear()
    return digests.code_digest({"class": "own_part.Part", "inner": [{"class": "kvbench.policies.policy.Policy"}]})


def test_code_changes_the_digest_and_comments_docstrings_and_layout_do_not(module: Path) -> None:
    first = digest(module, CODE)
    assert digest(module, CODE.replace("# one", "# the first number").replace("A part", "Mine")) == first
    other = CODE.replace('"""Doc."""', '"""What it does."""').replace("a + X", "(a +\n            X)")
    assert digest(module, other) == first
    assert digest(module, CODE.replace("a + X", "a - X")) != first
    assert len(first) == 16


def test_code_of_the_package_counts_whoever_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(text: str) -> str:
        (tmp_path / "policies").mkdir(exist_ok=True)
        (tmp_path / "policies" / "part.py").write_text(text)
        digests._own.cache_clear()
        digests._digest.cache_clear()
        return digests.code_digest({})

    monkeypatch.setattr(digests, "__file__", str(tmp_path / "identity" / "code_digest.py"))
    first = own(CODE)
    assert own(CODE + "# more\n") == first
    assert own(CODE + "Y = 2\n") != first
    monkeypatch.undo()
    digests._own.cache_clear()
    digests._digest.cache_clear()


<<<<<<< HEAD
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


CACHE = """attention audit budgets cache caller device_batch device_part eviction group group_attention hook interface
    join layer layout model_layer pressed read_counts reading recurrent registration rerotate rotary saving
    shared state steps uncompiled"""
ENGINE = """answers batch device_memory generate likelihood one_by_one prefill prompts scheduler sequence"""
IDENTITY = "reading"
INFERENCE = """answer context cuda_graph logits pre_pass prefill press rating request sampling teacher_forcing turns"""
KERNELS = """decode prompt query_sums references tiles"""
POLICIES = """allocators.allocator allocators.uniform checks constants describe draws latents layer_budgets mergers.drop
    mergers.merger model_layer needs observation policy policy_checks pre_passes.pre_pass press ranking
    readers.reader schedule scorers.knorm scorers.random scorers.scorer selections.selection stacked
    stores.dense stores.slot_store stores.slots stores.store stores.store_list values.value"""
RECORDS = "kept_heads sample"


def test_what_a_run_of_knorm_on_needles_reads() -> None:
    rooms = {
        "cache": CACHE,
        "engine": ENGINE,
        "identity": IDENTITY,
        "inference": INFERENCE,
        "kernels": KERNELS,
        "models": "cache_shapes gguf loading prompts shared tokens trial",
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
=======
def test_a_class_without_a_file_is_refused_where_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[__name__], "__file__")
    with pytest.raises(UsageError, match="has no file: move it to one"):
        digests.check_files({"class": f"{__name__}.Part"})
>>>>>>> main
