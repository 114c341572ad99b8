"""What a type checker says about the Python interface."""

import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest

from kvbench import ask, evaluate
from kvbench.api.fields import AskFields, Fields
from kvbench.config.compose import CONF
from kvbench.config.parts import part_class
from kvbench.run.run_config import RunConfig

ELSEWHERE = {"name", "task", "tasks", "path"}  # of configurations; `tasks` of evaluate names tasks
NO_EFFECT = {"dry_run", "logger"}  # of the command line alone


def test_the_keywords_are_the_fields_of_runs_and_tasks() -> None:
    files = (CONF / "task").rglob("*.yaml")
    targets = {name for file in files for name in re.findall(r"^_target_: *([\w.]+)", file.read_text(), re.MULTILINE)}
    tasks = [part_class({"_target_": name}) for name in targets]
    known = {f.name for task in tasks for f in dataclasses.fields(task) if f.init and "Hub" not in str(f.type)}
    run = {f.name for f in dataclasses.fields(RunConfig) if not f.metadata} - {"model", "policy", "task", "budget"}
    arguments = set(inspect.signature(evaluate).parameters)
    expected = (known | run) - arguments - ELSEWHERE - NO_EFFECT
    assert set(get_type_hints(Fields)) == expected
    own = set(inspect.signature(ask).parameters)
    assert set(get_type_hints(AskFields)) <= (arguments | run) - own


PROGRAM = """\
import kvbench
from typing import Any
results = kvbench.evaluate("pocket", policies="full", lengths=[512], engine={"compile": False})
one: kvbench.Result = results[0]
some: kvbench.Results = kvbench.load_results("runs")[:2]
best = max(results, key=lambda row: (row.score, -row.cache_bytes))
kvbench.ask("pocket", context="a", questions=["b"], seed=1, device="cpu")
settings: dict[str, Any] = {"policy.scorer.window": 16}
kvbench.evaluate("pocket", policies="full", **settings)
kvbench.evaluate("pocket", policies="full", polcy=3)
kvbench.evaluate("pocket", policies="full", lengths=512)
kvbench.ask("pocket", context="a", questions=["b"], limits=3)
results[0].scores
"""


@pytest.mark.slow("mypy reads the package")
def test_right_calls_pass_and_each_wrong_one_is_an_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path_factory.mktemp("types") / "program.py"
    file.write_text(PROGRAM)
    said, _, code = api.run(["--config-file", "pyproject.toml", str(file)])
    lines = [int(line) for line in re.findall(r"program\.py:(\d+): error", said)]
    assert (lines, code) == ([10, 11, 12, 13], 1), said
