"""Results of others are read as data: nothing that their files name is imported, built, unpickled or run."""

import csv
import json
import pickle
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp, log
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from plotted_runs import answered, write_run

from kvbench.cli import main as run
from kvbench.config.parts import build
from kvbench.config.presets import named_config
from kvbench.report.html.report import main as report
from kvbench.results.__main__ import main as results
from kvbench.results.files import read_yaml, write_yaml
from kvbench.results.result import read_result
from kvbench.sweep import main as sweep
from kvbench.tasks.trust import reading

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
    "a task of lm-eval": ("task", {"_target_": "kvbench.tasks.lm_eval.task.LmEval", "task": "gsm8k"}),
    "a function of kvbench": ("task", {"_target_": "kvbench.tasks.longproc.programs.pseudo_to_code", "output": ""}),
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


class Server:
    """A server on this machine in place of the Hub: `asked` has the paths of all requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def parse_request(self) -> bool:
                asked.append(str(self.raw_requestline))
                self.requestline, self.request_version, self.command, self.close_connection = "", "HTTP/1.1", "", True
                self.send_error(404)
                return False

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        address, constants = f"http://127.0.0.1:{self.server.server_port}", "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.ENDPOINT", address)
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{revision}/{filename}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(monkeypatch)
    yield server
    server.server.shutdown()
    server.server.server_close()


GGUF = {"path": None, "bundled": None, "gguf_file": "x.gguf"}
MODELS: dict[str, dict[str, Any]] = {
    "a package beside the results": {**GGUF, "package": "theirs_module"},
    "a package inside one": {**GGUF, "package": "theirs_package.inner.deep"},
    "a relative package": {**GGUF, "package": ".theirs_module"},
    "a model of the Hub": {**GGUF, "gguf_file": None, "hub_id": "made/up"},
    "a GGUF file of the Hub": {**GGUF, "hub_id": "made/up", "revision": "0" * 40},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_reading_results_imports_and_fetches_no_model(
    model: dict[str, Any], theirs: Path, hub: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("theirs_package", "theirs_package/inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('mark', 'w')\n")
    (path,) = theirs.glob("*/config.yaml")
    config = read_yaml(path)
    config["config"]["model"] = {**config["config"]["model"], **model}
    config["identity"]["model"] = {"hub_id": "made/up", "commit": "0" * 40}
    write_yaml(path, config)
    assert results(["check", str(theirs)]) == 1
    assert report([str(theirs), "-o", "report.html"]) == 0
    assert "Prompts are not shown" in Path("report.html").read_text()
    assert results(["collect", str(theirs)]) == 0
    assert hub.asked == []
    assert not Path("mark").exists()
    assert not {"theirs_module", "theirs_package"} & {*sys.modules}


@pytest.mark.parametrize("task", ["longbench/qasper", "loogle/shortdep_qa", "math500"])
def test_reading_results_fetches_no_data(task: str, theirs: Path, hub: Server) -> None:
    (path,) = theirs.glob("*/config.yaml")
    config = read_yaml(path)
    config["config"]["task"] = named_config("task", task)
    write_yaml(path, config)
    assert results(["check", str(theirs)]) == 1
    assert report([str(theirs), "-o", "report.html"]) == 0
    assert hub.asked == []
    with pytest.raises(ValueError, match="cannot be"):
        next(build(config["config"]["task"]).examples(None, 0))
    assert hub.asked, "without `reading` the same task asks the Hub"


def test_a_connection_is_refused_while_results_are_read(hub: Server) -> None:
    address = hub.server.server_address
    with reading():
        for connect in (lambda: socket.create_connection(address), lambda: socket.getaddrinfo("made.up", 80)):
            with pytest.raises(ConnectionRefusedError, match="results are read without the network"):
                connect()
    with socket.create_connection(address):
        pass


def with_measures(folder: Path, metadata: dict[str, Any], measures: Sequence[object]) -> Path:
    """A finished run of the examples, each with its measure `m`."""
    made = write_run(folder, "snapkv", [answered(i, 1.0, "a") for i in range(len(measures))])
    path = made / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, measure in zip(lines, measures, strict=True):
        line |= {"metadata": metadata, "measures": {"m,none": measure}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


TEMPLATE = "{{ cycler.__init__.__globals__.os.system('touch mark') }}"
FUNCTIONS = [
    *("subprocess:call", "theirs_module:summary", "lm_eval.utils:os", "lm_eval.tasks:get_task_dict", "builtins:eval"),
    *("lm_eval.tasks._yaml_loader:load_yaml", "lm_eval.tasks.longproc.metrics:countdown", "lm_eval.api.metrics:mean"),
    *("kvbench.tasks.longproc.programs:pseudo_to_code", "mean:theirs_module", "theirs_module.summary", ["mean"], None),
]


@pytest.mark.parametrize("metadata", [{"benchmark": "theirs_module"}, *FUNCTIONS])
def test_examples_of_others_name_no_function(metadata: Any, theirs: Path, tmp_path: Path) -> None:
    if not isinstance(metadata, dict):
        metadata = {"benchmark": "lm_eval", "task": "x", "aggregation": {"m": metadata}}
    (tmp_path / "x.yaml").write_text("task: x\ndataset_path: !function theirs_module.summary\n")
    loaded = {name for name in sys.modules if name.startswith(("lm_eval.tasks.", "theirs_module"))}
    measures = [[str(tmp_path / "x.yaml")], {"task": "x", "doc_to_text": TEMPLATE}, "touch"]
    folder = with_measures(tmp_path / "made", metadata, measures)
    assert results(["collect", str(tmp_path / "made")]) == 0
    assert results(["collect", str(tmp_path / "made"), "--by", "task"]) == (0 if "task" in metadata else 2)
    assert report([str(tmp_path / "made"), "-o", "report.html"]) == 0
    assert set(read_result(folder).official.values()) <= {None}
    assert not Path("mark").exists()
    assert {name for name in sys.modules if name.startswith(("lm_eval.tasks.", "theirs_module"))} <= loaded


@pytest.mark.parametrize(
    ("name", "measures", "expected"),
    [
        ("mean", [1, 0.5, True], 2.5 / 3),
        ("median", [3, 1, 2], 2.0),
        ("perplexity", [-1.0, -3.0], exp(2)),
        ("weighted_perplexity", [[-2.0, 1], [-6.0, 3]], exp(2)),
        ("bits_per_byte", [[-2.0, 1], [-6.0, 3]], 2 / log(2)),
        ("brier_score", [[0, [1.0, 0.0]], [1, [1.0, 0.0]]], 1.0),
        ("f1", [[1, 1], [1, 0], [0, 0]], 2 / 3),
        ("matthews_corrcoef", [[1, 1], [0, 0]], 1.0),
        ("bleu", [["a b c d e", "a b c d e"]] * 2, 100.0),
        ("chrf", [[["abcdef", "x"], "abcdef"]], 100.0),
        ("ter", [["a b c d", "a b c x"]], 25.0),
        ("lm_eval.tasks.ifeval.utils:agg_inst_level_acc", [[True], [False, False, True]], 0.5),
        ("lm_eval.tasks.ruler.common_utils:aggregate_metrics", [1.0, -1, 0.5], 0.75),
        ("lm_eval.tasks.super_glue.cb.aggregate:cb_multi_fi", [[0, 0], [1, 1], [2, 2], [1, 2]], 7 / 9),
    ],
)
def test_the_aggregates_of_lm_eval_take_numbers(
    name: str, measures: list[Any], expected: float, tmp_path: Path
) -> None:
    metadata = {"benchmark": "lm_eval", "task": "x", "aggregation": {"m": name}}
    good = read_result(with_measures(tmp_path, metadata, measures))
    assert good.official == {"m,none": pytest.approx(expected)}
    for other in ({"a": 1}, [[[1]]], "1", None, [1] * 2000):
        bad = read_result(with_measures(tmp_path, metadata, [*measures, other]))
        assert bad.official == {"m,none": None}


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
