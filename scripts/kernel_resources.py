"""What the kernels take of a GPU, compiled for one that need not be there: the table in docs/kernels.md.

`python scripts/kernel_resources.py` compiles every launch at the main shapes for sm_90 and writes the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/kernels.md"
MARK = "<!-- written by scripts/kernel_resources.py -->\n"
sys.path += [str(ROOT / "tests/support"), str(ROOT)]


def lines(capability: int = 90, dim: int = 128) -> list[str]:
    """A line for every kernel of every call: registers of a thread, bytes spilled, shared memory of a block, warps."""
    from kernel_calls import CALLS, launches
    from kernel_launched import compiled_launch

    found = ["| call | kernel | registers | spilled | shared memory | warps |", "|---|---|--:|--:|--:|--:|"]
    for call in CALLS:
        for launch in launches(call, dim, capability):
            made = compiled_launch(launch, capability)
            kernel, warps = launch.name.strip("_"), launch.arguments.get("num_warps", 4)
            sizes = f"{made.registers} | {made.spilled} | {made.shared / 1024:.1f} KiB | {warps}"
            found.append(f"| {call} | `{kernel}` | {sizes} |")
    return found


if __name__ == "__main__":
    import triton

    page = PAGE.read_text(encoding="utf-8")
    said = f"\nCompiled by Triton {triton.__version__}.\n"
    PAGE.write_text(page[: page.index(MARK)] + MARK + "\n" + "\n".join(lines()) + "\n" + said, encoding="utf-8")
