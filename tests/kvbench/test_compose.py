"""What a command line makes: the configuration of every cell, as Hydra itself would compose our files."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from kvbench.config.choices import choices
from kvbench.config.compose import Combination, Composer
from kvbench.config.grammar import quoted
from kvbench.config.overrides import check
from kvbench.errors import UsageError


def by_hydra(*overrides: str) -> dict[str, Any]:
    """The oracle: one configuration as Hydra composes it."""
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def cell(*arguments: str) -> Combination:
    (found,) = check(arguments).cells
    return found


@pytest.mark.parametrize(
    ("group", "step"),
    [(group, 8) for group in ("model", "policy", "task")]
    + [
        pytest.param(group, 1, marks=pytest.mark.slow("composes hundreds of configurations"))
        for group in ("model", "policy", "task")
    ],
)
def test_every_choice_is_read_as_hydra_composes_it(group: str, step: int) -> None:
    for name in choices(group)[::step]:
        assert Composer().part(group, name) == by_hydra(f"{group}={name}")[group], name


VALUES = (
    "task.lengths=[700,1024]",
    "budget=0.5",
    "limit=null",
    "out='results/a b'",
    "task.digits=5",
    "engine.cuda_graph=true",
    "engine={rows: 2}",
    "logger=wandb",
    "logger.project=1e3",
)


def test_values_are_laid_over_choices_as_hydra_does() -> None:
    lists = ("policy=snapkv,caote_h2o", "task=niah,niah_multikey", "seed=range(0,2)")
    cells = check(["-m", *lists, *VALUES]).cells
    product = itertools.product(("snapkv", "caote_h2o"), ("niah", "niah_multikey"), (0, 1))
    for found, (policy, task, seed) in zip(cells, product, strict=True):
        assert found.config == by_hydra(f"policy={policy}", f"task={task}", f"seed={seed}", *VALUES)
        assert found.title == f"policy={policy} task={task} seed={seed}"
        assert found.preset == by_hydra(f"policy={policy}", f"task={task}")
        assert [found.choices[group] for group in ("model", "policy", "task")] == ["pocket", policy, task]


def test_an_experiment_lists_only_what_differs_and_the_command_line_wins() -> None:
    asked = check(["experiment=demo", "budget=99"])
    assert asked.is_sweep
    policies = ["full", "streamingllm", "h2o_norecent", "caote_h2o", "snapkv", "caote_snapkv"]
    assert [found.choices["policy"] for found in asked.cells] == policies
    for found, policy in zip(asked.cells, policies, strict=True):
        expected = by_hydra("experiment=demo", "budget=99", f"policy={policy}")
        assert {key: value for key, value in expected.items() if key != "hydra"} == found.config
    assert check(["experiment=null"]).cells == check([]).cells


def test_an_experiment_whose_policy_is_swept_keeps_what_it_sets_for_every_one(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/warm.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /policy: cake\npolicy: {allocator: {tau1: 1.6}}\n"
    )
    given = ["-m", "--config-dir", str(tmp_path), "experiment=warm"]
    cells = check([*given, "budget=1,2"]).cells
    assert [(c.config["budget"], c.choices["policy"]) for c in cells] == [(1, "cake"), (2, "cake")]
    swept = check([*given, "policy=cake,p2a_snapkv"]).cells
    assert [c.config for c in swept] == [
        by_hydra(f"policy={name}", "+policy.allocator.tau1=1.6") for name in ("cake", "p2a_snapkv")
    ]


def test_files_of_ones_own_may_build_on_ours_and_refer_to_other_fields(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("defaults: [snapkv, _self_]\nscorer: {window: '${budget}'}\n")
    cells = check(["-m", "--config-dir", str(tmp_path), "policy=snapkv,mine", "budget=32,48"]).cells
    assert [found.config["policy"]["scorer"]["window"] for found in cells] == [32, 32, 32, 48]


def test_in_a_sweep_a_field_need_exist_for_one_of_the_choices_only() -> None:
    knorm, snapkv = check(["-m", "policy=knorm,snapkv", "policy.scorer.window=16"]).cells
    assert knorm.config["policy"]["scorer"]["window"] == snapkv.config["policy"]["scorer"]["window"] == 16
    with pytest.raises(UsageError, match="is not a field"):
        check(["-m", "policy=knorm,full", "policy.scorer.window=16"])
    for found in check(["-m", "task=ruler/niah_single_1,ruler/vt", "task.length=1024"]).cells:
        assert found.config["task"]["length"] == 1024


@pytest.mark.parametrize("path", ["/a/folder", "~/odd 'name' = {x}", "../up", "down/there"])
def test_a_folder_as_model_is_a_path(path: str) -> None:
    found = cell(f"model={path}")
    assert (found.choices["model"], found.config["model"]["path"]) == ("local", path)


def test_several_folders_are_swept_unless_the_comma_is_in_a_name(tmp_path: Path) -> None:
    assert [c.config["model"]["path"] for c in check(["-m", "model=/a/b,/c d"]).cells] == ["/a/b", "/c d"]
    (tmp_path / "a,b").mkdir()
    assert cell(f"model={tmp_path}/a,b").config["model"]["path"] == f"{tmp_path}/a,b"


@pytest.mark.parametrize("value", ["plain", "with 'quotes'", "a\\b", "a\\'b\\", "{a: [1, 2]}", "a,b", "Läufe/ünï"])
def test_quoted_values_arrive_as_they_are(value: str) -> None:
    assert cell(f"out={quoted(value)}").config["out"] == value
