"""Wrong command lines, one by one: each is answered in one sentence with exit code 2, and nothing is computed."""

import pickle
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import MAINS

from kvbench.cli import main
from kvbench.config.overrides import check
from kvbench.engine.prompts import prompts_for
from kvbench.errors import ConfigError
from kvbench.models import loading
from kvbench.sweeps.plan import plan

# A line that begins with no other command is one of `python -m kvbench`.
LINES = {
    # fields of every run
    "budget=0": "budget must be a whole number of tokens per KV head",
    "budget=many": "budget must be",
    "budget=nan": "budget must be",
    "budget=null": "needs a budget",
    "budget=[1,2]": "budget must be",
    "budget=31": "a budget of 31 tokens per KV head is too small for caote_snapkv: it must be at least 32",
    "limit=0": "limit must be a whole number of at least 1, got 0",
    "seed=-1": "seed must be a whole number of at least 0, got -1",
    "device=gpu": "device=gpu is not available here, choose one of auto, cpu",
    "dtype=fp16": "dtype=fp16 is not allowed, choose one of auto, float32",
    "out=/dev/null/x": "out=/dev/null/x cannot be written to",
    "out=/proc": "out=/proc cannot be written to",
    "decode=maybe": "decode must be evict or grow",
    "schedule=block": "schedule must be prompt or blocks, got 'block'",
    "block=0.5": "block must be a number of tokens >= 1 or inf",
    "~seed": "~seed cannot be read: write field=value, --help lists the fields",
    "bogus=3": "bogus is not a field, choose one of allow_mixed",
    "engine.bogus=3": "engine.bogus is not a field of engine, choose one of cuda_graph, rows",
    "engine=null": "engine=null is not allowed, set its fields: engine.rows",
    "engine.cuda_graph=maybe": "engine.cuda_graph=maybe must be true, false or auto",
    "debug=maybe": "debug=maybe must be true or false",
    "allow_mixed=maybe": "allow_mixed=maybe must be true or false",
    "budget={a:1}": "budget must be a whole number of tokens per KV head (1 or more) or a share",
    "block=abc": "block must be a number of tokens >= 1 or inf, got 'abc'",
    "out=null": "out=null is not allowed, it must be a folder, such as results/runs",
    "out=[a]": "out=['a'] is not allowed, it must be a folder",
    "seed=99999999999": "seed must be at most 4294967295, got 99999999999",
    "engine.rows=99999999999999999999": "engine.rows must be at most 9007199254740992",
    "'engine={rows: 1, bogus: 2}'": "is not allowed, set its fields: engine.rows, engine.cuda_graph",
    "dtype=null": "dtype=null is not allowed, choose one of auto, float32",
    "budget=${nope}": "budget refers to what cannot be had: Interpolation key 'nope' not found",
    "+budget=5": "+budget=5 cannot be read: write field=value",
    "=5": "=5 cannot be read: write field=value, --help lists the fields",
    "'budget =64'": "budget =64 cannot be read: write field=value",
    "budget=range(3,1)": "budget=range(3,1) names no values to run",
    "budget=range(1,1000000000)": "budget=range(1,1000000000) names more than 10000 values to run",
    "engine.rows=0": "engine.rows must be a whole number of at least 1, got 0",
    "bugdet=3": "bugdet is not a field, did you mean budget?",
    "polcy=snapkv": "polcy is not a field, did you mean policy?",
    "budget": "budget cannot be read: write field=value",
    "budget={": "budget={ cannot be read",
    "-m 'budget=interval(1,2)'": "budget=interval(1,2) names no values to run",
    # flags, and what is left of Hydra
    "hydra.launcher.partition=gpu": "hydra.launcher.partition is not a field, choose one of allow_mixed",
    "--budget=64": "unrecognized arguments: --budget=64 (fields are written field=value, without dashes",
    "--config-dir": "expected one argument",
    "--config-dir=/nowhere": "--config-dir /nowhere is not a folder",
    "--cfg all": "argument -c/--cfg: invalid choice: 'all'",
    # policies and their parts
    "policy=snapk": "policy 'snapk' does not exist; did you mean snapkv",
    "policy.scorer.window=0": "policy.scorer.window must be a whole number of at least 1, got 0",
    "policy.schedule.decode=maybe": "decode must be evict or grow",
    "policy.schedule=blocks": "write schedule=blocks",
    "policy.merger=d2o": "merger=d2o is not a part: choose a policy that has it",
    "policy=kivi_g3_r3": "group=3 does not divide the head dimension",
    "policy=gear_g9": "group=9 does not divide the",
    "policy.scorer._target_=pathlib.Path": "policy.scorer must be a Scorer, got a PosixPath",
    "policy=5": "policy '5' does not exist",
    "policy.scorer.window=abc": "policy.scorer.window must be a whole number, got 'abc'",
    "policy.budget=64": "policy.budget=64 has no effect, write budget=64",
    "policy.value.eps=nan": "policy.value.eps must be a number of at least 0 and below 1, got nan",
    "'policy.scorer={window: 8, bogus: 1}'": "has no field 'bogus' (allowed: window",
    "policy=headkv_r": "policy.allocator.importance= must name a JSON file of scores per head",
    "policy.scorer._target_=os.system": "_target_=os.system is not a class",
    "policy._target_=builtins.dict": "policy._target_=builtins.dict is not a policy",
    "policy.scorer._target_=5": "policy.scorer._target_=5 is not a class: write its module, a dot and its name",
    "policy=gemfilter": "policy.pre_pass.layer=13 is not allowed, the model has attention layers 0 to 3",
    "policy@x=snapkv": "policy@x=snapkv cannot be set: groups are model, policy",
    "policy=full decode=evict": "decode=evict is not allowed for full, which keeps every token",
    "policy=random policy.scorer.seed=-1": "policy.scorer.seed must be a whole number of at least 0, got -1",
    "policy=cam policy.scorer.sinks=true": "policy.scorer.sinks must be 'half' or a number of tokens >= 0, got true",
    "policy=headkv_r policy.allocator.importance=/dev/zero": "policy.allocator.importance=/dev/zero is no file",
    "policy=ott policy.store.skip_layers=[99]": "policy.store.skip_layers=99 is not allowed, the model has",
    "policy=ott policy.store.skip_layers=5": "policy.store.skip_layers must be a list of whole numbers, got 5",
    "policy=d2o policy.allocator.skip_layers=[-9]": "policy.allocator.skip_layers=-9 is not allowed, the model",
    "policy=cake policy.allocator.window=0": "policy.allocator.window must be at least 2 queries",
    "policy=ada_pyramidkv policy.allocator.base.beta=0": "policy.allocator.base.beta must be a number of at least 1",
    "policy=pyramidkv budget=0.01": "budget=0.01: a budget of 20 tokens per KV head is too small for pyramidkv: it",
    "policy=kvec policy.scorer.window=99": "policy.scorer.extended must be a whole number of at least 99, got 32",
    "policy=caote_nothing": "policy 'caote_nothing' does not exist",
    "policy.scorer.windw=3": "policy.scorer.windw is not a field of policy.scorer, did you mean window?",
    "policy=full,snapkv": "policy=full,snapkv names several values: add -m",
    "-m policy=full,nope budget=1,2": "policy 'nope' does not exist",
    "-m policy=knorm,full policy.scorer.window=16": "policy.scorer.window is not a field of policy.scorer, there is no",
    "-m 'policy=glob(nothing*)'": "policy=glob(nothing*) matches nothing",
    "-m policy=snapkv,tova launcher=local,slurm": "launcher must be the same for all cells of a sweep",
    # tasks
    "task=nia": "task=nia is unknown, did you mean niah",
    "task.lengths=[10]": "lengths=10 is too small",
    "task.depths=[2]": "task.depths must be a number from 0 to 1, got 2",
    "task._target_=os.system": "_target_=os.system is not a class",
    "task._target_=builtins.dict": "task._target_=builtins.dict is not a task",
    "task/niah=5": "task/niah=5 cannot be set: groups are model, policy",
    "task.data_dir=5": "task.data_dir must be text or null, got 5",
    "task.name=null": "task.name must be text, got null",
    "task.chat=maybe": "task.chat must be true or false, got 'maybe'",
    "task.lengths=[99999999]": "task.lengths=99999999 is too long: the model's maximum is",
    "task.name=": "task.name= is not allowed, it must be a word that tables can show",
    "task.digits=100": "task.digits must be at most 18, got 100",
    "'task.needle='\"'\"'{key:d} {value}'\"'\"''": "task.needle='{key:d} {value}' is not a template: Unknown format co",
    "task=ruler/niah_single_1 task.length=4500": "kvbench: task ruler_niah_single_1: example 0 needs 4479 positions",
    "task=ruler/fwe task.letters=1": "task.letters=1 is too small for 80 different words",
    "task=ruler/vt task.chains=1000000000": "task.chains must be at most 4096, got 1000000000",
    "task=ruler task.tasks.vt.chains=0": "task.tasks.vt.chains must be a whole number of at least 1, got 0",
    "task=perplexity task.files=5": "task.files=5 is not allowed, it must be a list of patterns such as *.txt",
    "task=perplexity task.data_dir=/dev/null": "task.data_dir=/dev/null is neither folder nor file",
    "task=vt": "task=vt is unknown, did you mean ruler/vt",
    "task=ruler/niah": "did you mean ruler/niah_multikey_1",
    "task=arc_easy": "those of lm-eval are chosen as task=lm_eval/arc_easy",
    "task.nothing=1": "task.nothing is not a field of task",
    # models, loggers, launchers
    "model.path=/nowhere": "model.path=/nowhere is not a folder",
    "logger.mode=offline": "logger.mode is not a field of logger, there is none to set",
    "'model.shape={layers: 0}'": "model.shape={'layers': 0} is not allowed, it must have layers, query_heads",
    "logger._target_=builtins.dict": "logger._target_=builtins.dict is not a logger",
    "launcher._target_=builtins.dict": "launcher._target_=builtins.dict is not a launcher",
    "launcher.workers=-1": "launcher.workers must be a whole number of at least 1, got -1",
    "model=hub model.hub_id=a/b/c": "model.hub_id=a/b/c is not allowed, it must be owner/name",
    "launcher=slurm launcher.setup=[5]": "launcher.setup=[5] must be a list of texts: launcher.setup=['...']",
    "logger=wandb logger.tags=5": "logger.tags=5 must be a list of texts",
    "model=llama3": "did you mean llama31_8b_instruct or llama32_3b_instruct or llama3_70b_instruct",
    "logger=csv": "logger=csv is unknown, choose one of none, wandb",
    "model.pth=/x": "model.pth is not a field of model, did you mean path?",
    "launcher=slurm launcher.jobs=0": "launcher.jobs must be a whole number of at least 1",
    "launcher=slurm launcher.shards=0": "launcher.shards must be a whole number of at least 1",
    "launcher=slurm launcher.shards=1001": "launcher.shards=1001 is too many, at most 1000 are allowed",
    "launcher=slurm launcher.gpus_per_node=-1": "launcher.gpus_per_node must be a whole number of at least 0",
    "launcher=slurm launcher.mem_gb=0": "launcher.mem_gb=0 must be above 0",
    "launcher=slurm launcher.partion=gpu": "did you mean partition?",
    "launcher=slurm launcher.wait=maybe": "launcher.wait must be true or false, got 'maybe'",
    "launcher.shards=2": "launcher.shards=2 needs launcher.workers=2 or more: one worker computes all examples",
    # the other commands
    "results": "the following arguments are required",
    "results colect": "invalid choice: 'colect'",
    "report runs more": "unrecognized arguments: more",
    "plot runs -o a.svg --kind nope": "argument --kind: invalid choice: 'nope'",
    "claims --paper nope": "nope holds no list of claims",
    "diagnose nope": "argument NAME: invalid choice: 'nope'",
    "sweep stat runs": "invalid choice: 'stat'",
    "diagnose": "the following arguments are required: NAME (",
    "score longbench": "the following arguments are required: predictions",
    "memory --length=5": "unrecognized arguments: --length=5",
    "plot file.txt -o a.svg --format png": "--format png contradicts the suffix of -o a.svg",
    "memory length=1 length=2": "length=2: length is given twice",
    "diagnose coverage policy=h2o policy=tova": "policy=tova: policy is given twice, write policy=a,b",
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
    "diagnose coverage budget=64,128": "budget=64,128 names several values: a diagnostic compares policies",
    "diagnose coverage policy=full": "coverage is of policies that evict: policy=full keeps every token",
    "diagnose output_error policy=full": "policy=full keeps every token exactly, so it makes no error",
    "sweep status file.txt": "file.txt holds no sweep: there is no sweep.yaml",
    "memory dtype=[1]": "dtype=[1] is not allowed, choose one of",
    "memory budget={": "budget={ cannot be read: { is no value of YAML",
    "memory --config-dir /nowhere policy=kivi": "--config-dir /nowhere is not a folder",
    "tables compare caote/table3 --small": "caote/table3 has no --small overrides",
    "tables compare caote/table2 --runs nowhere policy=nope": "nowhere is not a folder",
    "memory policy=ott skip_layers=[99]": "skip_layers=99 is not allowed, the model has attention layers 0 to 3",
    "results collect . --columns score,n,score": "--columns score,n,score names score twice",
    "results collect . --columns ,": "argument --columns: ',' names no column",
    "diagnose coverage limit=1,2": "limit=1,2 names several values: a diagnostic compares policies, all else is one",
    "diagnose coverage engine.rows=1": "engine.rows=1 has no effect here: a diagnostic takes its prompts one by one",
    "diagnose coverage ~seed": "~seed cannot be read: write field=value",
}
POLICY = "_target_: kvbench.policies.policy.Policy"
OWN = {
    "defaults: [nothing, _self_]": "mine.yaml cannot be read: its defaults name policy=nothing, which does not exist",
    "defaults: [/task/niah@_here_]": "mine.yaml cannot be read: its defaults name policy=/task/niah, which does not",
    f"{POLICY}\nscorer: {{window: 5}}": "policy.scorer={'window': 5} is not a part: it has no _target_ that",
    f"{POLICY}\nscorer: snapkv": "policy.scorer=snapkv is not a part: choose a policy that has it",
    f"{POLICY}\nscorer: {{_target_: kvbench.policies.scorers.scorer.Scorer}}": (
        "policy.scorer._target_=kvbench.policies.scorers.scorer.Scorer is abstract: name a class that is made of it"
    ),
    f"{POLICY}\nscorer: {{_target_: kvbench.policies.stores.dense.Dense}}": "policy.scorer must be a Scorer, got a",
    "defaults: [snapkv]\nscorer: {window: 8}\nscorer: {window: 16}\n": "scorer is given twice",
    "defaults: [mine]": "its defaults lead back to it",
    "defaults: [snapkv]\n\tname: x\n": "cannot be read",
    "[1, 2]": "it must have fields",
    "name: mine": "mine.yaml names no class: it needs a _target_, or a list of defaults that has one",
}
EXPERIMENTS = {
    "sweeps: 5": "sweeps must be a list",
    "sweeps: [5]": "sweeps must be a list",
    "# @package _global_\nbogus: 5": "experiment=mine sets bogus, which is not a field of a run",
    "# @package _global_\ndefaults: [snapkv]": "its defaults may be such as `override /policy: snapkv`",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, and no weights: whoever loads a model has let a wrong value pass."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.engine.run.load", lambda *_: pytest.fail("a model was loaded"))
    Path("file.txt").write_text("no folder")
    Path("in.jsonl").write_text('{"dataset": "qasper", "prediction": "a", "answers": ["a"]}\n')
    return tmp_path


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, which is one line of a length that can be read, and nothing on stdout."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("kvbench: ")
    assert len(said.err) < 600
    return said.err


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_is_one_sentence_and_leaves_nothing_behind(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = shlex.split(line)
    command = import_module(MAINS[name]).main if name in MAINS else main
    assert command(words if name in MAINS else [name, *words]) == 2
    assert LINES[line] in sentence(capsys)
    assert sorted(path.name for path in folder.iterdir()) == ["file.txt", "in.jsonl"]


@pytest.mark.parametrize(
    ("group", "text", "said"),
    [*(("policy", *pair) for pair in OWN.items()), *(("experiment", *pair) for pair in EXPERIMENTS.items())],
)
def test_so_is_a_slip_in_a_file_of_one_s_own(
    group: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("conf", group).mkdir(parents=True)
    Path("conf", group, "mine.yaml").write_text(text)
    assert main(["--config-dir", "conf", f"{group}=mine"]) == 2
    assert said in sentence(capsys)


def test_a_hub_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def away(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        raise OSError("no network")

    monkeypatch.setattr(loading, "snapshot_download", away)
    assert main(["-m", "model=hub", "model.hub_id=nobody/nothing", "policy=snapkv,knorm,tova"]) == 2
    assert asked == ["nobody/nothing"]
    assert capsys.readouterr().err.count("cannot be downloaded") == 2  # of the first, and of the two others


def test_so_is_what_is_found_when_they_are_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "policy=full,kivi,streamingllm", "task=longbench/trec", "task.data_dir=.", "out=runs"]) == 2
    first, more, count = capsys.readouterr().err.splitlines()
    assert first.startswith("kvbench: policy=full: task.data_dir=. has no trec.jsonl or data")
    assert more == first.replace("policy=full", "2 more cells have the same problem")
    assert count == "kvbench: 3 of 3 cells failed"


def test_a_budget_that_nothing_uses_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan(check(["policy=kivi", "budget=64"]).cells)
    assert caplog.messages == ["budget=64 is ignored: kivi keeps every token"]


@pytest.mark.parametrize(
    ("most", "said"),
    [(2, ["task.max_new_tokens=2 cuts answers off: ' 7550547' takes 4 tokens"]), (4, [])],  # a space, 755, 054, 7
)
def test_answers_that_are_cut_off_are_told(most: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    (planned,) = plan(check(["task.lengths=[300]", f"task.max_new_tokens={most}", "limit=1"]).cells)
    assert planned.cell is not None
    prompts_for([planned.cell])
    assert caplog.messages == said


def test_a_wrong_value_is_told_by_another_process_as_well() -> None:
    error = ConfigError("budget", 0, "at least 1").at("policy")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "policy.budget must be at least 1, got 0"
