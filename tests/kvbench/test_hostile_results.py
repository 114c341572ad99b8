"""Results of others are read as data: nothing that their files name is imported, built, unpickled or run."""

import csv
import json
import os
import pickle
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp, log
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from markdown_it import MarkdownIt
from plotted_runs import answered, described, write_run

from kvbench.cli import main as run
from kvbench.config.parts import build
from kvbench.config.presets import named_config
from kvbench.plot import main as plot
from kvbench.report.html.report import main as report
from kvbench.results.__main__ import main as results
from kvbench.results.definition import examples
from kvbench.results.files import read_json, read_yaml, write_json, write_yaml
from kvbench.results.loading import read_result
from kvbench.results.summary import _digest as digest_of_files
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


def copies_with(folder: Path, changes: Sequence[Callable[[Any], object]]) -> None:
    """A copy of the run for each change of its configuration, in place of the run."""
    (run,) = (path.parent for path in folder.glob("*/config.yaml"))
    for number, change in enumerate(changes):
        path = Path(shutil.copytree(run, folder / f"made-up-{number}")) / "config.yaml"
        config = read_yaml(path)
        change(config)
        write_yaml(path, {**config, "run_id": path.parent.name})
    shutil.rmtree(run)


def test_reading_results_imports_and_fetches_no_model(theirs: Path, hub: Server, tmp_path: Path) -> None:
    for name in ("theirs_package", "theirs_package/inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('mark', 'w')\n")

    def of_another(config: Any, model: dict[str, Any]) -> None:
        config["config"]["model"] |= model
        config["identity"]["model"] = {"hub_id": "made/up", "commit": "0" * 40}

    copies_with(theirs, [partial(of_another, model=model) for model in MODELS.values()])
    assert results(["check", str(theirs)]) == 1
    assert report([str(theirs), "-o", "report.html"]) == 0
    assert "Prompts are not shown" in Path("report.html").read_text()
    assert results(["collect", str(theirs)]) == 0
    assert hub.asked == []
    assert not Path("mark").exists()
    assert not {"theirs_module", "theirs_package"} & {*sys.modules}


def test_reading_results_fetches_no_data(theirs: Path, hub: Server) -> None:
    tasks = [named_config("task", name) for name in ("longbench/qasper", "loogle/shortdep_qa", "math500")]
    copies_with(theirs, [lambda config, task=task: config["config"].update(task=task) for task in tasks])
    assert results(["check", str(theirs)]) == 1
    assert report([str(theirs), "-o", "report.html"]) == 0
    assert hub.asked == []
    for task in tasks:
        hub.asked.clear()
        with pytest.raises(ValueError, match="cannot be"):
            next(build(task).examples(None, 0))
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


def test_examples_of_others_name_no_function(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("task: x\ndataset_path: !function theirs_module.summary\n")
    loaded = {name for name in sys.modules if name.startswith(("lm_eval.tasks.", "theirs_module"))}
    measures = [[str(tmp_path / "x.yaml")], {"task": "x", "doc_to_text": TEMPLATE}, "touch"]
    named = [{"benchmark": "lm_eval", "task": "x", "aggregation": {"m": name}} for name in FUNCTIONS]
    named.insert(0, {"benchmark": "theirs_module"})
    made = tmp_path / "made"
    some = [with_measures(made, one, measures) for one in named]
    assert results(["collect", str(some[0]), "--by", "task"]) == 2
    for options in ([], ["--by", "task"]):
        assert results(["collect", str(made), *options]) == 0
    assert report([str(made), "-o", "report.html"]) == 0
    assert {value for folder in some for value in read_result(folder).official.values()} <= {None}
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


FORMULAS = ("=cmd|'/c calc'!A1", "+cmd", "-cmd", "@sum", "\t=1", " =1", "\n=1", "-5 tokens", "＝1", "|cmd")
SUMS = ("-2+3+cmd|' /C calc'!A0", '+1+HYPERLINK("http://made.up")', "-1.5e3*A1", "+.5-cmd", "-1)")
PLAIN = ("％=1", "1-cmd", "-5", "+1.5e-3", "snapkv")


def test_cells_of_a_csv_file_are_not_formulas(tmp_path: Path) -> None:
    for word in (*FORMULAS, *SUMS, *PLAIN):
        write_run(tmp_path / "runs", word, [answered(0, 1.0)], environment={"kvbench_revision": word})
    assert results(["collect", str(tmp_path / "runs"), "-o", str(tmp_path / "t.csv")]) == 0
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cells = {row["kvbench_revision"] for row in rows}
    assert cells == {*PLAIN, *(f"'{word}" for word in (*FORMULAS, *SUMS))}
    assert {row["policy"][0] for row in rows} & {*"=+-@|＝\t\n "} == {"-", "+"}  # of the two numbers


NAMES = ("\x1b]0;mine\x07", "\x1b[2J", "a\nb", "a\rb", "\x9b1m", "\u202ecod", "\u2028", "a|b", "\x08\x08")
LINKS = (
    "![x](http://made.up/p.png)",
    "[x](javascript:alert(1))",
    "<javascript:alert(1)>",
    "<img src=x onerror=alert(1)>",
    "[x][y]",
    "`a` **b** ~~c~~ $d$ &lt;",
    "\\![x](y)",
    "&#33;[x](y)",
)


def test_names_of_others_stay_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMES, *LINKS):
        first, second, *_ = NAMES if name in NAMES else LINKS
        samples = [answered(i, 1.0, task=name) for i in range(6)]
        about: dict[str, Any] = {"environment": {"python": name}, "parts": described("SnapKV", words=name)}
        write_run(Path("runs"), name, samples, task=first if name == first else second, model=first, **about)
    Path("runs/broken").mkdir()
    Path("runs/broken/samples.jsonl").write_text(
        json.dumps({"index": 0, "output": NAMES[-1], "kept_tokens": LINKS[-1]})
    )
    shown = ""
    assert results(["collect", "runs", "--changes"]) == 2
    for options in ([], ["--by", "task"], ["--pivot", "task"], ["--columns", "policy,task,run_id"]):
        assert results(["collect", "runs", *options]) == 0
        for end in ("md", "tex", "txt") if "--by" in options else ("md",):
            assert results(["collect", "runs", *options, "-o", f"t.{end}"]) == 0
            shown += Path(f"t.{end}").read_text()
        lines = [line for line in Path("t.md").read_text().splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, "a name splits neither row nor cell"
        page = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(Path("t.md").read_text())
        assert not re.search(r"<(a|img|em|strong|code|s)\b", page)
    assert results(["check", "runs"]) == 1
    assert plot(["runs", "-o", "figures"]) == 0
    assert report(["runs", "-o", "report.html"]) == 0
    for figure in Path("figures").glob("*.svg"):
        ElementTree.fromstring(figure.read_text())
    shown += "".join(capsys.readouterr())
    assert all(sign.isprintable() or sign == "\n" for sign in shown)


def test_titles_of_a_sweep_of_others_stay_titles(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_file = theirs / "sweep.yaml"
    content = read_yaml(sweep_file)
    content["runs"][0]["title"] = "".join(NAMES)
    content["runs"].append({**content["runs"][0], "title": "\x1b[2J", "run_id": None, "error": "\x1b[2Jno"})
    write_yaml(sweep_file, content)
    (theirs / ".sweep" / "jobs").mkdir(parents=True)
    (theirs / ".sweep" / "jobs" / "\x1b[2J.json").write_text("{}")
    assert sweep(["status", str(theirs)]) == 0
    shown = "".join(capsys.readouterr())
    assert "\\x1b[2J" in shown
    assert all(sign.isprintable() or sign == "\n" for sign in shown)


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


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from _leaves(value, (*path, key))


def _with(tree: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return value
    changed = deepcopy(tree)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


BAD = (None, [], {"a": 1}, "x\ny", 10**400, True, -1.5, [[1]])


@pytest.mark.slow("reads a run for every value of its files")
def test_no_value_of_a_run_ends_the_tables_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = [answered(i, 1.0, task="ab"[i % 2]) for i in range(6)]
    good = write_run(tmp_path / "runs", "tova", samples)
    write_run(tmp_path / "runs", "full", samples, None)
    for name in ("config.yaml", "environment.json", "metrics.json"):
        read, write = (read_yaml, write_yaml) if name == "config.yaml" else (read_json, write_json)
        for number, path in enumerate(_leaves(read(good / name))):
            bad = Path(shutil.copytree(good, tmp_path / "runs" / f"bad-{name}-{number}"))
            write_yaml(bad / "config.yaml", {**read_yaml(good / "config.yaml"), "run_id": bad.name})  # no copy of it
            summary, value = read_json(bad / "summary.json"), BAD[number % len(BAD)]
            summary["run"]["run_id"] = bad.name
            write(bad / name, _with(read(bad / name), path, value))
            if name == "config.yaml" and path and path[0] in summary["run"]:
                summary["run"] = _with(summary["run"], path, value)
            write_json(bad / "summary.json", {**summary, "computed_from": digest_of_files(bad)})
    for options in ([], ["--pivot", "budget", "-o", "t.md"], ["--by", "task", "-o", "t.csv"], ["-o", "t.parquet"]):
        assert results(["collect", "runs", *options]) == 0
        assert "Traceback" not in capsys.readouterr().err
    assert good.name in Path("t.csv").read_text()
    assert plot(["runs", "-o", "figures"]) == 0
    assert report(["runs", "-o", "report.html"]) == 0


def test_a_run_that_lost_lines_is_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, "tova", [answered(i, 1.0) for i in range(6)])
    assert read_result(folder).state == "finished"
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    for kept in (5, 3):
        (folder / "samples.jsonl").write_text("".join(lines[:kept]))
        found = read_result(folder)
        assert (found.state, found.n) == ("unfinished", kept)
        assert examples(folder) == (0, 0)
    assert results(["collect", str(tmp_path)]) == 0
    assert "unfinished" in capsys.readouterr().out


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "zeros": lambda content: bytes(len(content)),
    "another kind": lambda _: b"[1, 2]\n",
    "no text": lambda content: b"\xff\xfe" + content,
    "nested": lambda _: b"[" * 100_000,
    "another number": lambda content: content.replace(b"128", b"129").replace(b'"hardware"', b'"software"'),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("config.yaml", how) for how in ("missing", "nested", "another number")),
        *(("environment.json", how) for how in ("zeros", "another kind", "no text")),
    ],
)
def test_the_same_command_completes_a_run_without_its_records(
    name: str, how: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = theirs.glob(f"*/{name}")
    before, samples = path.read_bytes(), path.with_name("samples.jsonl").read_bytes()
    path.unlink()
    if (content := DAMAGE[how](before)) is not None:
        path.write_bytes(content)
    assert results(["collect", str(theirs)]) == 2, "its numbers are not shown under another identity"
    assert run(["-m", *SMALL, f"out={theirs}"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert results(["collect", str(theirs)]) == 0
    assert name != "config.yaml" or read_yaml(path)["identity"] == yaml.safe_load(before)["identity"]
    assert path.with_name("samples.jsonl").read_bytes() == samples


def test_a_pipe_in_a_folder_of_others_is_no_file_of_a_run(theirs: Path) -> None:
    (folder,) = (path.parent for path in theirs.glob("*/config.yaml"))
    for name in ("samples.jsonl", "config.yaml", "environment.json", "metrics.json", ".lock"):
        copy = Path(shutil.copytree(folder, theirs / f"{name}-{folder.name}"))
        (copy / name).unlink(missing_ok=True)
        os.mkfifo(copy / name)
    assert results(["collect", str(theirs)]) == 0
    assert sweep(["status", str(theirs)]) == 0


def test_classes_that_the_user_names_are_built(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = theirs.glob("*/config.yaml")
    config = read_yaml(path)
    config["config"]["task"] = {"_target_": "theirs_module.Part"}
    write_yaml(path, config)
    assert results(["check", str(theirs), "--trust", "theirs_module"]) == 1
    assert "task._target_=theirs_module.Part is not a task" in capsys.readouterr().err
