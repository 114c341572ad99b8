"""What all commands do alike, and files that are wrong: one sentence, an exit code, nothing written or lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from command_lines import MAINS

from kvbench.errors import UsageError
from kvbench.tasks.text_files import texts
from kvbench.terminal.command import BROKEN_PIPE, FAILED, WRONG, command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        (ZeroDivisionError("one\ntwo"), FAILED, "kvbench: ZeroDivisionError: one (HYDRA_FULL_ERROR=1 shows where)\n"),
        (KeyboardInterrupt(), 130, "kvbench: interrupted\n"),
        (BrokenPipeError(), BROKEN_PIPE, ""),
    ],
    ids=["usage", "ours", "ctrl-c", "head"],
)
def test_every_exception_of_a_command_is_an_exit_code_and_one_message(
    error: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    @command
    def main(arguments: object = None) -> int:
        raise error

    assert main() == code
    assert capfd.readouterr().err == said


def test_sigterm_has_the_exit_code_of_shells() -> None:
    @command
    def main(arguments: object = None) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert main() == 143


SLIPS = {
    "bench": ["--help", "nope", "d2o_table12 nope=1", "d2o_table12 rounds=0"],
    "tables": ["--help", "show nope"],
    "plot": ["--help", "runs"],
    "report": ["--help", "runs -o r.pdf"],
    "results": ["--help", "collect --help", "collect runs -o t.doc"],
    "claims": ["--help", "-o claims.doc"],
    "memory": ["--help"],
}


SLOW = {"torch", "transformers", "lm_eval", "nltk", "rouge_score", "wonderwords", "jieba", "huggingface_hub"}
LIBRARIES = {"numpy", "pandas", "datasets", "matplotlib", "wandb"}
TASKS = "kvbench.tasks.niah, kvbench.tasks.suite, kvbench.tasks.ruler.niah, kvbench.tasks.longbench.task"


def test_the_package_tasks_help_and_slips_do_not_wait_for_slow_imports() -> None:
    script = "import sys; from contextlib import suppress; from kvbench.cli import main; main(['--help'])\n"
    script += f"assert not {SLOW | LIBRARIES!r} & {{*sys.modules}}\n"
    script += f"import kvbench, {TASKS}\nassert not {SLOW!r} & {{*sys.modules}}\n"
    for name, lines in SLIPS.items():
        script += f"from {MAINS[name]} import main\n"
        for line in lines:
            script += f"with suppress(SystemExit): main({line.split()!r})\n"
    found = subprocess.run([sys.executable, "-c", f"{script}assert 'torch' not in sys.modules"], check=False)
    assert found.returncode == 0


Write = Callable[[Path], object]
TEXTS: dict[str, tuple[str, Write, str]] = {
    "white space": ("a.txt", lambda p: p.write_text(" \n\t "), "a.txt contains only white space"),
    "white row": ("a.jsonl", lambda p: p.write_text('{"text": " "}\n'), "a.jsonl:1 contains only white space"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_without_letters_are_refused_by_name(case: str, folder: Path) -> None:
    name, write, said = TEXTS[case]
    write(folder / name)
    with pytest.raises(ValueError, match=said):
        list(texts(str(folder / name), (), "text"))
