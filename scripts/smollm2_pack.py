"""Compute the runs of `results/smollm2`: python scripts/smollm2_pack.py FOLDER [TABLE ...] [--limit N].

Each table is a sweep of `python -m kvbench` with one schedule and one decoding rule. A run that was computed already
is not computed again, and a larger limit continues it. `scripts/smollm2_tables.py` makes tables and figures of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BASES = [
    "snapkv",
    "h2o",
    "tova",
    "roco",
    "pyramidkv",
    "knorm",
    "keydiff",
    "expected_attention",
    "cake",
    "kvec",
    "kvzip",
]
VALUE_AWARE = [f"{value}_{base}" for base in BASES for value in ("caote", "fastcaote")]
PER_HEAD = ["ada_snapkv", "ada_pyramidkv", "ada_h2o", "ada_tova", "ada_roco", "ada_knorm", "ada_keydiff"]
PER_HEAD += ["ada_expected_attention", "ada_caote_snapkv"]
OTHERS = ["streamingllm", "local_window", "random", "h2o_norecent", "d2o", "cam", "sirllm", "simlayerkv", "lagkv"]
OTHERS += ["leverage", "compactor", "curdkv", "noncausal", "rkv", "chunkkv_snapkv", "critical_snapkv", "critical_h2o"]
OTHERS += ["critical_expected_attention", "p2a_snapkv", "p2a_h2o", "p2a_tova"]
ALL = ["full", *BASES, *OTHERS, *PER_HEAD, *VALUE_AWARE]
FEW = [
    "full",
    "streamingllm",
    "random",
    "knorm",
    "h2o",
    "tova",
    "snapkv",
    "ada_snapkv",
    "caote_snapkv",
    "cake",
    "kvzip",
]
STORES = ["kivi", "kivi_b4", "ott", "gear", "zipcache", "kcvc", "turboquant"]
BUDGETS = "budget=128,256,512,1024"
ONCE = [BUDGETS, "schedule=prompt", "decode=grow"]


@dataclass(frozen=True)
class Table:
    """A sweep: its task, policies and further fields, and to how many examples it is computed."""

    task: list[str]
    policies: list[str]
    fields: list[str]
    limit: int = 10

    def command(self, folder: Path, limit: int | None, books: Path) -> list[str]:
        """The command line that computes it."""
        task = [word.format(books=books) for word in self.task]
        policies = f"policy={','.join(self.policies)}"
        how = [f"limit={limit or self.limit}", f"out={folder}"]
        return [sys.executable, "-m", "kvbench", "-m", "model=smollm2", *task, policies, *self.fields, *how]


NEEDLES = ["task=niah", "task.max_new_tokens=20"]
TABLES = {
    "needles": Table(NEEDLES, ALL, ONCE),
    "needles_context": Table(NEEDLES, FEW, [*ONCE, "compress=context"]),
}


def main() -> int:
    """Run the tables one after the other; stops at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tables", nargs="*", default=list(TABLES))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--books", type=Path, default=Path("../shared/data/books"))
    given = parser.parse_args()
    for name in given.tables:
        command = TABLES[name].command(given.folder / name, given.limit, given.books)
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        failed = subprocess.run(command, check=False).returncode
        if failed:
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
