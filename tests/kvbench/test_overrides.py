"""The command line is checked before anything runs: what is rewritten for Hydra, and what is refused in which words."""

from pathlib import Path

import pytest

from kvbench.config.choices import choices
from kvbench.config.overrides import check, quoted
from kvbench.config.presets import preset_names
from kvbench.terminal.errors import UsageError


def test_no_arguments_ask_for_one_cell_of_the_pocket_model() -> None:
    asked = check([])
    assert not asked.is_sweep
    assert asked.config.model.bundled == "pocket"
    assert asked.config.policy.value._target_.endswith("Caote")
    assert asked.config.task.name == "niah"


@pytest.mark.parametrize("group", ["model", "logger", "experiment"])  # policies and tasks have tests of their own
def test_every_choice_of_a_group_composes(group: str) -> None:
    for name in (
        name for name in choices(group) if not (group == "experiment" and "/" in name)
    ):  # tables: test_experiments
        check([f"{group}={name}"])


def test_help_lists_every_preset() -> None:
    assert list(choices("policy")) == preset_names()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("policy=snapk", r"policy 'snapk' does not exist; did you mean snapkv"),
        ("policy=caote_nothing", r"policy 'caote_nothing' does not exist"),
        ("task=nia", r"task=nia is unknown, did you mean niah.*--help lists all"),
        ("task=vt", r"task=vt is unknown, did you mean ruler/vt"),
        ("task=ruler/niah", r"did you mean ruler/niah_multikey_1"),
        ("task=gsm8k", r"those of lm-eval are chosen as task=lm_eval/gsm8k$"),
        ("model=llama3", r"did you mean llama31_8b_instruct or llama32_3b_instruct or llama3_70b_instruct"),
        ("model=lama31_8b_instruct", r"model=lama31_8b_instruct is unknown, did you mean llama31_8b_instruct"),
        ("logger=csv", r"logger=csv is unknown, choose one of none, wandb"),
        ("experiment=none", r"experiment=none is unknown"),
        ("bugdet=3", r"bugdet is not a field, did you mean budget\?"),
        ("polcy=snapkv", r"polcy is not a field, did you mean policy\?"),
        ("policy.scorer.windw=3", r"policy\.scorer\.windw is not a field of policy\.scorer, did you mean window\?"),
        ("policy.scorer.window.x=3", r"policy\.scorer\.window\.x is not a field"),
        ("model.pth=/x", r"model\.pth is not a field of model, did you mean path\?"),
        ("task.lenghts=[1]", r"task\.lenghts is not a field of task, did you mean lengths\?"),
        ("budget", r"budget cannot be read: write field=value"),
        ("budget={", r"budget=\{ cannot be read"),
        ("policy=full,snapkv", r"policy=full,snapkv names several values: add -m"),
    ],
)
def test_a_wrong_argument_is_one_sentence(argument: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        check([argument])
    assert "\n" not in str(caught.value)


def test_one_wrong_name_in_a_sweep_is_found_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="policy 'nope' does not exist"):
        check(["-m", "policy=full,nope", "budget=1,2"])


def test_a_policy_without_a_file_composes_and_its_parts_can_be_set() -> None:
    asked = check(["policy=caote_knorm", "policy.schedule.size=32"])
    assert asked.config.policy.scorer._target_.endswith("KNorm")
    assert asked.config.policy.value._target_.endswith("Caote")
    assert asked.config.policy.schedule.size == 32


def test_a_field_left_to_its_default_can_be_set() -> None:
    asked = check(["task.frame='{context} {question}'"])
    assert asked.config.task.frame == "{context} {question}"


def test_in_a_sweep_a_field_need_exist_for_one_of_the_policies_only() -> None:
    asked = check(["-m", "policy=knorm,snapkv", "policy.scorer.window=16"])
    assert asked.arguments == ["-m", "policy=knorm,snapkv", "++policy.scorer.window=16"]
    with pytest.raises(UsageError, match="is not a field"):
        check(["-m", "policy=knorm,full", "policy.scorer.window=16"])


def test_a_field_of_swept_choices_need_not_exist_in_the_default_one() -> None:
    asked = check(["-m", "task=ruler/niah_single_1,ruler/vt", "task.length=1024"])
    assert asked.arguments[-1] == "++task.length=1024"


@pytest.mark.parametrize("path", ["/a/folder", "~/odd 'name' = {x}", "../up", "down/there"])
def test_a_folder_as_model_is_a_path(path: str) -> None:
    asked = check([f"model={path}"])
    assert asked.config.model.path == path


def test_several_folders_are_swept_unless_the_comma_is_in_a_name(tmp_path: Path) -> None:
    assert check(["-m", "model=/a/b,/c d"]).arguments == ["-m", "model=local", "model.path='/a/b','/c d'"]
    (tmp_path / "a,b").mkdir()
    assert check([f"model={tmp_path}/a,b"]).config.model.path == f"{tmp_path}/a,b"


def test_an_experiment_lists_only_what_differs_and_the_command_line_wins() -> None:
    demo = check(["experiment=demo"])
    assert demo.is_sweep
    assert demo.config.hydra.sweeper.params.policy == "full,streamingllm,h2o_norecent,caote_h2o,snapkv,caote_snapkv"
    assert check(["experiment=demo", "budget=99"]).config.budget == 99


def test_policies_of_ones_own_lie_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("defaults: [snapkv, _self_]\nscorer: {window: 8}\n")
    asked = check(["--config-dir", str(tmp_path), "policy=mine"])
    assert asked.config.policy.scorer.window == 8


@pytest.mark.parametrize("value", ["plain", "with 'quotes'", "a\\b", "a\\'b\\", "{a: [1, 2]}", "a,b"])
def test_quoted_values_arrive_as_they_are(value: str) -> None:
    assert check([f"out={quoted(value)}"]).config.out == value
