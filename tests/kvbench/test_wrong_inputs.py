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
from kvbench.identity.cell import build_cell
from kvbench.identity.run_config import run_config
from kvbench.models import loading

LINES = {
    "budget=0": "budget must be a whole number of tokens per KV head",
    "budget=null": "needs a budget",
    "budget=[1,2]": "budget must be a number or null, got [1, 2]",
    "budget=31": "a budget of 31 tokens per KV head is too small for caote_snapkv: it must be at least 32",
    "seed=-1": "seed must be a whole number of at least 0, got -1",
    "device=gpu": "device=gpu is not available here, choose one of auto, cpu",
    "decode=maybe": "decode must be evict or grow",
    "schedule=block": "schedule must be prompt or blocks, got 'block'",
    "bogus=3": "Could not override 'bogus'",
    "engine.bogus=3": "Key 'bogus' is not in struct",
    "engine.cuda_graph=maybe": "engine.cuda_graph must be True, False or auto, got 'maybe'",
    "block=abc": "block must be a number of tokens >= 1 or inf, got 'abc'",
    "engine.rows=0": "engine.rows must be a whole number of at least 1, got 0",
    "--config-dir=/nowhere": "Additional config directory '/nowhere' not found",
    "policy=snapk": "Could not find 'policy/snapk'",
    "policy.scorer.window=0": "policy.scorer.window must be a whole number of at least 1, got 0",
    "policy.schedule.decode=maybe": "decode must be evict or grow",
    "policy.schedule=blocks": "write schedule=blocks",
    "policy.merger=d2o": "policy.merger must be a Merger, got 'd2o'",
    "policy=kivi_g3_r3": "group=3 does not divide the head dimension",
    "policy.scorer._target_=pathlib.Path": "policy.scorer must be a Scorer, got a PosixPath",
    "policy.budget=64": "policy.budget=64 has no effect, write budget=64",
    "policy.value.eps=nan": "policy.value.eps must be a number of at least 0 and below 1, got nan",
    "'policy.scorer={window: 8, bogus: 1}'": "policy.scorer.bogus=1 is not a field of SnapKV",
    "policy=headkv_r": "policy.allocator.importance= must be the path of a JSON file with scores per head",
    "policy.scorer._target_=os.system": "policy.scorer._target_=os.system is not a class that can be built",
    "policy=gemfilter": "policy.pre_pass.layer=13 is not allowed: the model has attention layers 0 to 3",
    "policy=full decode=evict": "decode=evict is not allowed for full, which keeps every token",
    "policy=headkv_r policy.allocator.importance=/dev/zero": "policy.allocator.importance=/dev/zero is not a file",
    "policy=ott policy.store.skip_layers=[99]": "policy.store.skip_layers=99 is not allowed: the model has",
    "policy=pyramidkv budget=0.01": "budget=0.01: a budget of 20 tokens per KV head is too small for pyramidkv: it",
    "policy.scorer.windw=3": "policy.scorer.windw=3 is not a field of SnapKV (allowed: window, kernel, pool)",
    "policy=full,snapkv": "add --multirun",
    "-m policy=full,nope budget=1,2": "Could not find 'policy/nope'",
    "task.lengths=[10]": "lengths=10 is too small",
    "task.depths=[2]": "task.depths must be a number from 0 to 1, got 2",
    "task._target_=os.system": "task._target_=os.system is not a class that can be built",
    "task.data_dir=5": "task.data_dir must be text or null, got 5",
    "task.lengths=[99999999]": "task.lengths=99999999 is too long: the model's maximum is",
    "task.name=": "task.name= is not allowed, it must be a word that tables can show",
    "'task.needle='\"'\"'{key:d} {value}'\"'\"''": "task.needle='{key:d} {value}' is not a template: Unknown",
    "task=ruler task.tasks.vt.chains=0": "task.tasks.vt.chains must be a whole number of at least 1, got 0",
    "task=perplexity task.files=5": "task.files=5 is not allowed, it must be a list of patterns such as *.txt",
    "task=perplexity task.data_dir=/dev/null": "task.data_dir=/dev/null is neither folder nor file",
    "model.path=/nowhere": "model.path=/nowhere is not a folder",
    "logger.mode=offline": "Could not override 'logger.mode'",
    "'model.shape={layers: 0}'": "model.shape={'layers': 0} is not allowed, it must have layers, query_heads",
    "model=hub model.hub_id=a/b/c": "model.hub_id=a/b/c is not allowed, it must be owner/name",
    "logger=wandb logger.tags=5": "logger.tags=5 must be a list of texts",
    "-m policy=snapkv hydra.launcher.workers=0": "hydra.launcher.workers must be a whole number",
    "-m policy=snapkv hydra/launcher=slurm hydra.launcher.jobs=0": "hydra.launcher.jobs must be a whole number",
}
OTHERS = {
    "results": "the following arguments are required",
    "results colect": "invalid choice: 'colect'",
    "plot runs -o a.svg --kind nope": "argument --kind: invalid choice: 'nope'",
    "claims --paper nope": "nope holds no list of claims",
    "diagnose nope": "argument NAME: invalid choice: 'nope'",
    "diagnose": "the following arguments are required: NAME (",
    "score longbench": "the following arguments are required: predictions",
    "memory --length=5": "unrecognized arguments: --length=5",
    "memory length=1 length=2": "length=2: length is given twice",
    "results collect nowhere -o t.pdf": "-o t.pdf must end in one of .csv",
    "report nowhere -o no/r.html": "-o no/r.html cannot be written: no does not exist",
    "plot nowhere -o file.txt/p.svg": "-o file.txt/p.svg cannot be written: file.txt is no folder",
    "report '' -o a.html": "argument DIR: '' is no path",
    "bench d2o_table12 model=pocket out=file.txt/x": "out=file.txt/x cannot be written: file.txt is no folder",
    "memory length=99999999999999999999": "length=99999999999999999999 must be a whole number from 1 to",
    "bench d2o_table12 model=.": "model.path=. has no config.json: it must be a folder made by save_pretrained",
    "diagnose coverage policy=full": "coverage is of policies that evict: policy=full keeps every token",
    "sweep status file.txt": "file.txt holds no sweep: there is no sweep.yaml",
    "memory --config-dir /nowhere policy=kivi": "--config-dir /nowhere is not a folder",
    "tables compare caote/table3 --small": "caote/table3 has no --small overrides",
    "tables compare caote/table2 --runs nowhere policy=nope": "nowhere is not a folder",
    "memory policy=ott skip_layers=[99]": "skip_layers=99 is not allowed: the model has attention layers 0 to 3",
    "results collect . --columns score,n,score": "--columns score,n,score names score twice",
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
    monkeypatch.setattr("kvbench.engine.run.load", lambda *_: pytest.fail("a model was loaded"))
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
    prompts_for([build_cell(run_config("pocket", **fields))])
    assert caplog.messages == said


def test_a_wrong_value_is_told_by_another_process_as_well() -> None:
    error = ConfigError("budget", 0, "at least 1").at("policy")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "policy.budget must be at least 1, got 0"
