"""Diagnostics of policies on prompts: `kvbench diagnose`."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import yaml

from kvbench.config.completion import complete_overrides
from kvbench.config.folders import own_folders
from kvbench.errors import UsageError, counted, from_extra, refusing
from kvbench.terminal.command import PATH, Command, program, quiet, share_cores

DIAGNOSTICS = {
    "coverage": "share of the prompt that at least one layer and head keeps (K-VEC, tables 6 and 7)",
    "divergence": "share of the KL from full that is gone if one layer is kept whole (--heads: one KV head)",
    "exact_tokens": "error of a quantized layer by the choice of exact tokens (OTT, figure 1(c))",
    "output_error": "attention-output error against dense attention, per layer (CAOTE, figure 3)",
}
_UNUSED = ("engine", "logger", "allow_version_mismatch", "experiment")


_ABOUT = """Diagnose policies on prompts: kvbench diagnose NAME policy=a,b budget=128 ...

Fields have the same names as for a run: task, model, limit (prompts, default 1), seed, device, dtype. The files
NAME.csv and NAME.png are written to out/diagnostics."""
_LISTED = "\n".join(f"  {name:14}{what}" for name, what in DIAGNOSTICS.items())


@click.command("diagnose", cls=Command, help=f"{_ABOUT}\n\n\b\nDiagnostics:\n{_LISTED}")
@click.argument("name", type=click.Choice(list(DIAGNOSTICS)), metavar="NAME")
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...", shell_complete=complete_overrides)
@click.option("-cd", "--config-dir", type=PATH, help="Folder with your own policies, tasks and models.")
@click.option("--heads", is_flag=True, help="For divergence: KV heads instead of layers.")
def cli(name: str, fields: Sequence[str], config_dir: Path | None, heads: bool) -> None:
    """Run one diagnostic."""
    share_cores()
    quiet()
    for field in fields:
        if field.lstrip("+~").startswith(_UNUSED):
            raise UsageError(f"{field} has no effect here: diagnostics process prompts one by one, without a run")
    if heads and name != "divergence":
        raise UsageError(f"--heads has no effect on {name}: only divergence has it")
    csv, figure = diagnose(name, fields, config_dir, heads)
    sys.stdout.write(f"{csv}\n{figure}\n")


main = program(cli)


def diagnose(
    name: str, fields: Sequence[str], config_dir: Path | None = None, heads: bool = False
) -> tuple[Path, Path]:
    """Measure every policy on every prompt, write table and figure, and return their paths. Raises UsageError."""
    import pandas as pd

    from kvbench.engine.answers import request_for
    from kvbench.engine.prompts import make_prompts
    from kvbench.models.loading import load
    from kvbench.models.prompt import Prompt
    from kvbench.terminal.progress import progress
    from kvbench.tools.diagnostics.probe import Probe

    with from_extra("report", "a figure"):
        module = import_module(f"kvbench.tools.diagnostics.{name}")
    rows: list[dict[str, object]] = []
    runs = runs_of(fields, config_dir, getattr(module, "FIELDS", {}))
    with refusing():
        for run in runs:
            module.check(run.policy, run.policy_name, *[True] * heads)
    for run in runs:
        prompts: list[Prompt] = make_prompts(run)
        loaded = load(run.checkpoint, run.device)
        for prompt in progress(prompts, f"{name} {run.policy_name}", len(prompts)):
            ids = prompt.ids[None].long().to(run.device)
            request = request_for(run, loaded, prompt)
            about = loaded.model, ids, run.policy, run.policy_name
            probe = Probe(*about, question=prompt.question, request=request, heads=heads)
            given = {"policy": run.policy_name, "example": prompt.example.index}
            rows += [{**given, **row} for row in module.measure(probe)]
    return _write(name, module, pd.DataFrame(rows), runs[0])


def runs_of(
    fields: Sequence[str], config_dir: Path | None = None, always: Mapping[str, object] | None = None
) -> list[Any]:
    """One checked run per policy; only `policy=` may have several values. always: fields of the diagnostic."""
    from kvbench.run.run import build_run
    from kvbench.run.run_config import run_config

    words = [field.partition("=") for field in fields]
    if wrong := next((field for field in fields if field.partition("=")[0] in (always or {})), None):
        raise UsageError(f"{wrong} has no effect: the diagnostic sets it")
    given: dict[str, Any] = {"limit": 1, **{key: yaml.safe_load(text) for key, _, text in words}, **(always or {})}
    model, task = given.pop("model", "pocket"), given.pop("task", "niah")
    folders = own_folders(config_dir)
    policies = dict.fromkeys(str(given.pop("policy", "caote_snapkv")).split(","))
    return [build_run(run_config(model, policy, task, folders, **given)) for policy in policies]


def _write(name: str, module: Any, table: Any, run: Any) -> tuple[Path, Path]:  # noqa: ANN401 - a DataFrame, a run
    """Write the table and its figure. run: the first measured run, for the shared settings."""
    from matplotlib.figure import Figure

    from kvbench.report.figures.style import house_style, save

    csv = run.out / "diagnostics" / f"{name}.csv"
    csv.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(csv, index=False)
    n = table["example"].nunique()
    budget = "" if run.budget is None else f", budget {run.budget}"
    about = f"{run.checkpoint.spec.name}, {run.task.name}, {counted(n, 'prompt')}{budget}"
    with house_style():
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        module.draw(table, figure)
        title = module.TITLE.format("KV head" if "head" in table else "layer")
        figure.suptitle(f"{title}\n{about}", fontsize=10)
        save(figure, csv.with_suffix(".png"))
    return csv, csv.with_suffix(".png")
