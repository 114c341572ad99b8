"""The text of `python -m kvbench --help`: fields from the comments of conf/config.yaml, choices from the folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from kvbench.config.choices import GROUPS, choices, did_you_mean
from kvbench.config.tree import CONF, find, load, names
from kvbench.terminal.errors import UsageError
from kvbench.terminal.folding import fold, help_width

_FIELD = re.compile(r"^(?P<inside>  )?(?P<name>\w+): (?P<default>\S+) +# (?P<meaning>.+)$")
_NODE = re.compile(r"^(?P<name>\w+):$")
_USAGE = """\
kvbench measures what a smaller KV cache costs, and proves that it was smaller.

A cell, on the pocket model; a sweep, with one table at its end; the demo:
  python -m kvbench policy=caote_snapkv budget=256
  python -m kvbench -m policy=full,snapkv,caote_snapkv schedule=blocks decode=evict
  python -m kvbench experiment=demo

Models, tasks (any of lm-eval by its name), the fields of their parts:
  python -m kvbench model=llama31_8b_instruct task=ruler budget=0.2 limit=60
  python -m kvbench model.path=/my/model policy=snapkv policy.scorer.window=16
  python -m kvbench task=lm_eval/gsm8k num_fewshot=8 policy=snapkv budget=256
  python -m kvbench -m policy=h2o_norecent,caote_h2o schedule=blocks block=32

A sweep as jobs of a cluster; how far it is (also: wait, cancel, resume):
  python -m kvbench -m launcher=slurm policy=full,snapkv out=/shared/first
  python -m kvbench.sweep status /shared/first

"""
_MORE = """\
More:
  `--help policy` says of every policy what it is, `--help task` of every task, and so on.
  Before any policy that scores by content may stand one of these, or several (policy=caote_knorm):
{wrappers}  Around CAOTE and FastCAOTE prompts are evicted in blocks of 128; schedule= and decode= say otherwise.
  Every field of a choice can be set: task.lengths=[1024,4096], model.revision=..., policy.scorer.window=16.
  `--cfg job` prints the configuration a command line makes, `--version` ours.

Other commands, each with a --help of its own:
  python -m kvbench.sweep        follow, stop or continue a sweep
  python -m kvbench.results      finished runs as a table, as NLL curves, on a dashboard; `check` recomputes them
  python -m kvbench.report       finished runs as one HTML page
  python -m kvbench.plot         pictures of finished runs
  python -m kvbench.tables       the papers' tables: print, run, compare with our runs
  python -m kvbench.claims       what the papers claim, decided from finished runs
  python -m kvbench.memory       what a policy's cache will hold, in bytes
  python -m kvbench.bench        latency, throughput and memory
  python -m kvbench.diagnose     what policies did on real prompts
  python -m kvbench.calibrate    what a policy has to know of a model, as the file it reads
  python -m kvbench.score        predictions made elsewhere, scored as the benchmarks score them
  python -m kvbench.lm_eval      lm-eval's own command line with --model kvbench
"""


def help_text(folders: Sequence[Path] = ()) -> str:
    """Usage, fields with their defaults, and what every group can be, with the names in the folders of --config-dir."""
    defaults = {k: v for line in load(CONF / "config.yaml")["defaults"] if line != "_self_" for k, v in line.items()}
    groups = [(f"{group}={defaults[group] or ''}", " ".join(names(group, folders))) for group in GROUPS]
    said = f"{_USAGE}Fields:\n{_in_columns(_fields())}\nGroups:\n{_in_columns(groups)}\n{_more()}"
    return fold(said, help_width()) + "\n"


def group_help(group: str, folders: Sequence[Path] = ()) -> str:
    """Every choice of a group with the sentence that its file begins with."""
    said = [(name, _about(group, name, folders)) for name in names(group, folders)]
    return fold(f"{group}=\n{_in_columns(said)}", help_width()) + "\n"


def _about(group: str, name: str, folders: Sequence[Path]) -> str:
    """The comment at the head of a choice's file, of an experiment what comes before the commands that run it."""
    path = find(group, name, folders)
    assert path is not None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comment = (line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    return " ".join(line for line in comment if not line.startswith("@package")).partition(" All of it: ")[0]


def check_topics(words: Sequence[str]) -> None:
    """UsageError for a word beside --help that is neither group nor field; overrides may stand there, unread."""
    known = {*GROUPS, *(name.partition("=")[0] for name, _ in _fields())}
    for word in words:
        if "=" not in word and word not in known:
            raise UsageError(f"--help {word} is unknown{did_you_mean(word, GROUPS)}")


def _fields() -> list[tuple[str, str]]:
    """Every field with its default, and what it means."""
    found, node = [], ""
    for line in (CONF / "config.yaml").read_text(encoding="utf-8").splitlines():
        if named := _NODE.match(line):
            node = named["name"] + "."
        if m := _FIELD.match(line):
            found.append((f"{node if m['inside'] else ''}{m['name']}={m['default']}", m["meaning"]))
    return found


def _more() -> str:
    said = [(f"  {name}_", _about("wrapper", name, ())) for name in choices("wrapper")]
    return _MORE.format(wrappers=_in_columns(said))


def _in_columns(pairs: Sequence[tuple[str, str]]) -> str:
    column = max(len(head) for head, _ in pairs)
    return "".join(f"  {head:{column}}  {text}\n" for head, text in pairs)
