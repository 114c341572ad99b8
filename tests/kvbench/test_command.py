"""The command `kvbench`: sub-commands, their old forms, and completion in a shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvbench
from kvbench.cli import COMMANDS, main


def test_every_sub_command_has_a_summary_its_help_and_an_old_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvbench {kvbench.__version__}\n"
    for name, (place, _) in COMMANDS.places.items():
        module, _, _ = place.partition(":")
        old = module.removesuffix(".__main__").rpartition(".")[2]
        assert old == name.replace("-", "_")  # python -m kvbench.NAME
        if name != "lm-eval":  # its help is that of lm-eval
            assert main([name, "--help"]) == 0
            assert capsys.readouterr().out.startswith(f"Usage: kvbench {name} ")


BASH = """
eval "$(_KVBENCH_COMPLETE=bash_source kvbench)"
for line in "$@"; do
  COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
  IFS='|' read -r -a COMP_WORDS <<< "$(sed 's/ /|/g; s/=/|=|/g' <<< "$line")"
  [[ $line == *[\\ =] ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _kvbench_completion kvbench
  echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_and_names(tmp_path: Path) -> None:
    """As bash calls it: words are split at `=`, and only the part behind it is replaced."""
    command = tmp_path / "kvbench"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvbench "$@"\n')
    command.chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    lines = ["kvbench repo", "kvbench policy=full,streaming"]
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *lines], env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert [line.split() for line in done.stdout.splitlines()] == [["report"], ["full,streamingllm"]]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("plot --free", "--free-y "),
        ("-m engine.cu", "engine.cuda_graph="),
        ("tables show caote/table6", "caote/table6 "),
        ("memory policy = streaming", "streamingllm "),
    ],
)
def test_options_fields_and_names_of_sub_commands_are_completed(
    words: str, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_KVBENCH_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"kvbench {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert main([]) == 0
    assert capsys.readouterr().out == f"plain,{found}\n"


@pytest.mark.parametrize(("started", "code", "message"), [("kvbench", 130, "kvbench: interrupted\n"), ("mine", -2, "")])
def test_an_interrupt_during_imports_is_one_line_and_other_programs_keep_theirs(
    started: str, code: int, message: str
) -> None:
    program = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.argv[0] = '/bin/{started}'\nimport kvbench\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == message or (not message and done.stderr.endswith("KeyboardInterrupt\n"))
