"""The text of `python -m kvbench --help`: fields from the comments of conf/config.yaml, choices from the folders."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from kvbench.config.choices import GROUPS, choices
from kvbench.config.tree import CONF, names

WIDTH = 110
_FIELD = re.compile(r"^(?P<inside>  )?(?P<name>\w+): (?P<default>\S+) +# (?P<meaning>.+)$")
_NODE = re.compile(r"^(?P<name>\w+):$")
_USAGE = """\
kvbench measures what a smaller KV cache costs, and proves that it was smaller.

  python -m kvbench policy=caote_snapkv budget=256                          one cell, on the pocket model
  python -m kvbench -m policy=full,snapkv,caote_snapkv budget=64,128        a sweep, with one table at its end
  python -m kvbench model=llama31_8b_instruct task=ruler budget=0.2 limit=60
  python -m kvbench model.path=/my/model policy=snapkv policy.scorer.window=16 budget=512
  python -m kvbench -m policy=h2o_norecent,caote_h2o schedule=blocks block=32,128 budget=256
  python -m kvbench task=lm_eval/gsm8k num_fewshot=8 policy=snapkv budget=256   any task of lm-eval by its name
  python -m kvbench experiment=demo
  python -m kvbench -m launcher=slurm policy=full,snapkv budget=64,128 out=/shared/first    as jobs of a cluster
  python -m kvbench.sweep status /shared/first                              also: wait, cancel, resume
  python -m kvbench.results collect results/runs -o table.csv

"""
_MORE = """\
Before any policy that scores by content, {wrappers} make it value-aware: policy=caote_knorm.
Every field of a choice can be set: task.lengths=[1024,4096], model.revision=..., policy.scorer.window=16.
`--cfg job` prints the configuration a command line makes, `--version` ours, `--hydra-help` what Hydra adds.

Other commands, each with a --help of its own:
  python -m kvbench.sweep      follow, stop or continue a sweep
  python -m kvbench.results    finished runs as a tidy table, NLL curves, or sent to a dashboard
  python -m kvbench.report     finished runs as one HTML page
  python -m kvbench.plot       pictures of finished runs
  python -m kvbench.tables     the papers' tables: print, run, compare with our runs
  python -m kvbench.claims     what the papers claim, beside their numbers and ours
  python -m kvbench.memory     what a policy's cache will hold, in bytes
  python -m kvbench.bench      latency, throughput and memory
  python -m kvbench.diagnose   what policies did on real prompts
  python -m kvbench.score      predictions made elsewhere, scored as the benchmarks score them
  python -m kvbench.lm_eval    lm-eval's own command line with --model kvbench
"""


def help_text(folders: Sequence[Path] = ()) -> str:
    """Usage, fields with their defaults, and what every group can be, with the names in the folders of --config-dir."""
    groups = "".join(_group(group, folders) for group in GROUPS)
    return f"{_USAGE}Fields:\n{_fields()}\nGroups:\n{groups}\n{_more()}"


def _fields() -> str:
    text, node = "", ""
    for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines():
        if named := _NODE.match(line):
            node = named["name"] + "."
        if m := _FIELD.match(line):
            text += _folded(f"{node if m['inside'] else ''}{m['name']}={m['default']}", m["meaning"], 20)
    return text


def _group(group: str, folders: Sequence[Path]) -> str:
    defaults = re.findall(rf"^  - {group}: (\S+)$", (CONF / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    default = "" if defaults[0] == "null" else defaults[0]
    return _folded(f"{group}={default}", " ".join(names(group, folders)), 20)


def _more() -> str:
    return _MORE.format(wrappers=" and ".join(f"{name}_" for name in choices("wrapper")))


def _folded(head: str, text: str, column: int) -> str:
    """`head`, then `text` folded at `column`: names with a hyphen or a slash are not broken."""
    return (
        textwrap.fill(
            text,
            width=WIDTH,
            initial_indent=f"  {head}".ljust(column + 2) + " ",
            subsequent_indent=" " * (column + 3),
            break_on_hyphens=False,
            break_long_words=False,
        )
        + "\n"
    )
