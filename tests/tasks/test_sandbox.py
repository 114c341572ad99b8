"""Programs nobody vouches for: what they may do, what stops them, and that no trick makes an unfinished one pass."""

import os
import socket
import time
from pathlib import Path

import pytest

from kvbench.tasks import sandbox
from kvbench.tasks.sandbox import CodeEval, SandboxUnavailableError, run_program

SECONDS = 1  # of processor time; what computes ends by itself, however busy the machine
ASLEEP = 2.0  # for what only a clock can stop


@pytest.fixture(autouse=True, scope="module")
def walls() -> None:
    try:
        run_program("")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def test_a_program_passes_that_reaches_its_end_and_a_failed_assertion_says_so() -> None:
    assert run_program("def add(a, b):\n    return a + b\nassert add(2, 3) == 5", SECONDS) is None
    assert run_program("assert 1 + 1 == 3, 'sums'", SECONDS) == "AssertionError: sums"


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended before its last statement"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(999)", "stopped after 2"),
        ("import os\nif os.fork(): os._exit(0)", "ended before its last statement"),
        ("import os\nfor number in range(64):\n    try: os.write(number, b'x' * 32)\n    except OSError: pass", "xxxx"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_leaving_before_the_assertions_does_not_pass(trick: str, reason: str) -> None:
    said = run_program(f"{trick}\nassert False", SECONDS, ASLEEP if "sleep" in trick else 60)
    assert reason in str(said)


@pytest.mark.parametrize(
    ("program", "wall_seconds", "reason"),
    [
        ("while True: pass", 600, "stopped after 1 seconds of processor time"),
        ("import time; time.sleep(999)", ASLEEP, "stopped after 2 seconds"),
        ("x = bytearray(3 << 30)", 60, "MemoryError"),
        ("for i in range(9):\n    open(str(i), 'w').write('x' * (1 << 22))", 60, "OSError"),
    ],
)
def test_time_memory_and_files_are_limited(program: str, wall_seconds: float, reason: str) -> None:
    assert str(run_program(program, SECONDS, wall_seconds)).startswith(reason)


@pytest.mark.parametrize("folder", ["/usr", "/", "/usr/lib"])
def test_nothing_outside_its_own_folder_can_be_written(folder: str) -> None:
    assert "Error" in str(run_program(f"open({folder + '/kvbench_was_here'!r}, 'w').write('x')", SECONDS))
    assert not Path(folder, "kvbench_was_here").exists()


def test_files_outside_python_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    secret.chmod(0o644)
    seen = "import os; assert os.path.exists({!r})"
    assert run_program(seen.format(str(secret)), SECONDS) is not None
    assert run_program(seen.format("/etc/passwd"), SECONDS) is not None
    assert run_program(seen.format("/proc/self"), SECONDS) is not None
    assert run_program(seen.format(os.path.realpath(os.__file__)), SECONDS) is None


def test_no_connection_leaves_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()  # from here there is a way
        said = run_program(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)", SECONDS)
    assert "unreachable" in str(said)


def test_processes_are_few_and_end_with_it() -> None:
    program = (
        "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        time.sleep(999)\n        os._exit(0)"
    )
    began = time.monotonic()
    assert "BlockingIOError" in str(run_program(program, SECONDS))
    assert time.monotonic() - began < 999  # while one of them lives, its end of the report's pipe is open


def test_it_sees_no_other_process_and_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_SECRET", "x")
    assert run_program("import os; assert os.getpid() == 1 and 'KVBENCH_SECRET' not in os.environ", SECONDS) is None
    assert "ProcessLookupError" in str(run_program(f"import os; os.kill({os.getpid()}, 0)", SECONDS))


def test_what_was_made_read_only_cannot_be_mounted_again() -> None:
    program = (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        "assert c.mount(None, b'/usr', None, 4096 | 32, None) == 0, ctypes.get_errno()"
    )
    assert run_program(program, SECONDS) == "AssertionError: 1"  # EPERM


def test_where_the_walls_cannot_be_put_up_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    proof = tmp_path / "was_run"
    child = tmp_path / "child.py"
    source = sandbox._CHILD.read_text(encoding="utf-8")
    child.write_text(source.replace('_call("unshare"', '_call("no_such_function"'), encoding="utf-8")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(SandboxUnavailableError, match=r"does not let a program be walled in .*namespaces"):
        run_program(f"open({str(proof)!r}, 'w')", SECONDS)
    assert not proof.exists()


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    right, wrong = "def f(): return 1", "def f(): return 2"
    means, failures = CodeEval().compute(["assert f() == 1"] * 2, [[right, wrong, wrong], [wrong] * 3], k=[1, 2, 5])
    # By hand: problem 1 has 1 of 3 right, so 1/3 and 1 - C(2,2)/C(3,2) = 2/3; problem 2 has none. No 5 of 3.
    assert means == pytest.approx({"pass@1": 1 / 6, "pass@2": 1 / 3})
    assert [why is None for why in failures[0]] == [True, False, False]
