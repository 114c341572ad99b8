"""Wrong command lines, one by one: each is answered in one sentence with exit code 2, and nothing is computed.

What `python -m kvbench` is told wrongly most often stands in test_cli.py; here is what was once answered badly.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import MAINS

from kvbench import make_policy
from kvbench.cli import main
from kvbench.config.overrides import check
from kvbench.engine.prompts import prompts_for
from kvbench.models import loading
from kvbench.sweeps.plan import plan
from kvbench.terminal.errors import UsageError

CELL = {
    # fields of every run
    "~seed": "~seed cannot be: seed is a field of every run, give it another value",
    "~engine": "~engine cannot be: engine is a field of every run",
    "~engine.rows": "~engine.rows cannot be",
    "+bogus=3": "bogus is not a field, choose one of allow_mixed",
    "++bugdet=3": "bugdet is not a field, did you mean budget?",
    "+engine.bogus=3": "engine.bogus is not a field of engine, choose one of cuda_graph, rows",
    "+new.field=3": "new.field is not a field, choose one of allow_mixed",
    "policy.scorer._target_=pathlib.Path": "policy.scorer must be a Scorer, got a PosixPath",
    "engine=null": "engine=null is not allowed, set its fields: engine.rows",
    "engine=5": "engine=5 is not allowed, set its fields: engine.rows",
    "debug=maybe": "debug=maybe must be true or false",
    "allow_mixed=maybe": "allow_mixed=maybe must be true or false",
    "budget={a:1}": "budget must be a whole number of tokens per KV head (1 or more) or a share",
    "block=abc": "block must be a number of tokens >= 1 or inf, got 'abc'",
    "block=true": "block must be a number of tokens >= 1 or inf, got true",
    "out=null": "out=null is not allowed, it must be a folder, such as results/runs",
    "out=": "out= is not allowed, it must be a folder",
    "out=[a]": "out=['a'] is not allowed, it must be a folder",
    "seed=-1": "seed must be a whole number of at least 0, got -1",
    "seed=99999999999": "seed must be at most 4294967295, got 99999999999",
    "limit=99999999999999999999": "limit must be at most 9007199254740992, got 99999999999999999999",
    "budget=99999999999999999999": "budget must be a whole number of tokens per KV head",
    "block=99999999999999999999": "block must be a number of tokens >= 1 or inf",
    "engine.rows=99999999999999999999": "engine.rows must be at most 9007199254740992",
    "decode=nope": "decode must be evict or grow, got 'nope'",
    "engine={rows: 1, bogus: 2}": "engine.bogus is not a field of engine, choose one of cuda_graph, rows",
    "dtype=null": "dtype=null is not allowed, choose one of auto, float32",
    "budget=${nope}": "budget refers to what cannot be had: Interpolation key 'nope' not found",
    "~nope": "nope is not a field, choose one of allow_mixed",
    "+budget=5": "+budget=5 cannot be: budget is there already, write budget=",
    "+policy=snapkv": "+policy=snapkv cannot be: policy is there already, write it as policy=",
    "~policy": "~policy cannot be: policy is there already",
    "=5": "=5 cannot be read: write field=value, --help lists the fields",
    "..=5": "..=5 cannot be read: write field=value",
    "ünï=5": "ünï=5 cannot be read: write field=value",
    "budget =64": "budget =64 cannot be read: write field=value",
    # Hydra's own
    "hydra=null": "hydra=null has no effect here",
    "hydra.nope=5": "hydra.nope=5 has no effect here",
    "hydra.run.dir=x": "hydra.run.dir=x has no effect here: sweeps are run by launcher=local",
    "hydra.job.chdir=true": "hydra.job.chdir=true has no effect here",
    # values that sweeps list
    "budget=range(3,1)": "budget=range(3,1) names no values to run",
    "budget=range(1,1000000000)": "budget=range(1,1000000000) names more than 10000 values to run",
    # flags
    "--budget=64": "unrecognized arguments: --budget=64 (fields are written field=value, without dashes",
    "--config-dir": "expected one argument",
    "--config-dir=": "--config-dir  is not a folder",
    "--config-dir=/nowhere": "--config-dir /nowhere is not a folder",
    # names
    "policy=snapk": "policy 'snapk' does not exist; did you mean snapkv",
    "policy=SNAPKV": "policy 'SNAPKV' does not exist; did you mean snapkv",
    "policy=5": "policy=5 is no name: a name that looks like a number is written in quotes",
    "policy=true": "policy=true is no name",
    "task=nia": "task=nia is unknown, did you mean niah",
    "logger.mode=offline": "logger.mode is not a field of logger, there is none to set",
    # parts
    "policy.scorer.window=0": "policy.scorer.window must be a whole number of at least 1, got 0",
    "policy.scorer.window=abc": "policy.scorer.window must be a whole number, got 'abc'",
    "policy.budget=64": "policy.budget=64 has no effect, write budget=64",
    "policy.name=mine": "policy.name=mine has no effect: it is called caote_snapkv, as it is chosen",
    "policy.value.eps=nan": "policy.value.eps must be a number of at least 0 and below 1, got nan",
    "policy.scorer={}": "policy.scorer={} sets nothing, give it fields",
    "policy.scorer={window: 8, bogus: 1}": "policy.scorer.bogus is not a field of policy.scorer",
    "policy=headkv_r": "policy.allocator.importance= must name a JSON file of scores per head",
    # classes
    "policy.scorer._target_=os.system": "_target_=os.system is not a class",
    "policy._target_=os.system": "_target_=os.system is not a class",
    "policy._target_=builtins.dict": "policy._target_=builtins.dict is not a policy",
    "~policy._target_": "~policy._target_ would leave policy without its class",
    "task._target_=os.system": "_target_=os.system is not a class",
    "task._target_=builtins.dict": "task._target_=builtins.dict is not a task",
    "policy.scorer._target_=5": "policy.scorer._target_=5 is not a class: write its module, a dot and its name",
    "policy=gemfilter": "policy.filter.layer=13 is not allowed, the model has layers 0 to 3",
    # places
    "task/niah=5": "task/niah=5 cannot be set: groups are model, policy",
    "policy/scorer=5": "policy/scorer=5 cannot be set: groups are model, policy",
    "policy@x=snapkv": "policy@x=snapkv cannot be set: groups are model, policy",
    # the task
    "task.data_dir=5": "task.data_dir must be text or null, got 5",
    "task.name=null": "task.name must be text, got null",
    "task.chat=maybe": "task.chat must be true or false, got 'maybe'",
    "task.lengths=[99999999]": "task.lengths=99999999 is too long: the model's maximum is",
    "task.lengths=[512,512]": "task.lengths=(512, 512) names one twice",
    "task.depths=[0.5,0.5]": "task.depths=(0.5, 0.5) names one twice",
    "task.name=": "task.name='' is not allowed, it must be a word that tables can show",
    "task.digits=100": "task.digits=100 is not allowed, it must be at most 18",
    "task.keys=1000000000": "task.keys=1000000000 is not allowed, it must be at most 2048",
    "task.needle='{key:d} {value}'": "task.needle='{key:d} {value}' is not a template: Unknown format code 'd'",
    # others
    "model=~nobody2/x": "model.path=~nobody2/x is not a folder on this machine",
    "model.shape={layers: 0}": "model.shape={'layers': 0} is not allowed, it must have layers, query_heads",
    "logger._target_=builtins.dict": "logger._target_=builtins.dict is not a logger",
    "launcher._target_=builtins.dict": "launcher._target_=builtins.dict is not a launcher",
    "engine.rows=0": "engine.rows must be a whole number of at least 1, got 0",
    "engine.rows=abc": "engine.rows must be a whole number of at least 1, got 'abc'",
    "launcher.workers=-1": "launcher.workers must be a whole number of at least 1, got -1",
}


@pytest.fixture(autouse=True)
def nothing_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, and no weights: whoever loads a model has let a wrong value pass."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvbench"])
    monkeypatch.setattr("kvbench.engine.run.load", lambda *_: pytest.fail("a model was loaded"))


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


POLICY = "_target_: kvbench.policies.policy.Policy"
LINES = {
    "policy=full decode=evict": "decode=evict is not allowed for full, which keeps every token",
    "policy=random policy.scorer.seed=-1": "policy.scorer.seed must be a whole number of at least 0, got -1",
    "policy=cam policy.merger.seed=-1": "policy.merger.seed must be a whole number of at least 0, got -1",
    "policy=cake_alloc_random policy.allocator.seed=-1": "policy.allocator.seed must be a whole number of at least 0",
    "policy=cam policy.scorer.sinks=true": "policy.scorer.sinks must be 'half' or a number of tokens >= 0, got true",
    "policy=headkv_r policy.allocator.importance=/dev/zero": "policy.allocator.importance file '/dev/zero' is no file",
    "policy=ott policy.store.skip_layers=[99]": "policy.store.skip_layers=99 is not allowed, the model has",
    "policy=ott policy.store.skip_layers=5": "policy.store.skip_layers must be a list of whole numbers, got 5",
    "policy=d2o policy.allocator.skip_layers=[-9]": "policy.allocator.skip_layers=-9 is not allowed, the model",
    "policy=d2o policy.allocator.skip_layers=true": "policy.allocator.skip_layers must be a list of whole numbers",
    "policy=cake policy.allocator.window=0": "policy.allocator.window must be at least 2 queries",
    "policy=ada_pyramidkv policy.allocator.base.beta=0": "policy.allocator.base.beta must be a number of at least 1",
    "policy=pyramidkv budget=0.01": "budget=0.01: a budget of 20 tokens per KV head is too small for pyramidkv: it",
    "model=hub model.hub_id=a/b/c": "model.hub_id=a/b/c is not allowed, it must be owner/name",
    "policy=kvec policy.scorer.window=99": "policy.scorer.extended must be a whole number of at least 99, got 32",
    # a task by the name that tables show, which is not what was typed
    "task=ruler/niah_single_1 task.length=4500": "kvbench: task ruler_niah_single_1: example 0 needs 4479 positions",
    "task=ruler/fwe task.letters=1": "task.letters=1 is too small for 80 different words",
    "task=ruler/vt task.chains=1000000000": "task.chains=1000000000 is not allowed, it must be at most 4096",
    "task=ruler/cwe task.common_repeats=1000000000": "task.common_repeats=1000000000 is not allowed",
    "task=ruler task.tasks.vt.chains=0": "task.tasks.vt.chains=0 is not allowed, it must be an integer of at least 1",
    "task=context_question task.hub=": "task.hub= is not allowed, it must be text or left out",
    "task=perplexity task.files=5": "task.files=5 is not allowed, it must be a list of patterns such as *.txt",
    "task=perplexity task.data_dir=/dev/null": "task.data_dir=/dev/null is neither folder nor file",
    "task=perplexity task.data_dir=~nobody2/x": "task.data_dir=~nobody2/x does not exist",
    "launcher=slurm launcher.setup=[5]": "launcher.setup=[5] must be a list of texts: launcher.setup=['...']",
    "launcher=slurm launcher.setup=5": "launcher.setup=5 must be a list of texts",
    "logger=wandb logger.tags=5": "logger.tags=5 must be a list of texts",
    "logger=wandb logger.folder=": "logger.folder= is not allowed, it must be a folder",
}


@pytest.mark.parametrize("line", LINES)
def test_so_is_a_wrong_field_of_a_part_with_its_whole_place(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert LINES[line] in sentence(capsys)


OWN = {
    "defaults: [nothing, _self_]": "mine.yaml cannot be read: its defaults name policy=nothing, which does not exist",
    "defaults: [/task/niah@_here_]": "mine.yaml cannot be read: its defaults name policy=/task/niah, which does not",
    f"{POLICY}\nscorer: {{window: 5}}": "policy.scorer.window is set, but policy=mine has no scorer: no _target_ names",
    f"{POLICY}\nscorer: {{}}": "policy.scorer={} is given, but policy=mine has no scorer: no _target_ names its class",
    f"{POLICY}\nscorer: snapkv": "policy.scorer=snapkv is not a part: choose a policy that has it",
    f"{POLICY}\nscorer: {{_target_: kvbench.policies.scorers.scorer.Scorer}}": (
        "policy.scorer._target_=kvbench.policies.scorers.scorer.Scorer is abstract: name a class that is made of it"
    ),
    f"{POLICY}\nscorer: {{_target_: kvbench.policies.stores.dense.Dense}}": "policy.scorer must be a Scorer, got a",
}


@pytest.mark.parametrize("text", OWN)
def test_so_is_a_slip_in_a_policy_of_one_s_own(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text(text)
    assert main(["--config-dir", "conf", "policy=mine"]) == 2
    assert OWN[text] in sentence(capsys)


def test_a_part_without_a_class_is_said_to_lack_one_in_python_too() -> None:
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text(f"{POLICY}\nscorer: {{window: 5}}")
    with pytest.raises(ValueError, match=r"scorer=\{'window': 5\} is not a part: it has no _target_ that names"):
        make_policy("mine", 64, config_dir="conf")


def test_a_name_for_the_hub_beside_a_folder_is_said_to_be_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    for field in ("hub_id=owner/it", "revision=main"):
        assert main(["model.path=/here", f"model.{field}"]) == 2
        assert f"model.{field} has no effect: model.path=/here is read instead, give one of the two" in sentence(capsys)
        assert main([f"model.{field}"]) == 2
        assert f"model.{field} has no effect: pocket lies in this package, take model=hub" in sentence(capsys)


def test_bytes_that_are_no_text_and_links_to_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="cannot be read: it is no text in utf-8"):
        check([os.fsdecode(b"out=\xff")])
    Path("loop").symlink_to("loop")
    for folder, why in (("loop", "Too many levels of symbolic links"), ("loop/below", "Too many levels")):
        assert main([f"out={folder}"]) == 2
        assert f"out={folder} cannot be written to ({why}" in sentence(capsys)


def test_a_hub_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def away(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        raise OSError("no network")

    monkeypatch.setattr(loading, "snapshot_download", away)
    assert main(["-m", "model=hub", "model.hub_id=nobody/nothing", "policy=snapkv,knorm,tova"]) == 2
    assert asked == ["nobody/nothing"]
    assert capsys.readouterr().err.count("cannot be downloaded") == 2  # of the first, and of the two others


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"hidden_size": ', "model=made: made/config.json is not JSON, the file is damaged or cut off"),
        ("[]", "model=made: made/config.json says no fields"),
        ('{"model_type": "llama"}', "model=made: made/config.json does not say 'num_attention_heads'"),
        (
            '{"num_attention_heads": 0, "num_hidden_layers": 4, "hidden_size": 32}',
            "model=made: made/config.json says shape.query_heads=0 is not allowed, it must be an integer of at least 1",
        ),
    ],
)
def test_what_is_wrong_with_a_config_is_said_by_memory(
    config: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("made").mkdir()
    Path("made/config.json").write_text(config)
    assert import_module("kvbench.memory").main(["model=made", "policy=kivi"]) == 2
    assert said in sentence(capsys)


def test_no_experiment_may_be_said() -> None:
    assert check(["experiment=null"]).cells == check([]).cells


def test_values_in_other_letters_need_no_quotes() -> None:
    assert check(["out=Läufe/ünï"]).cells[0].config["out"] == "Läufe/ünï"


def test_what_is_wrong_with_all_cells_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "policy=snapkv,knorm,tova", "limit=some"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "kvbench: policy=snapkv: limit must be a whole number of at least 1, got 'some'",
        "kvbench: 2 more cells have the same problem: limit must be a whole number of at least 1, got 'some'",
        "kvbench: 3 of 3 cells failed",
    ]


def test_so_is_what_is_found_when_they_are_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "policy=full,kivi,streamingllm", "task=longbench/trec", "task.data_dir=.", "out=runs"]) == 2
    first, more, count = capsys.readouterr().err.splitlines()
    assert first.startswith("kvbench: policy=full: task.data_dir=. has neither trec.jsonl nor data.zip")
    assert more == first.replace("policy=full", "2 more cells have the same problem")
    assert count == "kvbench: 3 of 3 cells failed"


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


@pytest.mark.parametrize(
    ("most", "said"),
    [(2, ["task.max_new_tokens=2 cuts answers off: ' 7550547' takes 4 tokens"]), (4, [])],  # a space, 755, 054, 7
)
def test_answers_that_are_cut_off_are_told(most: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    (planned,) = plan(check(["task.lengths=[300]", f"task.max_new_tokens={most}", "limit=1"]).cells)
    assert planned.cell is not None
    prompts_for([planned.cell])
    assert caplog.messages == said


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
    "tables compare caote/table2 --runs nowhere methods=nope": "nowhere is not a folder",
    "tables bytes caote/table2 --length 9999999999": "--length 9999999999 must be a whole number from 1 to 1000000000",
    "memory policy=ott skip_layers=[99]": "skip_layers=99 is not allowed, the model has layers 0 to 3",
    "results collect . --columns score,n,score": "--columns score,n,score names score twice",
    "results collect . --columns ,": "argument --columns: ',' names no column",
    "diagnose coverage limit=1,2": "limit=1,2 names several values: a diagnostic compares policies, all else is one",
    "diagnose coverage engine.rows=1": "engine.rows=1 has no effect here: a diagnostic takes its prompts one by one",
    "diagnose coverage ~seed": "~seed cannot be: seed is a field of every run",
    "diagnose coverage --config-dir /nowhere": "--config-dir /nowhere is not a folder",
}


@pytest.mark.parametrize("line", OTHERS)
def test_the_other_commands_answer_in_one_sentence_too(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *words = line.split()
    assert import_module(MAINS[command]).main(words) == 2
    assert OTHERS[line] in sentence(capsys)


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ('"\\ud800"', "holds half a surrogate pair"),
        ("NaN", "NaN is no number in JSON"),
        ("[" * 10**5, "maximum recurs"),
    ],
)
def test_predictions_that_are_no_text_are_named_by_line(
    prediction: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text(f'{{"dataset": "qasper", "prediction": {prediction}, "answers": ["a"]}}\n')
    assert import_module("kvbench.tools.score").main(["longbench", "in.jsonl", "-o", "out.jsonl"]) == 2
    assert f"in.jsonl, line 1: {said}" in sentence(capsys).replace("not JSON, the file is damaged or cut off (", "")
    assert not Path("out.jsonl").exists()
