"""Results of others are read as data: nothing that their files name is imported, built, unpickled or run."""

import csv
import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from plotted_runs import answered, write_run

from kvbench.cli import main as run
from kvbench.report.html.report import main as report
from kvbench.results.__main__ import main as results
from kvbench.results.files import read_yaml, write_yaml
from kvbench.sweep import main as sweep

SMALL = ("task.lengths=[400]", "task.depths=[0.5]", "task.repeats=1", "task.max_new_tokens=8", "policy=snapkv")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "theirs"
    assert run(["-m", *SMALL, f"out={out}"]) == 0
    return out


@pytest.fixture
def theirs(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in a folder that is on the path, with a module that leaves a mark when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs_module.py").write_text("open('mark', 'w')\nclass Part: ...\ndef summary(answers): return {}\n")
    sys.modules.pop("theirs_module", None)
    return Path(shutil.copytree(honest, tmp_path / "theirs"))


TOUCH = {"_target_": "subprocess.Popen", "args": ["touch", "mark"]}
NODES: dict[str, tuple[str, Any]] = {
    "a class of Python": ("task", TOUCH),
    "a module beside the results": ("task", {"_target_": "theirs_module.Part"}),
    "a class that a task imports": ("task", {"_target_": "kvbench.tasks.ruler.task.Path"}),
    "a class outside of the parts": ("policy", {"_target_": "kvbench.terminal.command.Parser", "prog": "x"}),
    "a part inside a list": ("task", {"_target_": "kvbench.tasks.suite.Suite", "tasks": [TOUCH]}),
    "code of a model": ("model", {"hub_id": "some/model", "trust_remote_code": True}),
    "code of an answer": ("task", {"_target_": "kvbench.tasks.lm_eval.task.LmEval", "allow_code_execution": True}),
    "task files": ("task", {"_target_": "kvbench.tasks.lm_eval.task.LmEval", "task": "x", "include_path": "."}),
}


def test_a_configuration_of_others_builds_only_parts_of_kvbench(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = (path.parent for path in theirs.glob("*/config.yaml"))
    config = read_yaml(run / "config.yaml")
    for number, (name, node) in enumerate(NODES.values()):
        changed = {**config, "config": {**config["config"], name: node}}
        write_yaml(Path(shutil.copytree(run, theirs / f"{run.name}{number}")) / "config.yaml", changed)
    shutil.rmtree(run)
    assert results(["check", str(theirs)]) == 1
    refused = [line for line in capsys.readouterr().err.splitlines() if "if you trust it" in line or "--trust" in line]
    assert all(sum(f"{run.name}{number}" in line for line in refused) == 1 for number in range(len(NODES)))
    assert report([str(theirs)]) == 0
    assert not Path("mark").exists()
    assert "theirs_module" not in sys.modules


@pytest.mark.parametrize(
    "metadata",
    [
        {"benchmark": "theirs_module"},
        {"benchmark": "lm_eval", "task": "x", "aggregation": {"m": "subprocess:call"}},
        {"benchmark": "lm_eval", "task": "x", "aggregation": {"m": "theirs_module:summary"}},
        {"benchmark": "lm_eval", "task": "x", "aggregation": {"m": "lm_eval.utils:os"}},
    ],
)
def test_examples_of_others_name_no_function(metadata: dict[str, Any], theirs: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "made", "snapkv", [answered(i, 1.0, "a") for i in range(3)])
    path = folder / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, word in zip(lines, ("touch", "mark", "mark2"), strict=True):
        line |= {"metadata": metadata, "measures": {"m,none": word}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert results(["collect", str(tmp_path / "made")]) == 0
    assert not Path("mark").exists()
    assert "theirs_module" not in sys.modules


class Marking:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("mark"),)


def test_status_of_a_foreign_sweep_unpickles_nothing(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = theirs / ".sweep" / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    for name in ("1_submitted.pkl", "1_0_result.pkl"):
        (jobs / name).write_bytes(pickle.dumps(Marking()))
    key = next(theirs.glob("*/config.yaml")).parent.name
    for cluster in ("slurm", "local"):
        (jobs / f"{cluster}.json").write_text(json.dumps({"id": "1", "cluster": cluster, "keys": [key]}))
    assert sweep(["status", str(theirs)]) == 0
    assert "1 finished" in capsys.readouterr().out
    assert not Path("mark").exists()


def test_cells_of_a_csv_file_are_not_formulas(tmp_path: Path) -> None:
    words = ("=cmd|'/c calc'!A1", "+cmd", "-cmd", "@sum", "\t=1", "-5 tokens", "snapkv")
    for word in words:
        write_run(tmp_path / "runs", "snapkv", [answered(0, 1.0)], environment={"kvbench_revision": word})
    assert results(["collect", str(tmp_path / "runs"), "-o", str(tmp_path / "t.csv")]) == 0
    with (tmp_path / "t.csv").open(newline="") as file:
        cells = {row["kvbench_revision"] for row in csv.DictReader(file)}
    assert cells == {*(f"'{word}" for word in words[:5]), *words[5:]}


NUMBERS: dict[str, Any] = {
    "prompt_tokens": 10**400,
    "budget": "many",
    "policy": [],
    "model": {"sha256": {}},
    "dtype": 16,
}


def test_bad_runs_are_left_out_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    good = write_run(tmp_path / "runs", "tova", [answered(i, 1.0) for i in range(6)])
    bad = []
    for budget, (field, value) in enumerate(NUMBERS.items(), 40):
        bad.append(write_run(tmp_path / "runs", "snapkv", [answered(i, 1.0) for i in range(6)], budget=budget))
        if field == "prompt_tokens":
            path = bad[-1] / "samples.jsonl"
            path.write_text(path.read_text().replace('"prompt_tokens": 1000', f'"{field}": {value}', 1))
        else:
            config = read_yaml(bad[-1] / "config.yaml")
            config["identity"][field] = value
            write_yaml(bad[-1] / "config.yaml", config)
    assert results(["collect", str(tmp_path / "runs")]) == 0
    assert "tova" in (shown := capsys.readouterr()).out
    assert all(run.name in shown.err + caplog.text for run in bad)
    assert "line 1: prompt_tokens=" in shown.err + caplog.text
    assert report([str(tmp_path / "runs"), "-o", str(tmp_path / "r.html")]) == 0
    assert results(["check", str(tmp_path / "runs")]) == 1
    assert good.name in capsys.readouterr().err  # it is made up, so it is refused for its own reason


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
@pytest.mark.parametrize("how", ["missing", "zeros"])
def test_a_run_without_its_records_is_completed_by_the_same_command(name: str, how: str, theirs: Path) -> None:
    (path,) = theirs.glob(f"*/{name}")
    before, samples = path.read_bytes(), path.with_name("samples.jsonl").read_bytes()
    path.unlink()
    if how == "zeros":
        path.write_bytes(bytes(len(before)))
    assert run(["-m", *SMALL, f"out={theirs}"]) == 0
    assert len(path.read_bytes()) > 100
    assert path.with_name("samples.jsonl").read_bytes() == samples


def test_classes_that_the_user_names_are_built(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = theirs.glob("*/config.yaml")
    config = read_yaml(path)
    config["config"]["task"] = {"_target_": "theirs_module.Part"}
    write_yaml(path, config)
    assert results(["check", str(theirs), "--trust", "theirs_module"]) == 1
    assert "task._target_=theirs_module.Part is not a task" in capsys.readouterr().err
