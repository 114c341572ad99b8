"""The commands of docs/answers.md print what the page shows."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from shown_outputs import outputs
from shown_tables import shown_rows

from kvbench.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "answers.md"


def without_times(text: str) -> list[list[str]]:
    """The rows of a table; of rows of presses, which run alone, without prefill, decode and milliseconds per token."""
    times = ("prefill" in text) + ("decode s" in text or "decode\n" in text) + ("ms/token" in text)
    return [row[: len(row) - times] for row in shown_rows(text)]


@pytest.mark.slow("runs commands on the pocket model")
@pytest.mark.parametrize("block", outputs().shown(PAGE), ids=lambda block: block.splitlines()[0][2:])
def test_the_output_of_a_command_equals_the_page(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    outputs().write_files(PAGE, tmp_path)
    shown = re.split(r"^\$ .*\n", block, flags=re.MULTILINE)[1:]
    for command, expected in zip(outputs().commands(block), shown, strict=True):
        words = shlex.split(command)
        if words[0] == "kvbench" and words[1] not in COMMANDS.places:
            assert main([*words[1:], "device=cpu"]) == 0
            assert without_times(capsys.readouterr().out) == without_times(expected) != []
        else:
            done = subprocess.run(outputs().in_python(words), capture_output=True, text=True, check=True)
            assert done.stdout == expected


def test_every_question_names_its_issue_and_has_a_command() -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) == 11
    for section in sections:
        assert re.search(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", section), section.splitlines()[0]
        assert re.search(r"\n\$ (python -|kvbench )", section)
