"""Wrong command lines: each ends with an error message, without a traceback, before anything is computed."""

import pickle
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from command_lines import MAINS

from kvbench.cli import main
from kvbench.engine.prompts import prompts_for
from kvbench.errors import ConfigError
from kvbench.models import files
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config

LINES = {
    "budget=0": "budget must be a whole number of tokens per KV head",
    "generation.top_p=0": "generation.top_p must be a number above 0 and at most 1, got 0",
    "bogus=3": "Could not override 'bogus'",
    "--config-dir=/nowhere": "Additional config directory '/nowhere' not found",
    "model=owner/name": "`kvbench models` lists them; a model of the Hub: model=hub model.hub_id=owner/name)",
    "policy=snapk": "policy=snapk does not exist: did you mean snapkv",
    "policy.scorer.windw=3": "policy.scorer.windw=3 is not a field of SnapKV: did you mean window? (allowed: ",
    "task.lengths=[99999999]": "task.lengths=99999999 is too long: the model's maximum is",
    "+model.attn_implementation=sdpa": "model.attn_implementation=sdpa is not allowed: kvbench computes the attention",
    "logger=wandb logger.tags=5": "logger.tags=5 must be a list of texts",
    "-m policy=full out=file.txt": "out=file.txt cannot be written to (File exists), choose another folder",
    "logger=wandbb": "logger=wandbb does not exist: did you mean wandb",
    "-m 'policy=glob(none*)'": "the values of this sweep have no combination",
    "-m policy=snapkv hydra.launcher.workers=0": "hydra.launcher.workers must be a whole number",
}
FIELDS = {
    "policy=fair_knorm": "policy.selection=Fair divides the budget among the parts of a prompt",
    "budget=null": "needs a budget",
    "budget=31": "a budget of 31 tokens per KV head is too small for caote_snapkv: it must be at least 32",
    "limit=0": "limit must be a whole number of at least 1, got 0",
    "compress=both": "compress must be prompt or context, got 'both'",
    "compress=context policy=d2o_released": "d2o_released evicts only after a token behind the prompt",
    "generation.temperature=-1": "generation.temperature must be a number of at least 0, got -1",
    "generation.top_p=1.5": "generation.top_p must be a number from 0 to 1, got 1.5",
    "generation.top_k=2.5": "generation.top_k must be a whole number, got 2.5",
    "generation.samples=0": "generation.samples must be a whole number of at least 1, got 0",
    "generation.samples=3": "generation.samples=3 has no effect: decoding is greedy, set temperature",
    "device=gpu": "device=gpu is not available here, choose one of auto, cpu",
    "schedule=block": "schedule must be prompt or blocks, got 'block'",
    "engine=null": "engine=null is not allowed, set its fields",
    "engine.save_seconds=-1": "engine.save_seconds must be a number of at least 0, got -1",
    "policy.schedule=blocks": "write schedule=blocks",
    "policy.scorer.window=abc": "policy.scorer.window must be a whole number, got 'abc'",
    "policy.budget=64": "policy.budget=64 has no effect, write budget=64",
    "policy.scorer._target_=os.system": "policy.scorer._target_=os.system is not a class that can be built",
    "policy=ada_pyramidkv policy.allocator.base.beta=0": "policy.allocator.base.beta must be a number of at least 1",
    "policy=kvec policy.scorer.window=99": "policy.scorer.extended must be a whole number of at least 99, got 32",
    "task=nia": "task=nia does not exist: did you mean niah",
    "'task.needle='\"'\"'{key:d} {value}'\"'\"''": "task.needle='{key:d} {value}' is not a template: Unknown",
    "task=ruler task.tasks.vt.chains=0": "task.tasks.vt.chains must be a whole number of at least 1, got 0",
    "task.nothing=1": "task.nothing=1 is not a field of Niah",
    "model.path=/nowhere": "model.path=/nowhere is not a folder",
    "'model.shape={layers: 0}'": "model.shape={'layers': 0} is not allowed, it must have layers, query_heads",
    "model=hub model.hub_id=a/b/c": "model.hub_id=a/b/c is not allowed, it must be owner/name",
}
"""Fields that are refused in Python as on the command line, whose messages LINES shows."""
OTHERS = {
    "results": "Missing command (see kvbench results --help)",
    "claims polcy=snapkv": "polcy=snapkv is not a field of a run: did you mean policy",
    "plot runs -o a.svg --kind nope": "Invalid value for '--kind': 'nope' is not one of",
    "score longbench": "Missing argument 'PREDICTIONS' (see kvbench score longbench --help)",
    "plot file.txt -o a.svg --format png": "--format png contradicts the suffix of -o a.svg",
    "plot runs -o a.svg --width 0": "Invalid value for '--width': 0.0 is not in the range 0<x<=100",
    "memory length=1 length=2": "length=2: length is given twice",
    "results collect nowhere -o t.pdf": "-o t.pdf must end in one of .csv, .parquet, .txt, .md, .tex",
    "report nowhere": "nowhere does not exist",
    "report . -o r.pdf": "-o r.pdf must end in .html",
    "report nowhere -o no/r.html": "-o no/r.html cannot be written: no does not exist",
    "plot nowhere -o file.txt/p.svg": "-o file.txt/p.svg cannot be written: file.txt is not a folder",
    "score longbench in.jsonl -o /dev/null": "-o /dev/null cannot be written: it is not a file",
    "memory slug=5": "slug=5 is not a field",
    "memory model=llama9 policy=kivi": "model=llama9 does not exist: did you mean llama_7b",
    "memory policy=kivi length=0": "length=0 must be a whole number from 1 to 1000000000",
    "memory kivi": "kivi cannot be read: write key=value, such as model=",
    "memory policy=cake budget=64": "so its bytes cannot be predicted: run it",
    "results collect nowhere -o t.csv": "nowhere does not exist",
    "results collect . -o t.csv --pivot task": "--pivot task is for .txt, .md, .tex",
    "tables show caote/tabel2": "did you mean caote/table2",
    "tables compare cake/table5 --runs nowhere": "nowhere does not exist",
    "results check file.txt": "file.txt is a file: choose the folder that has its runs",
    "results log file.txt logger=wandb": "file.txt is a file: choose the folder that has its runs",
    "report .": ". has no run: there is no samples.jsonl in it",
    "tables show caote/table2 -o t.pdf": "-o t.pdf must end in",
    "tables run caote/table5": "caote/table5 cannot be run: the paper gives neither needle, haystack",
    "tables run caote/table2 polcy=cake": "polcy=cake is not a field of a run: did you mean policy?",
    "tables run caote/table2 policy=cake": "policy=cake: cake is not in caote/table2, which has full, h2o_norecent",
    "tables run caote/table2 budget=64,128,256": "give one value, or 2 in place of 2048, 4096",
    "tables compare caote/table2 limit": "limit cannot be read: write key=value",
    "diagnose exact_tokens policy=snapkv_ott budget=64": "snapkv_ott drops tokens, but exact_tokens",
    "diagnose exact_tokens policy=kivi budget=64": "kivi has no exact tokens: use an ott policy",
    "score rulr in.jsonl -o out.jsonl": "rulr is not a benchmark that can score predictions",
    "score json in.jsonl -o out.jsonl": "json has no function score_predictions (allowed: infinitebench, ",
    "bench kivi": "experiment=kivi does not exist (allowed: sweep, cake_table13",
    "bench sizes=3": "sizes=3 is not key=value with a known key (allowed: model, dtype",
    "bench policies=snapk": "policies=snapk: policy=snapk does not exist",
    "bench policies=kvzip": "policies=kvzip cannot be timed on random tokens",
    "bench rounds=0": "rounds must be at least 1, got 0",
    "bench lengths=a": "Value 'a' of type 'str' could not be converted to Integer",
    "bench budgets=": "budgets must be a list with at least one value",
    "bench new_tokens=1": "new_tokens must be at least 2",
    "bench model=nope": "model=nope is neither a name of conf/model",
    "bench baselines=vllm": "baselines must be transformers or kvpress",
    "bench d2o_table12 model=.": "model.path=. has no config.json: it must be a folder made by save_pretrained",
    "diagnose coverage policy=full": "coverage needs a policy that evicts: policy=full keeps every token",
    "sweep status file.txt": "file.txt holds no sweep: there is no sweep.yaml",
    "results collect . --columns n --pivot task": "--pivot task is not allowed with --columns",
    "sweep stop runs": "No such command 'stop'",
    "results chek runs": "No such command 'chek'. Did you mean 'check'?",
    "tables compare caote/table3 --small": "caote/table3 has no --small overrides",
    "results collect . --columns ,": "--columns ',' has no column name (see kvbench results collect --help)",
}
POLICY = "_target_: kvbench.policies.policy.Policy"
OWN = {
    f"{POLICY}\nscorer: {{window: 5}}": "policy.scorer={'window': 5} is not a part: it has no _target_ that",
    f"{POLICY}\nscorer: {{_target_: kvbench.policies.stores.dense.Dense}}": "policy.scorer must be a Scorer, got",
    f"{POLICY}\nscorer: {{_target_: my_scorers.Mine}}": "No module named 'my_scorers'; it must be in the",
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


@pytest.mark.parametrize("line", FIELDS)
def test_a_wrong_value_of_a_field_is_one_sentence(line: str) -> None:
    fields = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in shlex.split(line))}
    names = [fields.pop(*one) for one in (("model", "pocket"), ("policy", "caote_snapkv"), ("task", "niah"))]
    with pytest.raises(ValueError, match=re.escape(FIELDS[line])) as refused:
        build_run(run_config(*names, **fields))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("line", OTHERS)
def test_a_wrong_argument_of_another_command_is_one_line_and_writes_nothing(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = shlex.split(line)
    assert import_module(MAINS[name]).main(words) == 2
    shown = capsys.readouterr()
    assert OTHERS[line] in shown.err
    assert (shown.out, shown.err.count("\n"), shown.err[:9]) == ("", 1, "kvbench: ")
    assert sorted(path.name for path in folder.iterdir()) == ["file.txt", "in.jsonl"]


@pytest.mark.parametrize("text", OWN)
def test_a_wrong_file_of_a_user_is_an_error_message(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text(text)
    assert main(["--config-dir", "conf", "policy=mine"]) == 1
    shown = capsys.readouterr().err
    assert OWN[text] in shown
    assert "Traceback" not in shown


def test_an_absent_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def away(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        raise OSError("no network")

    monkeypatch.setattr(files, "snapshot_download", away)
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
    ("most", "messages"),
    [(2, ["task.max_new_tokens=2 cuts answers off: ' 7550547' takes 4 tokens"]), (4, [])],  # a space, 755, 054, 7
)
def test_a_limit_that_cuts_answers_off_is_a_warning(
    most: int, messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"task.lengths": [300], "task.max_new_tokens": most, "limit": 1}
    prompts_for([build_run(run_config("pocket", **fields))])
    assert caplog.messages == messages


def test_a_configuration_error_of_another_process_has_the_same_message() -> None:
    error = ConfigError("budget", 0, "at least 1").at("policy")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "policy.budget must be at least 1, got 0"


def test_a_plus_before_a_group_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+experiment=demo", "--cfg", "job", "-p", "task.name"]) == 0
    assert main(["experiment=demo", "--cfg", "job", "-p", "task.name"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
