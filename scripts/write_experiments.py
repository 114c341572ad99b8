"""Write conf/experiment/<paper>/<table>.yaml of every published table of which something can be run.

    python scripts/write_experiments.py

They follow from results/paper: the numbers of a table say its grid, protocol.yaml how each of them is measured.
"""

from __future__ import annotations

from kvbench.config.tree import CONF
from kvbench.papers.experiments import experiment, runnable_tables
from kvbench.papers.published import papers


def main() -> None:
    """Write all files, and remove those of tables that are no more."""
    folder = CONF / "experiment"
    wanted = {folder / f"{name}.yaml": name for name in runnable_tables()}
    for path in (path for paper in papers() for path in (folder / paper).glob("*.yaml") if path not in wanted):
        path.unlink()
    for path, name in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(experiment(name), encoding="utf-8")


if __name__ == "__main__":
    main()
