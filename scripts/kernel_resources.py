"""What the kernels take of a GPU, compiled for one that need not be there: the table in docs/kernels.md.

`python scripts/kernel_resources.py` compiles every launch at the main shapes for three GPUs and writes the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

GPUS = (80, 90, 100)
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/kernels.md"
MARK = "<!-- written by scripts/kernel_resources.py -->\n"
sys.path += [str(ROOT / "tests/support"), str(ROOT)]


def lines(dim: int = 128) -> list[str]:
    """A line for every kernel of every call: warps, and on each GPU registers, bytes spilled and shared memory."""
    from kernel_calls import CALLS, launches
    from kernel_launched import compiled_launch

    found = ["| call | kernel | warps | " + " | ".join(f"sm_{gpu}" for gpu in GPUS) + " |"]
    found.append("|---|---|--:" + "|--:" * len(GPUS) + "|")
    for call in CALLS:
        for same in zip(*(launches(call, dim, gpu) for gpu in GPUS), strict=True):
            cells = []
            for gpu, launch in zip(GPUS, same, strict=True):
                made = compiled_launch(launch, gpu)
                cells.append(f"{made.registers}, {made.spilled}, {made.shared / 1024:.1f} KiB")
            kernel, warps = same[1].name.strip("_"), same[1].arguments.get("num_warps", 4)
            found.append(f"| {call} | `{kernel}` | {warps} | {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    import triton

    page = PAGE.read_text(encoding="utf-8")
    said = f"\nCompiled by Triton {triton.__version__}.\n"
    PAGE.write_text(page[: page.index(MARK)] + MARK + "\n" + "\n".join(lines()) + "\n" + said, encoding="utf-8")
