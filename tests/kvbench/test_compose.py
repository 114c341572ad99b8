"""The cells of a sweep are composed once per choice, and are what Hydra's own compose makes of each of them."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from kvbench.config.choices import choices
from kvbench.config.compose import Choices, Composer, parse, plain
from kvbench.config.overrides import check
from kvbench.terminal.errors import UsageError


def by_hydra(*overrides: str) -> dict[str, Any]:
    """The oracle: one configuration as Hydra composes it."""
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@pytest.mark.parametrize("group", ["model", "policy", "task"])
def test_every_choice_is_composed_as_hydra_does(group: str) -> None:
    of_one_sweep = Choices(Composer(), [])
    for name in choices(group)[::8]:  # the slow suite takes all of them
        assert of_one_sweep.part(group, name) == by_hydra(f"{group}={name}")[group], name


@pytest.mark.slow
@pytest.mark.parametrize("group", ["model", "policy", "task"])
def test_all_choices_are_composed_as_hydra_does(group: str) -> None:
    of_one_sweep = Choices(Composer(), [])
    for name in choices(group):
        assert of_one_sweep.part(group, name) == by_hydra(f"{group}={name}")[group], name


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_is_composed_as_hydra_does(experiment: str) -> None:
    asked = check([f"experiment={experiment}", "budget=99"])
    listed = asked.config.hydra.sweeper.params.get("policy", "").split(",") if asked.is_sweep else [""]
    assert len(asked.cells) == len(listed)
    for cell, policy in list(zip(asked.cells, listed, strict=True))[:2]:
        overrides = [f"experiment={experiment}", "budget=99", *([f"policy={policy}"] if policy else [])]
        assert cell.config == by_hydra(*overrides)


def test_an_experiment_whose_policy_is_swept_keeps_what_it_sets_for_every_one(tmp_path: Path) -> None:
    """The experiment's `policy.allocator.tau1` goes into whatever policy is chosen, as Hydra merges it."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/warm.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /policy: cake\npolicy: {allocator: {tau1: 1.6}}\n"
    )
    given = ["-m", "--config-dir", str(tmp_path), "experiment=warm"]
    cells = check([*given, "budget=1,2"]).cells
    assert [cell.config["budget"] for cell in cells] == [1, 2]
    assert {cell.config["policy"]["allocator"]["tau1"] for cell in cells} == {1.6}
    swept = check([*given, "policy=cake,p2a_snapkv"]).cells
    assert [cell.config for cell in swept] == [
        by_hydra(f"policy={name}", "+policy.allocator.tau1=1.6") for name in ("cake", "p2a_snapkv")
    ]


VALUES = (
    "task.lengths=[700,1024]",
    "++task.frame='a, b = \"{context}\" {question}'",
    "budget=0.5",
    "limit=null",
    "out='results/a b'",
    "++policy.scorer.window=16",
    "engine.cuda_graph=true",
    "+model.shape={layers: 2, heads: 4}",
    "logger=wandb",
    "logger.project=1e3",
    "~task.stop",
)


def test_values_are_laid_over_choices_as_hydra_does() -> None:
    lists = ("policy=snapkv,caote_knorm", "task=niah,niah_multikey", "seed=range(0,2)")
    cells = check(["-m", *lists, *VALUES]).cells
    product = itertools.product(("snapkv", "caote_knorm"), ("niah", "niah_multikey"), (0, 1))
    for cell, (policy, task, seed) in zip(cells, product, strict=True):
        assert cell.config == by_hydra(f"policy={policy}", f"task={task}", f"seed={seed}", *VALUES)
        assert cell.title == f"policy={policy} task={task} seed={seed}"
        assert cell.preset == by_hydra(f"policy={policy}", f"task={task}")
        assert cell.choices == {"model": "pocket", "policy": policy, "task": task}


def test_cells_share_nothing_that_one_of_them_could_change() -> None:
    first, second = check(["-m", "policy=snapkv", "budget=64,128"]).cells
    first.config["policy"]["scorer"]["window"] = 1
    assert second.config["policy"]["scorer"]["window"] == 32


def test_a_pattern_stands_for_the_names_it_matches() -> None:
    cells = check(["-m", "policy=glob(caote_*)"]).cells
    assert [cell.choices["policy"] for cell in cells] == ["caote_h2o", "caote_snapkv", "caote_tova"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["policy=glob(nothing*)"], r"policy=glob\(nothing\*\) matches nothing"),
        (["budget=interval(1,2)"], r"budget=interval\(1,2\) names no values to run"),
        (["~task.nothing"], "Could not delete from config. 'task.nothing' does not exist"),
        (["hydra/launcher=joblib"], r"hydra/launcher=joblib has no effect here: .*launcher\.workers=2"),
        (["hydra.launcher.partition=gpu"], r"hydra\.launcher\.partition=gpu has no effect here"),
        (["out='${nowhere}'"], "nowhere"),
    ],
)
def test_what_cannot_be_expanded_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        assert check(["-m", *arguments]).cells
    assert "\n" not in str(caught.value)


def test_a_policy_of_ones_own_may_refer_to_other_fields(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("defaults: [snapkv, _self_]\nscorer: {window: '${budget}'}\n")
    cells = check(["-m", "--config-dir", str(tmp_path), "policy=snapkv,mine", "budget=32,48"]).cells
    assert [cell.config["policy"]["scorer"]["window"] for cell in cells] == [32, 32, 32, 48]


def test_three_hundred_cells_take_seconds() -> None:
    began = time.monotonic()
    names = [name for name in choices("policy") if name != "full"][:60]
    cells = check(["-m", f"policy={','.join(names)}", "budget=64,128,256,512,1024"]).cells
    assert len(cells) == 300
    assert time.monotonic() - began < 10  # 0.5 s on an idle core; composing each with Hydra: 25 s


def test_plain_data_says_nothing_of_hydra() -> None:
    assert "hydra" not in plain(Composer().compose([parse("budget=1")]))


def test_a_lone_cell_is_called_by_what_it_is_not_by_where_it_is_computed() -> None:
    aside = ("launcher=slurm", "launcher.gpus_per_node=0", "out=/tmp/x", "logger=wandb", "debug=true")
    assert check([*aside, "policy=tova", "budget=40"]).cells[0].title == "policy=tova budget=40"
    assert check(aside).cells[0].title == "policy=caote_snapkv"
