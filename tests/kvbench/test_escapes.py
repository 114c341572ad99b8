"""Escapes in double quotes on the command line mean what they mean in YAML."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.cli import main
from kvbench.terminal.escapes import unescaped
from kvbench.tools.diagnose import runs_of

TEXTS = [
    *(r"\n", r"a\tb", r"\\n", r"\\", r"a\\", r"\"", r"\\\"", r"say \"\\\" twice", r"\x41\u00e9\U0001F600", "plain"),
    *(r"\0\a\b\v\f\r\e\ \/\N\_\L\P", "", r"it's\n", r"{answer}\n\n{context}"),
]


def value(word: str) -> Any:
    return OverridesParser.create().parse_override(unescaped(word)).value()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_double_quotes_is_that_of_yaml(text: str) -> None:
    expected = yaml.safe_load(f'"{text}"')
    assert value(f'task.question="{text}"') == expected
    assert value(f'+task.stop=["{text}","{text}"]') == [expected, expected]


def test_fields_of_sub_commands_are_yaml() -> None:
    """`diagnose` and `calibrate`; `memory` and `bench` have no fields that contain text."""
    words = [r'task.question="\nQ: {keys}\t?\n"', 'task.answer_prefix=""', r'task.stop=["\n","\u002e",\n]', "limit=1"]
    task = runs_of(["policy=full", *words])[0].task
    assert (task.question, task.stop) == ("\nQ: {keys}\t?\n", ("\n", ".", "\\n"))


def test_other_words_are_unchanged() -> None:
    for word in (r"task.stop=['\n']", r"a=\n", r'--title="\n"', r"""a='"\n"'""", r'a="\d+"', "policy=snapkv,h2o"):
        assert unescaped(word) == word


def test_a_newline_on_the_command_line_ends_answers(tmp_path: Path) -> None:
    words = ["model=pocket", "task=niah", "task.lengths=[150]", "limit=1", "policy=full", f"out={tmp_path}"]
    words += [r'task.question="\nQ: {keys}\t?\n"', 'task.answer_prefix=""', r'task.stop=["\n","\u002e"]']
    assert main(words) == 0
    (file,) = tmp_path.glob("*/config.yaml")
    task = yaml.safe_load(file.read_text())["config"]["task"]
    assert (task["stop"], task["question"]) == (["\n", "."], "\nQ: {keys}\t?\n")
    (sample,) = [json.loads(line) for line in file.with_name("samples.jsonl").read_text().splitlines()]
    assert "\n" not in sample["output"]
