"""The prompts of a result pack, made again by its tasks: prompts.csv, a row with the sha256 of each prompt.

python scripts/pack_prompts.py results/MODEL [SOURCE=PATH]... [model.path=FILE]

SOURCE: a name of `sources` in pack.yaml, whose texts are in PATH; tables without their source are left out. Every
prompt must have as many tokens as in the runs (samples.csv.gz), or the script ends. No weights are read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvbench.engine.prompts import prompts_for
from kvbench.models.prompt import Prompt
from kvbench.run.run import build_run
from kvbench.run.run_config import run_config

ROOT = Path(__file__).parents[1]


def table_fields(pack: Mapping[str, Any], table: str, task: str) -> tuple[str, dict[str, Any]]:
    """The name of the task, and the fields of the experiment that computed a table. task: its name in the samples."""
    own = pack["tables"][table]
    file = ROOT / "conf" / "experiment" / "results" / pack["model"] / f"{own.get('experiment', table)}.yaml"
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    fields = {f"task.{key}": value for key, value in (given.get("task") or {}).items()}
    fields |= {f"model.{key}": value for key, value in (given.get("model") or {}).items() if key != "dtype"}
    fields["compress"] = given.get("compress")
    name = task.removesuffix("_cot_zeroshot")
    name = name.replace("_", "/", 1) if name.startswith(("ruler_", "longbench_")) else name
    return name, {key: value for key, value in fields.items() if value is not None}


def prompts_of(pack: Mapping[str, Any], table: str, task: str, n: int, given: Mapping[str, str]) -> list[Prompt]:
    """The first `n` prompts of a table's task. given: paths of sources, and fields of the model."""
    name, fields = table_fields(pack, table, task)
    source = pack["tables"][table].get("data")
    more = {"task.data_dir": given[source]} if source else {}
    more |= {key: value for key, value in given.items() if key.startswith("model.")}
    config = run_config(pack["model"], "full", name, **{**fields, **more, "device": "cpu", "limit": n})
    return prompts_for([replace(build_run(config), limit=n)]).first(n)


def main() -> None:
    """Write prompts.csv."""
    folder, given = Path(sys.argv[1]), dict(one.split("=", 1) for one in sys.argv[2:])
    pack = yaml.safe_load((folder / "pack.yaml").read_text(encoding="utf-8"))
    found = pd.read_csv(folder / "samples.csv.gz")
    rows = []
    for (table, task), some in found[found.policy == "full"].groupby(["table", "task"], sort=False):
        source = pack["tables"].get(table, {}).get("data")
        if table not in pack["tables"] or (source and source not in given):
            print(f"{table}, {task}: left out{f', {source}= is not given' if source else ''}")
            continue
        lengths = some.set_index("example").prompt_tokens
        for index, prompt in enumerate(prompts_of(pack, table, task, max(lengths.index) + 1, given)):
            if index in lengths.index:
                tokens = len(prompt.ids)
                if tokens != lengths[index]:
                    sys.exit(f"{table}, {task}, example {index}: {tokens} tokens, but the run had {lengths[index]}")
                rows.append({"table": table, "task": task, "example": index, "prompt_tokens": tokens})
                rows[-1]["prompt_hash"] = prompt.hash
        print(f"{table}, {task}: {len(lengths)} prompts")
    pd.DataFrame(rows).to_csv(folder / "prompts.csv", index=False)


if __name__ == "__main__":
    main()
