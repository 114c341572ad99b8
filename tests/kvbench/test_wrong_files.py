"""Files and command lines of the other commands that are wrong: one sentence, exit code 2, nothing written or lost."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from command_lines import MAINS

from kvbench.analysis.load import load_results, read_result
from kvbench.records.sample import Sample
from kvbench.records.sample_check import problem
from kvbench.sweeps.outcome import explain
from kvbench.tasks.text_files import texts
from kvbench.terminal.command import BROKEN_PIPE, FAILED, WRONG, command
from kvbench.terminal.errors import UsageError
from kvbench.terminal.signals import Terminated, sigterm_as_interrupt

LINES = {
    # flags, as argparse has them
    "results": "the following arguments are required",
    "results colect": "invalid choice: 'colect'",
    "report runs more": "unrecognized arguments: more",
    "plot runs -o a.svg --kind nope": "argument --kind: invalid choice: 'nope'",
    "claims --paper nope": "argument --paper: invalid choice: 'nope'",
    "tables bytes caote/table2 --length abc": "argument --length: invalid int value: 'abc'",
    "diagnose nope": "argument NAME: invalid choice: 'nope'",
    "sweep stat runs": "invalid choice: 'stat'",
    "diagnose": "the following arguments are required: NAME (",
    "score longbench": "the following arguments are required: predictions",
    "memory --length=5": "unrecognized arguments: --length=5",
    "claims -o a.md -o b.md": "-o is given twice",
    # flags and settings without effect
    "claims --any-budget": "--any-budget has no effect without --runs",
    "plot file.txt -o a.svg --format png": "--format png has no effect on -o a.svg, whose suffix says it",
    "plot file.txt -o a.svg --kind bench --policy h2o": "--policy has no effect on --kind bench",
    "tables compare caote/table2 --bench . --runs .": "--runs and key=value have no effect",
    "bench kernels model=pocket": "model= has no effect: kernels runs no model",
    "bench sweep cases=file.txt": "cases= has no effect on sweep: it is for kernels",
    # fields twice
    "memory length=1 length=2": "length=2: length is given twice",
    "tables compare caote/table2 limit=1 limit=2": "limit=2: limit is given twice",
    "bench d2o_table12 scale=1 scale=2": "scale=2: scale is given twice",
    "diagnose coverage policy=h2o policy=tova": "policy=tova: policy is given twice, write policy=a,b",
    # outputs, before anything is read
    "results collect nowhere -o t.pdf": "-o t.pdf must end in one of .csv",
    "report nowhere -o no/r.html": "-o no/r.html cannot be written: no does not exist",
    "claims -o no/c.md": "-o no/c.md cannot be written: no does not exist",
    "plot nowhere -o file.txt/p.svg": "-o file.txt/p.svg cannot be written: file.txt is no folder",
    "plot nowhere -o new/": "nowhere does not exist",
    "results collect nowhere -o .csv": "-o .csv needs a name before .csv",
    "report '' -o a.html": "argument DIR: '' is no path",
    "plot nowhere -o ''": "argument -o/--output: '' is no path",
    "tables bytes caote -o no/b.svg": "-o no/b.svg cannot be written: no does not exist",
    "score longbench in.jsonl -o /dev/null": "-o /dev/null cannot be written: it is no file",
    "bench d2o_table12 model=pocket out=file.txt/x": "out=file.txt/x cannot be written: file.txt is no folder",
    # values
    "memory length=99999999999999999999": "length=99999999999999999999 must be a whole number from 1 to",
    "memory slug=5": "slug=5 is not a field",
    "bench d2o_table12 model=.": "model=. has no config.json: it must be a folder made by save_pretrained",
    "bench d2o_table12 timed=9 new_tokens=3": "timed=9 must be at most new_tokens=3",
    "diagnose coverage budget=64,128": "budget=64,128 names several values: a diagnostic compares policies",
    "diagnose coverage policy=full": "coverage is of policies that evict: policy=full keeps every token",
    "diagnose output_error policy=full": "policy=full keeps every token exactly, so it makes no error",
    "diagnose reconstruction policy=full": "policy=full stores every token exactly, so nothing is lost",
    "sweep status file.txt": "file.txt holds no sweep: there is no sweep.yaml",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("no folder")
    Path("in.jsonl").write_text('{"dataset": "qasper", "prediction": "a", "answers": ["a"]}\n')
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_is_one_sentence_and_leaves_nothing_behind(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = shlex.split(line)
    assert import_module(MAINS[name]).main(words) == WRONG
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("kvbench: ")
    assert LINES[line] in said.err
    assert sorted(path.name for path in folder.iterdir()) == ["file.txt", "in.jsonl"]


@pytest.mark.parametrize("name", MAINS)
def test_every_command_has_its_help_and_our_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, begins in (("--help", ""), ("--version", "kvbench 0.")):
        with suppress(SystemExit):  # argparse's own
            assert import_module(MAINS[name]).main([flag]) == 0
        assert capsys.readouterr().out.startswith(begins)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("a=1 is wrong"), WRONG, "kvbench: a=1 is wrong\n"),
        (ZeroDivisionError("one\ntwo"), FAILED, "kvbench: ZeroDivisionError: one (KVBENCH_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, "kvbench: interrupted\n"),
        (BrokenPipeError(), BROKEN_PIPE, ""),
    ],
    ids=["usage", "ours", "ctrl-c", "head"],
)
def test_whatever_a_command_raises_is_a_code_and_a_sentence(
    error: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    @command
    def main(arguments: object = None) -> int:
        raise error

    assert main() == code
    assert capfd.readouterr().err == said


def test_sigterm_has_the_exit_code_of_shells() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, sigterm_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert explain(raised.value)[0] == 143


def test_a_signal_that_a_library_makes_another_error_of_is_one_all_the_same() -> None:
    def imports() -> None:  # as transformers does with its modules
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        raise ModuleNotFoundError("Could not import module")

    with pytest.raises(Terminated), sigterm_as_interrupt():
        imports()


SLIPS = {
    "bench": ["--help", "nope", "d2o_table12 nope=1", "d2o_table12 scale=0"],
    "tables": ["--help", "show nope", "run caote/table2 scale=nope"],
    "plot": ["--help", "runs"],
    "report": ["--help", "runs -o r.pdf"],
    "results": ["--help", "collect --help", "collect runs -o t.doc"],
    "claims": ["--help", "-o claims.doc"],
    "memory": ["--help"],
}


@pytest.mark.parametrize("name", SLIPS)
def test_help_and_slips_do_not_wait_for_torch(name: str) -> None:
    script = f"import sys; from contextlib import suppress; from {MAINS[name]} import main\n"
    for line in SLIPS[name]:
        script += f"with suppress(SystemExit): main({line.split()!r})\n"
    found = subprocess.run([sys.executable, "-c", f"{script}assert 'torch' not in sys.modules"], check=False)
    assert found.returncode == 0


def test_the_listed_benchmarks_are_those_there_are() -> None:
    known = import_module(MAINS["bench"]).protocols()
    assert {name: one.about for name, one in known.items()} == import_module("kvbench.tools.bench.about").ABOUT


def test_a_program_that_imports_kvbench_keeps_its_own_handlers() -> None:
    script = "import gc, signal, kvbench; print(*map(signal.getsignal, (2, 15)), gc.isenabled(), gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    plain = subprocess.run(
        [sys.executable, "-c", script.replace(", kvbench", "")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-4:] == plain.stdout.split()[-4:]


# --- files that are read -------------------------------------------------------------------------------------------
NINE = ",".join(["*{0}"] * 9)
FILES = {
    "policy/dup.yaml": ("defaults: [snapkv]\nscorer: {window: 8}\nscorer: {window: 16}\n", "scorer is given twice"),
    "policy/bomb.yaml": (
        "a: &a [1, 2]\n" + "".join(f"{b}: &{b} [{NINE.format(a)}]\n" for a, b in pairwise("abcdefg")),
        "it holds more than 100000 values",
    ),
    "policy/loop.yaml": ("defaults: [loop]", "its defaults lead back to it"),
    "policy/tab.yaml": ("defaults: [snapkv]\n\tname: x\n", "cannot be read"),
    "policy/list.yaml": ("[1, 2]", "it must have fields"),
    "experiment/number.yaml": ("sweeps: 5", "sweeps must be a list"),
    "experiment/numbers.yaml": ("sweeps: [5]", "sweeps must be a list"),
    "experiment/lost.yaml": ("bogus: 5", "experiment=lost sets nothing: its file needs the line # @package _global_"),
    "experiment/odd.yaml": ("# @package _global_\nbogus: 5", "experiment=odd sets bogus, which is not a field of a"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own_that_cannot_be_meant_is_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "conf" / name
    path.parent.mkdir(parents=True)
    path.write_text(FILES[name][0])
    group = path.parent.name
    assert import_module("kvbench.cli").main(["--config-dir", "conf", f"{group}={path.stem}"]) == WRONG
    said = capsys.readouterr().err
    assert FILES[name][1] in said
    assert said.count("\n") == 1


TREES = {
    "": "it has no fields",
    "- a": "it has no fields",
    "run_id: 5": "run_id is 5",
    "run_id: a\nnames: {policy: a, model: b}": "there is no names.task",
    "run_id: a\nnames: 5": "names has no fields",
    "a: [": "while parsing",
}


@pytest.mark.parametrize("text", TREES)
def test_a_config_that_was_cut_is_named_with_what_it_lacks(text: str, folder: Path) -> None:
    (folder / "samples.jsonl").write_text(json.dumps(vars(sample())) + "\n")
    (folder / "config.yaml").write_text(text)
    with pytest.raises(UsageError, match=TREES[text]):
        read_result(folder)


def sample(**values: object) -> Sample:
    known = {"index": 0, "prompt_hash": "a", "prompt_tokens": 3, "references": [], "metadata": {}, "output": "x"}
    return Sample(**{**known, "score": 1.0, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"metadata": {"length": float("nan")}}, "metadata="),
        ({"metadata": {"deep": [{"x": float("inf")}]}}, "metadata="),
        ({"output": "\ud800"}, "output="),
    ],
)
def test_what_json_cannot_say_is_in_no_sample(values: dict[str, object], said: str) -> None:
    assert problem(sample()) is None
    assert (problem(sample(**values)) or "").startswith(said)


Write = Callable[[Path], object]
TEXTS: dict[str, tuple[str, Write, str]] = {
    "white space": ("a.txt", lambda p: p.write_text(" \n\t "), "a.txt has no text but white space"),
    "white row": ("a.jsonl", lambda p: p.write_text('{"text": " "}\n'), "a.jsonl:1 has no text but white space"),
    "surrogate": ("a.jsonl", lambda p: p.write_text('{"text": "\\ud800"}\n'), "row 1: text holds half a surrogate"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_without_letters_are_refused_by_name(case: str, folder: Path) -> None:
    name, write, said = TEXTS[case]
    write(folder / name)
    with pytest.raises(ValueError, match=said):
        list(texts(str(folder / name), (), "text"))


@pytest.mark.parametrize("content", ["one", '{"text": "one"}\n', 'text\n"one"\n'], ids=["txt", "jsonl", "csv"])
def test_a_byte_order_mark_is_no_part_of_a_text(content: str, folder: Path, request: pytest.FixtureRequest) -> None:
    path = folder / f"a.{request.node.callspec.id}"
    path.write_text(content, encoding="utf-8-sig")
    assert [text.text for text in texts(str(path), (), "text")] == ["one"]


def test_a_run_that_lies_there_twice_counts_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, examples in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        lines = [{**vars(sample(index=i)), "score": 1.0} for i in range(examples)]
        (folder / name / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / name / "metrics.json").write_text("{}")
        identity = {
            "model": {},
            "dtype": "x",
            "policy": {"store": {"class": "x"}, "schedule": {"decode": "evict"}},
            "budget": 1,
        }
        identity |= {"task": {}, "seed": 0, "generation": {}}
        names = {"policy": "p", "model": "m", "task": "t"}
        (folder / name / "config.yaml").write_text(json.dumps({"run_id": "r", "names": names, "identity": identity}))
        hardware = {"device_name": None, "processor": "x"}
        (folder / name / "environment.json").write_text(json.dumps({"hardware": hardware, "packages": {}}))
    (run,) = load_results(folder)
    assert run.folder.name == "b"
    assert caplog.messages == [f"{folder}/a is left out: it is the run of {folder}/b again"]


def test_a_full_disk_under_the_help_is_one_sentence() -> None:
    script = "from kvbench.cli import main; raise SystemExit(main(['--help']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == FAILED
    assert done.stderr.startswith("kvbench: no space left to write results")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_what_a_shell_closed_changes_no_exit_code_and_no_file_takes_its_number(closed: str) -> None:
    line = f"exec {sys.executable} -c {shlex.quote(CLOSED)} {closed}"
    assert subprocess.run(line, shell=True, capture_output=True, check=False).returncode == WRONG


CLOSED = """
import os
from kvbench.terminal.command import command
from kvbench.terminal.errors import UsageError

@command
def main(arguments=None):
    with open("file.txt") as file:
        if file.fileno() > 2 and not os.isatty(0):
            print("seen")
            raise UsageError("a=1 is wrong")

raise SystemExit(main())
"""
