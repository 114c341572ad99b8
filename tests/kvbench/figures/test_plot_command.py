"""`python -m kvbench.plot`: a picture for all there are data for, and a sentence for what cannot be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.plot import main


def test_a_folder_gets_every_picture_there_is_data_for(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(small), "-o", str(tmp_path / "pictures"), "--format", "png"]) == 0
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == ["budget.png", "bytes.png", "pareto.png"]
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "-o", "x.svg"], "nowhere does not exist"),
        (["{runs}", "-o", "x.jpeg"], "must end in one of .svg, .png, .pdf"),
        (["{runs}", "-o", "x.svg", "--kind", "nll"], "--kind nll has nothing to draw: no run on disk has scored"),
        (
            ["{runs}", "-o", "x.svg", "--policy", "snapvk"],
            "--policy snapvk is not among the runs (there are: cake, full, tova)",
        ),
        (["{runs}", "-o", "x.svg", "--width", "1"], "--width 1 is too narrow for this picture, which needs 2.3 inches"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(
    arguments: list[str], sentence: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "table.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    assert main([word.replace("{runs}", str(small)) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("kvbench: ") == 1 + error.count("kvbench: no picture")
