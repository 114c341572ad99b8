"""The command line `kvbench bench [EXPERIMENT] key=value ...`: measures, prints a table, appends to a CSV."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from kvbench.errors import UsageError, unknown
from kvbench.terminal.command import Command, program, quiet
from kvbench.terminal.outputs import check_folder
from kvbench.tools.bench.settings import SWEEP, Settings, experiments, parse

_EXPERIMENTS = {"sweep": "policies and budgets as one batch, against single runs", **experiments()}
HELP = f"""Measure prefill time, decode time, peak memory and cache bytes of policies x prompt lengths x batch sizes.

Baselines are transformers' own cache and, if installed, kvpress. Every round measures all of them. The table shows
medians; the CSV file also has the 20th and 80th percentiles.

\b
  kvbench bench policies=full,snapkv budgets=128,256 lengths=1024,4096
  kvbench bench sweep model=/my/model
  kvbench bench cake_table13 model=pocket lengths=1024

\b
Experiments:
{chr(10).join(f"  {name:13} {text}" for name, text in _EXPERIMENTS.items())}

\b
Keys:
{chr(10).join(f"  {key.name + '=':13} {key.metadata['about']}" for key in fields(Settings))}
"""


@click.command("bench", cls=Command, help=HELP)
@click.argument("words", nargs=-1, metavar="[EXPERIMENT] [KEY=VALUE]...")
def cli(words: Sequence[str]) -> None:
    """Run one benchmark. Raises UsageError for wrong arguments."""
    name, arguments = (words[0], words[1:]) if words and "=" not in words[0] else ("", words)
    if name not in ("", *_EXPERIMENTS):
        raise unknown("experiment", name, list(_EXPERIMENTS))
    run(name, parse(name, _sweep_defaults(arguments) if name == SWEEP else arguments))


main = program(cli)


def _sweep_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments of a sweep, after its default values."""
    from kvbench.tools.bench.sweep import BUDGETS, POLICIES

    lists = f"policies={','.join(POLICIES)}", f"budgets={','.join(map(str, BUDGETS))}"
    return [*lists, "lengths=4096", "schedule=prompt", "rounds=3", *arguments]


def run(name: str, settings: Settings) -> None:
    """Measure, append each row to <out>/<name>.csv, and print the table."""
    import pandas as pd  # imported here, so that --help is fast
    import torch

    from kvbench.models.devices import description, pick_device
    from kvbench.results.session import environment
    from kvbench.tools.bench import latency, measure, sweep
    from kvbench.tools.bench.model import build

    quiet()
    path = Path(settings.out).expanduser() / f"{name or 'bench'}.csv"
    check_folder(path.parent, True, f"out={settings.out}")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = pick_device(settings.device)
    shared = name == SWEEP
    for remark in [] if shared else measure.contenders(settings)[1]:
        sys.stderr.write(f"kvbench: {remark}\n")
    model, model_name = build(settings.model, settings.dtype, device)
    stamp = _stamp(environment(description(device)), model_name, str(model.dtype).removeprefix("torch."))
    sys.stdout.write(f"{model_name}, {stamp['dtype']}, {stamp['hardware']}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # the libraries' objects: a collection before every measurement would visit them all
    found: list[dict[str, Any]] = []
    try:
        for rows in (sweep if shared else latency).rows(model, settings):
            _append(path, pd.DataFrame([{**row, **stamp} for row in rows]))
            found += rows
    finally:
        gc.unfreeze()  # frozen objects are never freed: at exit, Triton's bindings would report them as leaks
    table = pd.DataFrame(found)
    columns = [one for one in (sweep if shared else latency).SHOWN if one in table]
    if "error" in table and table.error.any():
        columns.append("error")
    text = table[columns].to_string(index=False, na_rep="", float_format=lambda value: f"{value:.4g}")
    sys.stdout.write(f"{text}\n{path}\n")


def _stamp(environment: dict[str, Any], model: str, dtype: str) -> dict[str, Any]:
    """The columns that all rows of a call share."""
    hardware, packages = environment["hardware"], environment["packages"]
    return {
        "model": model,
        "dtype": dtype,
        "hardware": hardware["device_name"] or f"{hardware['processor']}, {hardware['torch_threads']} threads",
        **{name: packages[name] for name in ("kvbench", "torch", "transformers", "triton")},
        "revision": environment["kvbench_revision"],
    }


def _append(path: Path, table: Any) -> None:  # noqa: ANN401 - a DataFrame
    """Append rows to a CSV file, with a header if it is new. Raises UsageError if its columns differ."""
    new = not path.exists()
    if not new:
        with path.open(encoding="utf-8") as file:
            columns = file.readline().rstrip("\n").split(",")
        table = table.reindex(columns=columns) if set(table.columns) <= set(columns) else table
        if list(table.columns) != columns:
            raise UsageError(f"{path} has different columns: choose another out=")
    table.to_csv(path, mode="a", header=new, index=False, float_format="%.6g")
