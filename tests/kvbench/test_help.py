"""Help at 80 and at 140 columns: every command's, and its commands' own."""

from contextlib import suppress
from importlib import import_module

import pytest
from command_lines import MAINS

from kvbench.cli import main
from kvbench.config.tree import names

HELPS = (
    *("", "policy", "model task experiment launcher logger", *MAINS, "sweep resume"),
    *("results collect", "results curve", "tables run", "tables compare"),
)


def help_of(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    command, *words = line.split() or [""]
    words = words if command in MAINS else line.split()
    with suppress(SystemExit):  # argparse's own
        assert import_module(MAINS.get(command, "kvbench.cli")).main([*words, "--help"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("line", HELPS)
def test_help_fits_the_terminal_and_says_the_same_at_every_width(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = help_of(line, capsys)
        assert [one for one in lines if len(one) > columns] == []
        said[columns] = " ".join(lines).split()
    assert said[80] == said[140]  # no word was cut


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(help_of("", capsys))
    assert [name for name in MAINS if f"python -m kvbench.{name} " not in said] == []


def test_every_policy_is_explained_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["--help", "policy"]) == 0
    said = capsys.readouterr().out
    begun = [line.split() for line in said.splitlines() if line[:2] == "  " and line[2] != " "]
    assert [words[0] for words in begun] == list(names("policy"))
    assert all(len(words) > 3 for words in begun)
    assert "  snapkv                       What the observation window attends to, pooled (arXiv 2404.14469);" in said
