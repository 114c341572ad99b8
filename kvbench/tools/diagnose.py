"""Diagnostics of policies on prompts: `python -m kvbench.diagnose NAME policy=a,b budget=128 ...`.

The fields are those of `python -m kvbench`: task, model, limit (prompts, default 1), seed, device, dtype. The files
NAME.csv and NAME.png are written to out/diagnostics; existing files are kept (NAME-2, ...).
"""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module, resources
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from kvbench.terminal.command import Parser, command
from kvbench.terminal.console import quiet, share_cores
from kvbench.terminal.errors import UsageError, refusing

_UNUSED = ("engine", "logger", "allow_version_mismatch", "experiment")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one diagnostic and return the exit code, 2 for wrong values."""
    known = diagnostics()
    listed = "\n".join(f"  {name:22}{what}" for name, what in known.items())
    parser = Parser(
        "python -m kvbench.diagnose",
        description=f"{__doc__}\ndiagnostics:\n{listed}",
    )
    parser.add_argument("name", choices=known, metavar="NAME")
    parser.add_argument("field", nargs="*", default=[], help="policy=a,b budget=128 task=niah limit=2 ...")
    parser.add_argument("-cd", "--config-dir", help="folder with your own policies, tasks and models")
    given = parser.parse_intermixed_args(arguments)
    share_cores()
    quiet()
    _check_used(given.field)
    csv, picture = diagnose(given.name, given.field, given.config_dir)
    sys.stdout.write(f"{csv}\n{picture}\n")
    return 0


def _check_used(fields: Sequence[str]) -> None:
    """Raise UsageError for a field of runs that diagnostics do not use."""
    for field in fields:
        if field.lstrip("+~").startswith(_UNUSED):
            raise UsageError(f"{field} has no effect here: diagnostics process prompts one by one, without a run")


def diagnostics() -> dict[str, str]:
    """The description of each diagnostic by name: the first line of its module, read without importing it."""
    found = {}
    for path in sorted(Path(str(resources.files("kvbench.tools.diagnostics"))).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
    return found


def diagnose(name: str, fields: Sequence[str], config_dir: str | None = None) -> tuple[Path, Path]:
    """Measure every policy on every prompt, write table and figure, and return their paths. Raises UsageError."""
    import pandas as pd

    from kvbench.engine.prompts import make_prompts
    from kvbench.models.loading import load
    from kvbench.models.prompts import Prompt
    from kvbench.terminal.bars import progress
    from kvbench.tools.diagnostics.probe import Probe

    module = import_module(f"kvbench.tools.diagnostics.{name}")
    rows: list[dict[str, object]] = []
    cells = cells_of(fields, config_dir)
    with refusing():
        for cell in cells if hasattr(module, "check") else []:
            module.check(cell.policy, cell.policy_name)
    for cell in cells:
        prompts: list[Prompt] = make_prompts(cell)
        loaded = load(cell.checkpoint, cell.device)
        for prompt in progress(prompts, f"{name} {cell.policy_name}", len(prompts)):
            ids = prompt.ids[None].long().to(cell.device)
            probe = Probe(loaded.model, ids, cell.policy, cell.policy_name, question=prompt.question)
            given = {"policy": cell.policy_name, "example": prompt.example.index}
            rows += [{**given, **row} for row in module.measure(probe)]
    if not rows:
        raise UsageError(f"{name} has no data: budget={cells[0].budget} is larger than every prompt")
    return _write(name, module, pd.DataFrame(rows), cells[0])


def cells_of(fields: Sequence[str], config_dir: str | None = None) -> list[Any]:
    """One checked run per policy; only `policy=` may have several values."""
    from kvbench.run.run import build_run
    from kvbench.run.run_config import run_config

    words = [field.partition("=") for field in fields]
    given: dict[str, Any] = {"limit": 1, **{key: yaml.safe_load(text) for key, _, text in words}}
    model, task = given.pop("model", "pocket"), given.pop("task", "niah")
    folders = [] if config_dir is None else [Path(config_dir)]
    policies = dict.fromkeys(str(given.pop("policy", "caote_snapkv")).split(","))
    return [build_run(run_config(model, policy, task, folders, **given)) for policy in policies]


def _unused(path: Path) -> Path:
    """The path, or the first unused one of NAME-2, NAME-3, ..."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return path if not path.exists() else next(other for other in others if not other.exists())


def _write(name: str, module: ModuleType, table: Any, cell: Any) -> tuple[Path, Path]:  # noqa: ANN401 - a DataFrame
    """Write the table and its figure. cell: the first measured run, for the shared settings."""
    from matplotlib.figure import Figure

    from kvbench.report.figures.style import house_style, save

    folder = cell.out / "diagnostics"
    folder.mkdir(parents=True, exist_ok=True)
    csv = _unused(folder / f"{name}.csv")
    picture = csv.with_suffix(".png")
    table.to_csv(csv, index=False)
    prompts = table["example"].nunique()
    about = f"{cell.checkpoint.spec.name}, {cell.task.name}, {prompts} prompt{'s' * (prompts > 1)}"
    about += "" if cell.budget is None else f", budget {cell.budget}"
    with house_style():
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        module.draw(table, figure)
        figure.suptitle(f"{module.TITLE}\n{about}", fontsize=10)
        save(figure, picture)
    return csv, picture
