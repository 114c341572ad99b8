"""Wrong command lines, one by one: each is answered in one sentence with exit code 2, and nothing is computed.

What `python -m kvbench` is told wrongly most often stands in test_cli.py; here is what was once answered badly.
"""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvbench.cli import main
from kvbench.config.overrides import check
from kvbench.sweeps.plan import plan

CELL = {
    # fields of every run
    "~seed": "~seed cannot be: seed is a field of every run, give it another value",
    "~engine": "~engine cannot be: engine is a field of every run",
    "~engine.rows": "~engine.rows cannot be",
    "+bogus=3": "bogus is not a field, choose one of allow_mixed",
    "++bugdet=3": "bugdet is not a field, did you mean budget?",
    "+engine.bogus=3": "engine.bogus is not a field of engine, choose one of cuda_graph, rows",
    "engine=null": "engine=None is not allowed, set its fields: engine.rows",
    "engine=5": "engine=5 is not allowed, set its fields: engine.rows",
    "debug=maybe": "debug=maybe must be true or false",
    "allow_mixed=maybe": "allow_mixed=maybe must be true or false",
    "budget={a:1}": "budget must be a whole number of tokens per KV head (1 or more) or a share",
    "block=abc": "block must be a number of tokens >= 1 or inf, got 'abc'",
    "block=true": "block must be a number of tokens >= 1 or inf, got True",
    "out=null": "out=None is not allowed, it must be a folder, such as results/runs",
    "out=": "out= is not allowed, it must be a folder",
    "out=[a]": "out=['a'] is not allowed, it must be a folder",
    # flags
    "--budget=64": "unrecognized arguments: --budget=64 (fields are written field=value, without dashes",
    "--config-dir": "expected one argument",
    "--config-dir=/nowhere": "--config-dir /nowhere is not a folder",
    # names
    "policy=snapk": "policy 'snapk' does not exist; did you mean snapkv",
    "task=nia": "task=nia is unknown, did you mean niah",
    "logger.mode=offline": "logger.mode is not a field of logger, there is none to set",
    # parts
    "policy.scorer.window=0": "policy.scorer.window must be a whole number of at least 1, got 0",
    "policy.scorer.window=abc": "policy.scorer.window must be a whole number, got 'abc'",
    # classes
    "policy.scorer._target_=os.system": "_target_=os.system is not a class",
    "policy._target_=os.system": "_target_=os.system is not a class",
    "policy._target_=builtins.dict": "policy._target_=builtins.dict is not a policy",
    "~policy._target_": "~policy._target_ would leave policy without its class",
    "task._target_=os.system": "_target_=os.system is not a class",
    "task._target_=builtins.dict": "task._target_=builtins.dict is not a task",
    "policy.scorer._target_=5": "policy.scorer._target_=5 is not a class: write its module, a dot and its name",
    "policy=gemfilter": "policy.filter.layer=13 is not allowed, the model has 0 to 3",
    # places
    "task/niah=5": "task/niah=5 cannot be set: groups are model, policy",
    "policy/scorer=5": "policy/scorer=5 cannot be set: groups are model, policy",
    "policy@x=snapkv": "policy@x=snapkv cannot be set: groups are model, policy",
    # the task
    "task.data_dir=5": "task.data_dir must be text or null, got 5",
    "task.name=null": "task.name must be text, got None",
    "task.chat=maybe": "task.chat must be true or false, got 'maybe'",
    "task.lengths=[99999999]": "task.lengths=99999999 is too long: the model's maximum is",
    "task.lengths=[512,512]": "task.lengths=(512, 512) names one twice",
    "task.depths=[0.5,0.5]": "task.depths=(0.5, 0.5) names one twice",
    "engine.rows=0": "engine.rows must be a whole number of at least 1, got 0",
    "engine.rows=abc": "engine.rows must be a whole number of at least 1, got 'abc'",
    "launcher.workers=-1": "launcher.workers must be a whole number of at least 1, got -1",
}


@pytest.fixture(autouse=True)
def nothing_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, and no weights: whoever loads a model has let a wrong value pass."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvbench"])
    monkeypatch.setattr("kvbench.runs.engine.load", lambda *_: pytest.fail("a model was loaded"))


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, which is one line of a length that can be read, and nothing on stdout."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("kvbench: ")
    assert len(said.err) < 500
    return said.err


@pytest.mark.parametrize("argument", CELL)
def test_a_wrong_cell_is_one_sentence_and_exit_code_2(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 2
    assert CELL[argument] in sentence(capsys)
    assert not list(Path.cwd().rglob("samples.jsonl"))


def test_values_in_other_letters_need_no_quotes() -> None:
    assert check(["out=Läufe/ünï"]).cells[0].config["out"] == "Läufe/ünï"


def test_what_is_wrong_with_all_cells_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "policy=snapkv,knorm,tova", "limit=some"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "kvbench: policy=snapkv: limit must be a whole number of at least 1, got 'some'",
        "kvbench: the same of 2 more: limit must be a whole number of at least 1, got 'some'",
        "kvbench: 3 of 3 cells failed",
    ]


def test_a_chat_template_that_is_not_there_is_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("A text of a few words. " * 40)
    assert main(["task=perplexity", "task.data_dir=text.txt", "task.chat=true"]) == 2
    assert "task.chat=true: the tokenizer of pocket has no chat template" in sentence(capsys)


@pytest.mark.parametrize("policy", ["full", "kivi"])
def test_a_budget_without_use_is_checked_all_the_same(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"policy={policy}", "budget=abc"]) == 2
    assert "budget must be a whole number of tokens per KV head" in sentence(capsys)


def test_a_budget_that_nothing_uses_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan(check(["policy=kivi", "budget=64"]).cells)
    assert caplog.messages == ["budget=64 is ignored: kivi keeps every token"]


@pytest.mark.parametrize("line", [["policy=full"], ["-m", "policy=full,knorm", "budget=64"]])
def test_no_word_of_a_budget_that_was_not_given_or_is_that_of_others(
    line: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan(check(line).cells)
    assert not caplog.messages


def test_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvbench 0.")


def test_help_names_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    commands = "sweep results report plot tables claims memory bench diagnose score lm_eval"
    assert all(f"python -m kvbench.{command} " in said for command in commands.split())


OTHERS = {
    "memory dtype=[1]": "dtype=[1] is not allowed, choose one of",
    "memory budget={": "budget={ cannot be read: { is no value of YAML",
    "memory --config-dir /nowhere policy=kivi": "--config-dir /nowhere is not a folder",
    "tables compare caote/table2 limit=abc": "limit=abc is not allowed, it must be a whole number of at least 1",
    "tables compare caote/table2 limit=0": "limit=0 is not allowed, it must be a whole number of at least 1",
    "tables compare caote/table2 seed=-1": "seed=-1 is not allowed, it must be a whole number of at least 0",
    "diagnose coverage ~seed": "~seed cannot be: seed is a field of every run",
    "diagnose coverage --config-dir /nowhere": "--config-dir /nowhere is not a folder",
}
MAINS = {
    "memory": "kvbench.tools.cache_bytes",
    "tables": "kvbench.papers.cli",
    "diagnose": "kvbench.tools.diagnose",
    "results": "kvbench.report.command",
}


@pytest.mark.parametrize("line", OTHERS)
def test_the_other_commands_answer_in_one_sentence_too(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = line.split()
    assert import_module(MAINS[command]).main(words) == 2
    assert OTHERS[line] in sentence(capsys)


@pytest.mark.parametrize(
    ("prediction", "said"),
    [('"\\ud800"', "holds half a surrogate pair"), ("NaN", "NaN is no number in JSON")],
)
def test_predictions_that_are_no_text_are_named_by_line(
    prediction: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text(f'{{"dataset": "qasper", "prediction": {prediction}, "answers": ["a"]}}\n')
    assert import_module("kvbench.tools.score").main(["longbench", "in.jsonl", "-o", "out.jsonl"]) == 2
    assert f"in.jsonl, line 1: {said}" in sentence(capsys).replace("not JSON, the file is damaged or cut off (", "")
    assert not Path("out.jsonl").exists()
