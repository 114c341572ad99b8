"""`kvbench policies`, `tasks` and `models`: they list what exists, and describe it by its own docstrings and checks."""

import dataclasses
import re
from pathlib import Path

import click
import pytest

from kvbench.cli import main
from kvbench.config.completion import complete_overrides
from kvbench.config.compose import CONF, names
from kvbench.config.documentation import documentation, families, first_sentence
from kvbench.config.parts import part_class
from kvbench.models.files import ModelSpec
from kvbench.policies.policy import Policy
from kvbench.policies.press import KVPress
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def refusals(text: str) -> dict[str, str]:
    """The forms below "Refuses" and their messages, which may be folded."""
    block = text.partition("\nRefuses\n")[2].partition("\n\n")[0]
    joined = re.sub(r"\n {5,}", " ", block)
    return dict(re.match(r"  (\S+(?: \S+)*?)  +(.*)", line).groups() for line in joined.splitlines())


def test_the_lists_have_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    for command, group in (("tasks", "task"), ("models", "model")):
        listed = re.findall(r"^  (\S+)", shown(capsys, command), re.MULTILINE)
        assert sorted(listed) == sorted(names(group))
    text = " ".join(shown(capsys, "policies").split())
    for policy, variants in families().items():
        assert f" {policy} " in text
        assert all(variant.removeprefix(policy) in text for variant in variants)
    assert all(f" {wrapper}_ " in text for wrapper in names("wrapper"))


def test_a_policy_is_described_with_its_equation_fields_source_and_requirements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, "policies", "snapkv")
    assert "    s_j = max_(|i - j| <= floor(kernel / 2)) a_i\n" in text
    assert re.search(r"^  policy\.scorer\.kernel +7 +odd number of pooled neighbours\.$", text, re.MULTILINE)
    assert re.search(r"^  policy\.scorer\.aggregate +mean ", text, re.MULTILINE)  # left to the class's default
    assert "Source: Li et al. 2024, arXiv 2404.14469" in text
    assert "decoding keeps every new token above the budget (decode=grow)" in text
    assert "at least 32, or a share" in text  # the window is always kept
    assert all(line == line.rstrip() for line in text.splitlines())


def test_what_a_policy_refuses_is_what_a_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    found = refusals(shown(capsys, "policies", "cake"))
    assert {"schedule=blocks", "p2a_", "ada_"} <= set(found)  # its budgets need all layers, and are its own
    assert "schedule=prompt" not in found
    for form, message in found.items():
        policy, fields = ("cake", dict([form.split("=")])) if "=" in form else (f"{form}cake", {})
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the sentence is looked at below
            build_run(run_config("pocket", policy, "niah", budget=1048576, **fields))
        assert message in " ".join(str(refused.value).split())


def test_composed_names_own_folders_and_wrong_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert re.search(r"policy\.store\.group +32 ", shown(capsys, "policies", "snapkv_kivi_g32"))
    assert "kvbench.policies.values.caote.Caote" in shown(capsys, "policies", "caote_knorm")
    assert re.search(r"task\.task +gsm8k ", shown(capsys, "tasks", "lm_eval/gsm8k"))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("# My own.\ndefaults: [snapkv, _self_]\nscorer: {window: 16}\n")
    assert "mine  My own." in " ".join(shown(capsys, "policies", "-cd", str(tmp_path)).split()).replace("mine", "mine ")
    assert re.search(r"policy\.scorer\.window +16 ", shown(capsys, "policies", "mine", "-cd", str(tmp_path)))
    assert main(["policies", "snpkv"]) == 2
    assert "policy=snpkv does not exist: did you mean snapkv" in capsys.readouterr().err


def test_every_field_of_every_part_task_and_model_has_a_meaning() -> None:
    files = [file for group in ("policy", "wrapper", "task") for file in (CONF / group).rglob("*.yaml")]
    targets = {name for file in files for name in re.findall(r"_target_: *([\w.]+)", file.read_text())}
    parts = {part_class({"_target_": name}) for name in targets} - {Policy, KVPress}  # their fields are the parts
    assert len(parts) > 100
    for part in {*parts, ModelSpec}:
        found = documentation(part)
        silent = [one.name for one in dataclasses.fields(part) if one.init and not found.fields.get(one.name)]
        assert found.idea, part
        assert silent == [], part


def test_the_first_sentence_ends_at_a_full_stop_but_not_at_dots() -> None:
    assert first_sentence("One (2024, v1.5). Two.") == "One (2024, v1.5)."
    assert first_sentence("The format of A, B, ... and C. Two.") == "The format of A, B, ... and C."


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        (["policy=cake"], "policy.scorer.g", ["policy.scorer.gamma="]),
        (
            ["policy=cake"],
            "policy.scorer.indicator=m",
            ["policy.scorer.indicator=mean_var", "policy.scorer.indicator=mean"],
        ),
        ([], "policy.sco", ["policy.scorer."]),
        (["task=ruler/vt"], "task.ho", ["task.hops="]),
        ([], "task=lm_eval/gsm8k_cot_l", ["task=lm_eval/gsm8k_cot_llama"]),
        ([], "task.dive", ["task.divergence="]),
        ([], "task.chat=", ["task.chat=true", "task.chat=false"]),
        ([], "model.hub", ["model.hub_id="]),
        (["policy=unknown"], "policy.", []),
        ([], "engine.r", ["engine.rows="]),
    ],
)
def test_fields_of_parts_and_names_of_suites_are_completed(
    words: list[str], incomplete: str, expected: list[str]
) -> None:
    context = click.Context(click.Command("kvbench"))
    context.args = words
    assert complete_overrides(context, None, incomplete) == expected
