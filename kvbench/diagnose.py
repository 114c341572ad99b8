"""`python -m kvbench.diagnose NAME policy=a,b budget=128 ...`: what policies did on real prompts, as CSV and picture.

The fields are those of `python -m kvbench`: task, model, limit (prompts, 1 here), seed, device, dtype. Files go to
out/diagnostics: NAME.csv and NAME.png.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.console import quiet, share_cores

NAMES = {
    "coverage": "share of prompt tokens kept at least once, at K-VEC's eviction rates",
    "retention": "layers x positions, number of heads that keep each token",
    "allocation": "tokens each layer holds",
    "output_error": "attention-output error against dense, per layer",
    "joint_error": "error of evicting a set beside the sum of single CAOTE scores",
    "reconstruction": "what quantised stores lose of keys, values and attention, per layer",
    "exact_tokens": "error when the smallest, the largest or random keys stay exact (OTT, figure 1(c))",
    "attention_statistics": "dispersion, shift and column-sum variance per layer",
}
USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one diagnostic and return the exit code; wrong values are answered in one sentence."""
    listed = "\n".join(f"  {name:22}{what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        "python -m kvbench.diagnose",
        description=f"{__doc__}\ndiagnostics:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    parser.add_argument("field", nargs="*", help="policy=a,b budget=128 task=niah limit=2 ...")
    given = parser.parse_args(arguments)
    from kvbench.errors import UsageError

    share_cores()
    quiet()
    try:
        csv, picture = diagnose(given.name, given.field)
    except (UsageError, ValueError) as error:
        sys.stderr.write(f"kvbench: {error}\n")
        return USAGE_ERROR
    sys.stdout.write(f"{csv}\n{picture}\n")
    return 0


def diagnose(name: str, fields: Sequence[str]) -> tuple[Path, Path]:
    """Measure every policy on every prompt, write table and picture, and return their paths. Raises UsageError."""
    import pandas as pd

    from kvbench.bars import progress
    from kvbench.diagnostics.probe import Probe
    from kvbench.models import load
    from kvbench.prompts import Prompt
    from kvbench.runner import make_prompts

    module = import_module(f"kvbench.diagnostics.{name}")
    rows: list[dict[str, object]] = []
    for cell in (cells := cells_of(fields)):
        prompts: list[Prompt] = make_prompts(cell)
        loaded = load(cell.checkpoint, cell.device)
        for prompt in progress(prompts, f"{name} {cell.policy_name}", len(prompts)):
            probe = Probe(loaded.model, prompt.ids[None].long().to(cell.device), cell.policy, cell.policy_name)
            given = {"policy": cell.policy_name, "example": prompt.example.index}
            rows += [{**given, **row} for row in module.measure(probe)]
    return _write(name, module, pd.DataFrame(rows), cells[0])


def cells_of(fields: Sequence[str]) -> list[Any]:
    """One checked cell per policy; a field may not list several values otherwise."""
    from omegaconf import OmegaConf

    from kvbench.cell import build_cell
    from kvbench.overrides import check

    chosen = [field.removeprefix("policy=") for field in fields if field.startswith("policy=")]
    others = [field for field in fields if not field.startswith("policy=")]
    if not any(field.startswith("limit=") for field in others):
        others.append("limit=1")
    cells = []
    for slug in (chosen[-1] if chosen else "caote_snapkv").split(","):
        asked = check([*others, f"policy={slug}"])
        choices = asked.config.hydra.runtime.choices
        config = OmegaConf.masked_copy(asked.config, [str(key) for key in asked.config if key != "hydra"])
        values = OmegaConf.to_container(config, resolve=True)
        assert isinstance(values, dict)
        cells.append(build_cell({str(k): v for k, v in values.items()}, choices["policy"], choices["model"]))
    return cells


def _write(name: str, module: ModuleType, table: Any, cell: Any) -> tuple[Path, Path]:  # noqa: ANN401 - a DataFrame
    """The table, and its picture in the house style. cell: the first of those measured, for what they share."""
    from matplotlib.figure import Figure

    from kvbench.figures.style import house_style, save

    folder = cell.out / "diagnostics"
    folder.mkdir(parents=True, exist_ok=True)
    csv, picture = folder / f"{name}.csv", folder / f"{name}.png"
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


if __name__ == "__main__":
    sys.exit(main())
