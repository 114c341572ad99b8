"""Published numbers beside our runs: every number has a run or a reason, and only that run measures it."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import plotted_runs
import pytest

from kvbench.cli import main as kvbench
from kvbench.config.compose import CONF
from kvbench.config.presets import make_policy
from kvbench.papers import published
from kvbench.papers.cli import main
from kvbench.papers.cli import main as tables
from kvbench.papers.compare import Choice, compare
from kvbench.papers.layout import HOLE, longbench, numbers
from kvbench.papers.matching import differences
from kvbench.papers.protocol import Plan, plan, runs_of
from kvbench.policies.describe import describe
from kvbench.report.text_table import TextTable
from kvbench.results.loading import load_results, read_result
from kvbench.results.result import Result
from kvbench.results.samples import Sample

LLAMA, QASPER = "llama31_8b_instruct", "longbench_qasper"
POCKET = ["model=pocket", "task=niah,niah_multikey", "task.lengths=[512]", "budget=64,128", "block=32"]


@cache
def plans() -> list[Plan]:
    """The runs behind all published numbers."""
    return list({one.key: one for name in published.tables() for n in numbers(name) for one in runs_of(n)}.values())


def test_every_number_can_be_measured_or_has_a_reason() -> None:
    for number in (number for name in published.tables() for number in numbers(name)):
        own = plan(number)
        assert isinstance(own, Plan) or own.reason, number


def test_models_and_tasks_of_all_plans_exist() -> None:
    for one in plans():
        assert (CONF / "model" / f"{one.model}.yaml").exists()
        assert one.task.startswith("lm_eval/") or (CONF / "task" / f"{one.task}.yaml").exists(), one.task


def test_the_policy_of_every_plan_can_be_made_and_its_identity_is_recognised() -> None:
    kinds = {(one.policy, one.budget, *map(str, one.settings.items())): one for one in plans()}
    for one in kinds.values():
        fields = {k: v for k, v in one.settings.items() if not k.startswith(("task.", "model."))}
        policy = make_policy(one.policy, one.budget, **{k.removeprefix("policy."): v for k, v in fields.items()})
        identity = {"policy": describe(policy), "compress": "prompt"}
        assert differences(replace(one, settings=fields), identity) == []


PROTOCOLS = """\
caote/table2 Llama-3.1-8B-Instruct h2o 2048 qasper
    h2o_norecent 2048 longbench/qasper schedule=blocks block=128 decode=evict
caote/table2 Llama-3.1-8B-Instruct full None lcc
    full None longbench/lcc
cake/table7 Mistral-7B-Instruct-v0.3 cake 512 trec
    cake 512 longbench/trec schedule=prompt decode=evict
cake/table7 Mistral-7B-Instruct-v0.3 cake 1024 trec
    cake 1024 longbench/trec schedule=prompt decode=evict policy.allocator.tau1=0.8 policy.allocator.tau2=0.5
ott/table2 Llama-2-7B-chat-hf kivi_g128_r128 2.0 lcc
    kivi_g128_r128 None longbench/lcc task.extended=True
""".splitlines()
"""Numbers and their runs: CAOTE evicts in blocks of 128, its H2O has no recent window (section 4.1); the full cache
has no schedule, a store no budget; CAKE has the temperatures that its authors' code publishes."""


@pytest.mark.parametrize(("place", "run"), [*zip(PROTOCOLS[::2], PROTOCOLS[1::2], strict=True)])
def test_a_number_is_measured_as_its_paper_describes(place: str, run: str) -> None:
    table, *about = place.split()
    (own,) = (plan(n) for n in numbers(table) if [n.model, n.method, str(n.budget), n.task] == about)
    assert isinstance(own, Plan)
    settings = [f"{key}={value}" for key, value in own.settings.items()]
    assert [own.policy, str(own.budget), own.task, *settings] == run.split()


def sample(index: int, score: float | None, **fields: Any) -> Sample:
    held = {"kept_tokens": [[10, 20], [30, 40]], "cache_bytes": 3 * 2**19}
    return replace(plotted_runs.sample(index, 1.0), score=score, **{**held, **fields})


def made(out: Path, task: str, samples: list[Sample], policy: str = "caote_h2o", **changed: Any) -> Result:
    """A finished run of CAOTE's table 2 on disk, read back."""
    parts = plotted_runs.described(None if policy == "full" else policy, size=changed.pop("block", 128))
    parts["schedule"] |= changed.pop("schedule", {})
    about = {"budget": 2048, "model": LLAMA, "parts": parts, **changed}
    return read_result(plotted_runs.write_run(out, policy, samples, task=task, **about))


def line(table: TextTable, task: str, method: str = "H2O + CAOTE", budget: str = "2048") -> dict[str, str]:
    """The row of a number of Llama-3.1-8B-Instruct."""
    frame = table.frame
    own = (frame["model"] == "Llama-3.1-8B-Instruct") & (frame["budget"] == budget) & (frame["method"] == method)
    (found,) = frame[own & (frame["task"] == task)].to_dict("records")
    return {key: str(found[key]) for key in (*frame.columns[4:],)}


def test_a_comparison_shows_interval_difference_and_size(tmp_path: Path) -> None:
    """Two of four right: 50.00, by Wilson 15.00 to 85.00; the paper prints 38.34; tokens (10+20+30+40)/4.

    Predicted: 32 layers of 8 KV heads, 2,048 tokens of 2 x 128 numbers of 2 bytes, a position and a sum of attention:
    256 x 2048 x 520 / 2^20 = 260.0.
    """
    run = made(tmp_path, QASPER, [sample(i, float(i % 2)) for i in range(4)])
    table = compare("caote/table2", [run])
    assert line(table, "Qasper") == {
        "published": "38.34",
        "ours": "50.00",
        "95% interval": "15.00-85.00",
        "difference": "+11.66",
        "n": "4",
        "tokens": "25.0",
        "MiB": "1.500",
        "predicted": "260.0",
    }
    assert line(table, "TREC")["ours"] == HOLE
    assert table.notes[0] == "1 of 501 numbers measured, 500 without runs, 0 that cannot be measured."
    assert "kvbench tables run caote/table2" in table.notes


def suite(scores: dict[str, list[float]]) -> list[Sample]:
    pairs = [(task, score) for task, each in scores.items() for score in each]
    about = ({"benchmark": "longbench", "task": task, "subset": task} for task, _ in pairs)
    return [sample(i, score, metadata=next(about)) for i, (_, score) in enumerate(pairs)]


def test_an_average_weighs_every_task_the_same_and_needs_them_all(tmp_path: Path) -> None:
    """15 tasks of 0.5 (one of them with four examples), one of 1.0: (15 * 50 + 100) / 16 = 53.125."""
    tasks = longbench()
    scores = {task: [0.0, 1.0] for task in tasks} | {tasks[0]: [0.0, 1.0, 0.0, 1.0], tasks[1]: [1.0, 1.0]}
    whole = line(compare("caote/table2", [made(tmp_path, "longbench", suite(scores))]), "Avg.")
    assert (whole["ours"], whole["published"], whole["n"]) == ("53.12", "33.31", "34")
    low, high = map(float, whole["95% interval"].split("-"))
    assert low < 53.12 < high
    scores.pop("trec")
    table = compare("caote/table2", [made(tmp_path, "longbench", suite(scores))])
    assert line(table, "Avg.")["ours"] == HOLE
    assert line(table, "Qasper")["ours"] == "100.00"


def test_a_run_with_failed_examples_has_no_value(tmp_path: Path) -> None:
    run = made(tmp_path, QASPER, [sample(0, 1.0), plotted_runs.sample(1, None)])
    table = compare("caote/table2", [run])
    assert set(table.frame["ours"]) == {HOLE}
    assert f"1 number: 1 of 2 examples of {run.run_id} failed." in table.notes


def test_overrides_select_numbers_or_replace_values() -> None:
    """CAOTE, table 2: 17 numbers of Llama-3.1-8B's TOVA at 2,048; those at 4,096 are lost."""
    table = numbers("caote/table2")
    selected = Choice("caote/table2", [f"model={LLAMA}", "policy=tova", "limit=3", "task=longbench"])
    assert len([n for n in table if selected.plans(n)]) == 17
    replaced = Choice("caote/table2", POCKET)
    h2o = next(n for n in table if (n.method, n.budget, n.task) == ("h2o", 4096, "trec"))
    plans = [(p.model, p.policy, p.budget, p.task, dict(p.settings)) for p in replaced.plans(h2o)]
    settings = {"schedule": "blocks", "block": 32, "decode": "evict", "task.lengths": [512]}
    assert plans == [("pocket", "h2o_norecent", 128, task, settings) for task in ("niah", "niah_multikey")]
    full = next(n for n in table if n.method == "full")
    assert {(p.budget, *p.settings) for p in replaced.plans(full)} == {(None, "task.lengths")}


def in_process(command: list[str], check: bool) -> CompletedProcess[str]:
    """`python -m kvbench` without another import of torch."""
    return CompletedProcess(command, kvbench(command[3:]))


def test_a_table_runs_on_another_model_and_is_compared_with_the_same_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paper's averages of SnapKV at 2,048 and 4,096 stand beside ours at 64 and 128, without a difference."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.papers.cli.subprocess", SimpleNamespace(run=in_process))
    words = ["caote/table2", *POCKET, "policy=snapkv", "limit=1"]
    assert main(["run", *words]) == 0
    capsys.readouterr()
    assert main(["compare", *words, "--runs", "results/runs", "-o", "t.md"]) == 0
    assert "54 of 54 numbers measured" in (tmp_path / "t.md").read_text()
    table = compare("caote/table2", load_results(tmp_path / "results/runs"), words[1:])
    for budget, published_average, held in (("2048", "39.60", "64.0"), ("4096", "45.18", "128.0")):
        found = line(table, "mean of 16", "SnapKV", budget)
        assert (found["published"], found["tokens"], found["n"]) == (published_average, held, "2")
        assert found["difference"] == HOLE


def test_a_small_run_of_a_table_says_whose_numbers_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables(["compare", "caote/table2", "--small"]) == 0
    assert capsys.readouterr().out.startswith("--small: measured on the model pocket with shorter prompts")
    assert tables(["compare", "caote/table2", "policy=tova"]) == 0
    assert "--small" not in capsys.readouterr().out
