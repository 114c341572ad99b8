"""Wrong command lines: each ends with an error message, without a traceback, before anything is computed."""

import pickle
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import MAINS

from kvbench.cli import main
from kvbench.engine.prompts import prompts_for
from kvbench.errors import ConfigError
from kvbench.models import loading
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config

LINES = {
    "budget=0": "budget must be a whole number of tokens per KV head",
    "budget=many": "budget must be a number or null, got 'many'",
    "budget=nan": "budget must be",
    "budget=null": "needs a budget",
    "budget=[1,2]": "budget must be a number or null, got [1, 2]",
    "budget=31": "a budget of 31 tokens per KV head is too small for caote_snapkv: it must be at least 32",
    "limit=0": "limit must be a whole number of at least 1, got 0",
    "seed=-1": "seed must be a whole number of at least 0, got -1",
    "device=gpu": "device=gpu is not available here, choose one of auto, cpu",
    "dtype=fp16": "dtype=fp16 is not allowed, choose one of auto, float32",
    "decode=maybe": "decode must be evict or grow",
    "schedule=block": "schedule must be prompt or blocks, got 'block'",
    "block=0.5": "block must be a number of tokens >= 1 or inf",
    "bogus=3": "Could not override 'bogus'",
    "engine.bogus=3": "Key 'bogus' is not in struct",
    "engine=null": "engine=null is not allowed, set its fields",
    "engine.cuda_graph=maybe": "engine.cuda_graph must be True, False or auto, got 'maybe'",
    "allow_version_mismatch=maybe": "allow_version_mismatch must be true or false, got 'maybe'",
    "budget={a:1}": "budget must be a number or null, got {'a': 1}",
    "block=abc": "block must be a number of tokens >= 1 or inf, got 'abc'",
    "seed=99999999999": "seed must be at most 4294967295, got 99999999999",
    "engine.rows=99999999999999999999": "engine.rows must be at most 9007199254740992",
    "dtype=null": "dtype=null is not allowed, choose one of auto, float32",
    "engine.rows=0": "engine.rows must be a whole number of at least 1, got 0",
    "--config-dir=/nowhere": "Additional config directory '/nowhere' not found",
    "policy=snapk": "Could not find 'policy/snapk'",
    "policy.scorer.window=0": "policy.scorer.window must be a whole number of at least 1, got 0",
    "policy.schedule.decode=maybe": "decode must be evict or grow",
    "policy.schedule=blocks": "write schedule=blocks",
    "policy.merger=d2o": "policy.merger must be a Merger, got 'd2o'",
    "policy=kivi_g3_r3": "group=3 does not divide the head dimension",
    "policy=gear_g9": "group=9 does not divide the",
    "policy.scorer._target_=pathlib.Path": "policy.scorer must be a Scorer, got a PosixPath",
    "policy.scorer.window=abc": "policy.scorer.window must be a whole number, got 'abc'",
    "policy.budget=64": "policy.budget=64 has no effect, write budget=64",
    "policy.value.eps=nan": "policy.value.eps must be a number of at least 0 and below 1, got nan",
    "'policy.scorer={window: 8, bogus: 1}'": "policy.scorer.bogus=1 is not a field of SnapKV",
    "policy=headkv_r": "policy.allocator.importance= must be the path of a JSON file with scores per head",
    "policy.scorer._target_=os.system": "policy.scorer._target_=os.system is not a class that can be built",
    "policy._target_=builtins.dict": "policy._target_=builtins.dict is not a policy",
    "policy=gemfilter": "policy.pre_pass.layer=13 is not allowed: the model has attention layers 0 to 3",
    "policy=random policy.scorer.seed=-1": "policy.scorer.seed must be a whole number of at least 0, got -1",
    "policy=cam policy.scorer.sinks=true": "policy.scorer.sinks must be 'half' or a number of tokens >= 0, got true",
    "policy=headkv_r policy.allocator.importance=/dev/zero": "policy.allocator.importance=/dev/zero is not a file",
    "policy=ott policy.store.skip_layers=[99]": "policy.store.skip_layers=99 is not allowed: the model has",
    "policy=ott policy.store.skip_layers=5": "policy.store.skip_layers must be a list of whole numbers, got 5",
    "policy=d2o policy.allocator.skip_layers=[-9]": "policy.allocator.skip_layers=-9 is not allowed: the model",
    "policy=cake policy.allocator.window=0": "policy.allocator.window must be at least 2 queries",
    "policy=ada_pyramidkv policy.allocator.base.beta=0": "policy.allocator.base.beta must be a number of at least 1",
    "policy=pyramidkv budget=0.01": "budget=0.01: a budget of 20 tokens per KV head is too small for pyramidkv: it",
    "policy=kvec policy.scorer.window=99": "policy.scorer.extended must be a whole number of at least 99, got 32",
    "policy=caote_nothing": "Could not find 'policy/caote_nothing'",
    "policy.scorer.windw=3": "policy.scorer.windw=3 is not a field of SnapKV (allowed: window, kernel, pool)",
    "policy=full,snapkv": "add --multirun",
    "-m policy=full,nope budget=1,2": "Could not find 'policy/nope'",
    "task=nia": "Could not find 'task/nia'",
    "task.lengths=[10]": "lengths=10 is too small",
    "task.depths=[2]": "task.depths must be a number from 0 to 1, got 2",
    "task._target_=os.system": "task._target_=os.system is not a class that can be built",
    "task._target_=builtins.dict": "task._target_=builtins.dict is not a task",
    "task.data_dir=5": "task.data_dir must be text or null, got 5",
    "task.name=null": "task.name must be text, got null",
    "task.chat=maybe": "task.chat must be true or false, got 'maybe'",
    "task.lengths=[99999999]": "task.lengths=99999999 is too long: the model's maximum is",
    "task.name=": "task.name= is not allowed, it must be a word that tables can show",
    "task.digits=100": "task.digits must be at most 18, got 100",
    "'task.needle='\"'\"'{key:d} {value}'\"'\"''": "task.needle='{key:d} {value}' is not a template: Unknown",
    "task=ruler/fwe task.letters=1": "task.letters=1 is too small for 80 different words",
    "task=ruler/vt task.chains=1000000000": "task.chains must be at most 4096, got 1000000000",
    "task=ruler task.tasks.vt.chains=0": "task.tasks.vt.chains must be a whole number of at least 1, got 0",
    "task=perplexity task.files=5": "task.files=5 is not allowed, it must be a list of patterns such as *.txt",
    "task=perplexity task.data_dir=/dev/null": "task.data_dir=/dev/null is neither folder nor file",
    "task.nothing=1": "task.nothing=1 is not a field of Niah",
    "model.path=/nowhere": "model.path=/nowhere is not a folder",
    "logger.mode=offline": "Could not override 'logger.mode'",
    "'model.shape={layers: 0}'": "model.shape={'layers': 0} is not allowed, it must have layers, query_heads",
    "logger._target_=builtins.dict": "logger._target_=builtins.dict is not a logger",
    "model=hub model.hub_id=a/b/c": "model.hub_id=a/b/c is not allowed, it must be owner/name",
    "logger=wandb logger.tags=5": "logger.tags=5 must be a list of texts",
    "logger=csv": "Could not find 'logger/csv'",
    "model.pth=/x": "model.pth=/x is not a field of ModelSpec",
    "-m policy=snapkv hydra.launcher.workers=0": "hydra.launcher.workers must be a whole number",
    "-m policy=snapkv hydra/launcher=slurm hydra.launcher.jobs=0": "hydra.launcher.jobs must be a whole number",
    "-m policy=snapkv hydra/launcher=slurm hydra.launcher.partion=gpu": "Could not override 'hydra.launcher.partion'",
    "hydra/launcher=slrm": "Could not find 'hydra/launcher/slrm'",
}
OTHERS = {
    "results": "the following arguments are required",
    "results colect": "invalid choice: 'colect'",
    "report runs more": "unrecognized arguments: more",
    "plot runs -o a.svg --kind nope": "argument --kind: invalid choice: 'nope'",
    "claims --paper nope": "nope is not a valid list of claims",
    "diagnose nope": "argument NAME: invalid choice: 'nope'",
    "sweep stat runs": "invalid choice: 'stat'",
    "diagnose": "the following arguments are required: NAME (",
    "score longbench": "the following arguments are required: predictions",
    "memory --length=5": "unrecognized arguments: --length=5",
    "plot file.txt -o a.svg --format png": "--format png contradicts the suffix of -o a.svg",
    "memory length=1 length=2": "length=2: length is given twice",
    "results collect nowhere -o t.pdf": "-o t.pdf must end in one of .csv",
    "report nowhere -o no/r.html": "-o no/r.html cannot be written: no does not exist",
    "claims -o no/c.md": "-o no/c.md cannot be written: no does not exist",
    "plot nowhere -o file.txt/p.svg": "-o file.txt/p.svg cannot be written: file.txt is no folder",
    "plot nowhere -o new/": "nowhere does not exist",
    "results collect nowhere -o .csv": "-o .csv needs a name before .csv",
    "report '' -o a.html": "argument DIR: '' is no path",
    "score longbench in.jsonl -o /dev/null": "-o /dev/null cannot be written: it is no file",
    "bench d2o_table12 model=pocket out=file.txt/x": "out=file.txt/x cannot be written: file.txt is no folder",
    "memory length=99999999999999999999": "length=99999999999999999999 must be a whole number from 1 to",
    "memory slug=5": "slug=5 is not a field",
    "bench d2o_table12 model=.": "model.path=. has no config.json: it must be a folder made by save_pretrained",
    "diagnose coverage policy=full": "coverage needs a policy that evicts: policy=full keeps every token",
    "diagnose output_error policy=full": "policy=full keeps every token exactly, so its error is 0",
    "sweep status file.txt": "file.txt holds no sweep: there is no sweep.yaml",
    "memory dtype=[1]": "dtype=[1] is not allowed, choose one of",
    "memory budget={": "budget={ is not valid YAML",
    "memory --config-dir /nowhere policy=kivi": "--config-dir /nowhere is not a folder",
    "tables compare caote/table3 --small": "caote/table3 has no --small overrides",
    "tables compare caote/table2 --runs nowhere policy=nope": "nowhere is not a folder",
    "memory policy=ott skip_layers=[99]": "skip_layers=99 is not allowed: the model has attention layers 0 to 3",
    "results collect . --columns ,": "argument --columns: ',' has no column name",
}
POLICY = "_target_: kvbench.policies.policy.Policy"
OWN = {
    "defaults: [nothing, _self_]": "Could not load 'policy/nothing'",
    f"{POLICY}\nscorer: {{window: 5}}": "policy.scorer={'window': 5} is not a part: it has no _target_ that",
    f"{POLICY}\nscorer: snapkv": "policy.scorer must be a Scorer, got 'snapkv'",
    f"{POLICY}\nscorer: {{_target_: kvbench.policies.stores.dense.Dense}}": "policy.scorer must be a Scorer, got",
    f"{POLICY}\nscorer: {{_target_: my_scorers.Mine}}": "No module named 'my_scorers'; its folder must be",
    "name: mine": "is not a policy",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, and no weights: a test fails if a model is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.engine.compute.load", lambda *_: pytest.fail("a model was loaded"))
    Path("file.txt").write_text("no folder")
    Path("in.jsonl").write_text('{"dataset": "qasper", "prediction": "a", "answers": ["a"]}\n')
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_value_is_an_error_message_without_a_traceback(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 1
    shown = capsys.readouterr()
    assert LINES[line] in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("line", OTHERS)
def test_so_it_is_for_the_other_commands(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *words = shlex.split(line)
    assert import_module(MAINS[name]).main(words) == 2
    shown = capsys.readouterr()
    assert OTHERS[line] in shown.err
    assert (shown.out, shown.err.count("\n"), shown.err[:9]) == ("", 1, "kvbench: ")
    assert sorted(path.name for path in folder.iterdir()) == ["file.txt", "in.jsonl"]


@pytest.mark.parametrize("text", OWN)
def test_so_it_is_for_a_file_of_the_user(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text(text)
    assert main(["--config-dir", "conf", "policy=mine"]) == 1
    shown = capsys.readouterr().err
    assert OWN[text] in shown
    assert "Traceback" not in shown


def test_a_hub_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def away(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        raise OSError("no network")

    monkeypatch.setattr(loading, "snapshot_download", away)
    assert main(["-m", "model=hub", "model.hub_id=nobody/nothing", "policy=snapkv,knorm,tova"]) == 1
    assert asked == ["nobody/nothing"]
    assert capsys.readouterr().err.count("cannot be downloaded") == 2  # of the first, and of the two others


def test_errors_that_are_found_while_computing_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "policy=full,kivi,streamingllm", "task=longbench/trec", "task.data_dir=.", "out=runs"]) == 1
    first, more, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("kvbench: policy=full: task.data_dir=. has no trec.jsonl or data")
    assert more == first.replace("policy=full", "2 more runs have the same problem")
    assert "3 of 3 runs failed" in rest


@pytest.mark.parametrize(
    ("most", "said"),
    [(2, ["task.max_new_tokens=2 cuts answers off: ' 7550547' takes 4 tokens"]), (4, [])],  # a space, 755, 054, 7
)
def test_answers_that_are_cut_off_are_told(most: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    fields = {"task.lengths": [300], "task.max_new_tokens": most, "limit": 1}
    prompts_for([build_run(run_config("pocket", **fields))])
    assert caplog.messages == said


def test_a_wrong_value_is_told_by_another_process_as_well() -> None:
    error = ConfigError("budget", 0, "at least 1").at("policy")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "policy.budget must be at least 1, got 0"
