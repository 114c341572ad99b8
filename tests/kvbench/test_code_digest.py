"""The digest of the code that computes: other code, other digest; other words, the same one."""

import sys
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.run import digests

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
    digests._code_digest.cache_clear()
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
        digests._own_code.cache_clear()
        digests._code_digest.cache_clear()
        return digests.code_digest({})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "__file__", str(tmp_path / "run" / "run.py"))
    first = own(CODE)
    assert own(CODE + "# more\n") == first
    assert own(CODE + "Y = 2\n") != first
    assert own(CODE) == first
    with monkeypatch.context() as parsing:
        parsing.setattr(digests, "_source", None)  # the digest of this code is known
        assert own(CODE) == first
    (stored,) = (tmp_path / "cache" / "kvbench" / "code").iterdir()
    stored.write_text("damaged")
    assert own(CODE) == first
    monkeypatch.undo()
    digests._own_code.cache_clear()
    digests._code_digest.cache_clear()


def test_a_class_without_a_file_is_refused_where_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[__name__], "__file__")
    with pytest.raises(UsageError, match="has no file: move it to one"):
        digests.check_files({"class": f"{__name__}.Part"})
