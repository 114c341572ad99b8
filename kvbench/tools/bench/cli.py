"""The command line: `python -m kvbench.bench [protocol] key=value ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.terminal.command import command, our_version
from kvbench.terminal.console import quiet
from kvbench.terminal.errors import UsageError
from kvbench.terminal.folding import fold, help_width
from kvbench.tools.bench.settings import ABOUT, Settings, check_used, keys_help, parse

if TYPE_CHECKING:
    from kvbench.tools.bench.bench import BenchProtocol

HELP = """usage: python -m kvbench.bench PROTOCOL [key=value ...]

protocols:
{protocols}

keys:
{keys}

The same command goes on where it stopped (exit code 75: cells are left).
"""


def protocols() -> dict[str, BenchProtocol]:
    """Every protocol by its name."""
    from kvbench.tools.bench.kernels import KernelsProtocol  # here: they take seconds to import, which a slip need not
    from kvbench.tools.bench.paper_tables import PROTOCOLS
    from kvbench.tools.bench.sweep import SweepProtocol
    from kvbench.tools.bench.targets import TargetsProtocol

    found: list[BenchProtocol] = [*PROTOCOLS, SweepProtocol(), KernelsProtocol(), TargetsProtocol()]
    return {protocol.name: protocol for protocol in found}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one protocol; returns the exit code: 0 done, 1 a cell failed, 2 asked wrongly, 75 cells are left."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        listed = "\n".join(f"  {name:12}  {about}" for name, about in ABOUT.items())
        sys.stdout.write(fold(HELP.format(protocols=listed, keys=keys_help()), help_width()) + "\n")
        return 0
    if "--version" in arguments:
        sys.stdout.write(f"{our_version()}\n")
        return 0
    name, *rest = arguments
    if name not in ABOUT:
        raise UsageError(f"protocol {name!r} does not exist (allowed: {', '.join(ABOUT)})")
    settings = parse(rest)
    check_used(name, settings)
    from kvbench.tools.bench.journal import AGAIN, DeviceLost

    protocol = protocols()[name]
    try:
        return run(protocol, settings)
    except DeviceLost as error:
        sys.stderr.write(f"kvbench: {error}: the same command {'tries again' if error.again else 'goes on'}\n")
        return 1 if error.again else AGAIN


def run(protocol: BenchProtocol, settings: Settings) -> int:
    """Measure what is missing, write what is there, show it; returns the exit code.

    UsageError for what was asked wrongly; DeviceLost where only another process can go on.
    """
    quiet()
    from kvbench.models.loading import pick_device
    from kvbench.tools.bench.bench import Bench
    from kvbench.tools.bench.journal import AGAIN, DeviceLost, Journal
    from kvbench.tools.bench.machine import device_line
    from kvbench.tools.bench.report import header, show, write

    device = pick_device(settings.device)
    bench = Bench(settings, device, protocol.model)
    cells = protocol.cells(bench)
    lines = header(bench, protocol)
    identity = {
        "series": protocol.series,
        "model": bench.built.description if bench.usual_model else None,
        "device": device_line(device),
        "scale": bench.scale,
        **protocol.identity(bench),
    }
    journal = Journal(settings.out / f"{protocol.series}.jsonl", identity)
    stopped: KeyboardInterrupt | DeviceLost | None = None
    try:
        left = journal.measure(cells, device, settings.seconds)
    except (KeyboardInterrupt, DeviceLost) as error:  # what was measured is shown all the same
        stopped, left = error, [cell.key for cell in cells if "failed" in journal.cells.get(cell.key, {"failed": ""})]
    found = {cell.key: journal.cells[cell.key] for cell in cells if cell.key in journal.cells}
    if journal.mistakes:  # before all else: a picture shows only the first lines
        lines.insert(1, f"failed, and tried again by the same command: {'; '.join(journal.mistakes)}")
    if left:
        lines.insert(1, f"{len(left)} of {len(cells)} cells are left: the same command goes on with {left[0]}")
    show(write(bench, protocol, found, lines), lines)
    if stopped is not None:
        raise stopped
    return AGAIN if left else 1 if journal.mistakes else 0
