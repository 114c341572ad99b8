"""The blocks of docs/python.md run, one after the other, as a reader would run them."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = ModuleType("notebook")  # a module without a file, as a notebook's is
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), notebook.__dict__)
    assert len(blocks) > 5
    assert vars(notebook)["answers"] == [" 4071234"]
    assert "policy=snapk does not exist" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len([*(tmp_path / "results/runs").iterdir()]) == len(vars(notebook)["everything"]) == 1
    assert len(vars(notebook)["everything"][0].samples) == 4
    assert max(row.kept_tokens for row in vars(notebook)["table"].itertuples() if row.policy != "full") < 200
