"""`experiment=<paper>/<table>`: the grid of its runs is the published grid, and kvbench accepts every one of them."""

import csv
from itertools import product

import pytest
from command_lines import composed, first_of, grids_of, lines_of

from kvbench.config.tree import CONF, names
from kvbench.papers import arrangement, published
from kvbench.papers.experiments import experiment, runnable_tables
from kvbench.papers.layout import lay_out
from kvbench.papers.protocol import Plan, plan

SIXTEEN = """narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa
    samsum passage_count passage_retrieval_en lcc repobench-p"""
LONGBENCH = SIXTEEN.split()
LM_EVAL = {
    "coqa": "coqa",
    "gsm8k": "gsm8k",
    "truthfulqa_gen": "truthfulqa_gen",
    "gsm8k_8shot": "gsm8k",
    "gsm8k_8shot_cot": "gsm8k_cot",
    "gsm8k_0shot_cot": "gsm8k_cot_zeroshot",
    "bbh_3shot": "bbh_fewshot",
    "bbh_3shot_cot": "bbh_cot_fewshot",
    "bbh_0shot_cot": "bbh_cot_zeroshot",
}
RENAMED = {("caote", "h2o"): "h2o_norecent", ("cake", "kivi_int2"): "kivi"}
RATIOS = {
    ("cake_kivi_int4", "0.125"): "0.5",
    ("cake_kivi_int4", "0.0625"): "0.25",
}  # CAKE, appendix E: tokens x bits / 16
TABLES = sorted(name for name in names("experiment") if name.partition("/")[0] in published.papers())
Run = tuple[str, str, str, str]  # policy, model, budget, task with its length


def tasks_of(task: str, others: set[str]) -> list[str]:
    """The tasks of kvbench behind a published one; an average has those of its table, or LongBench's 16."""
    if task.endswith("avg"):
        prefix = task.removesuffix("avg")
        parts = sorted(other for other in others if other.startswith(prefix) and not other.endswith("avg"))
        return [one for part in parts or LONGBENCH for one in tasks_of(part, others)]
    if task in LONGBENCH:
        return [f"longbench/{task}"]
    if task in LM_EVAL:
        return [f"lm_eval/{LM_EVAL[task]}"]
    words = task.split("_")
    if words[0] == "needlebench":
        return [f"needlebench/{words[1]}"]
    if words[0] == "ruler":
        length = {"4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536, "128k": 131072}[words[1]]
        return [f"{'ruler/' if len(words) > 2 else ''}{'_'.join(words[2:]) or 'ruler_13'} at {length}"]
    if words[0] == "niah":
        return [f"niah_text at {words[1]}"]
    return {"booksum": ["booksum"], "longbench_unspecified": []}[task]


def published_grid(name: str) -> tuple[set[Run], set[Run]]:
    """The runs behind the numbers of a table's CSVs that can be run, and every combination of what those are about."""
    paper = name.partition("/")[0]
    parts = arrangement.arrangement(name).parts or (name.partition("/")[2],)
    grid: set[Run] = set()
    for part in parts:
        rows = list(csv.DictReader((published.FOLDER / paper / f"{part}.csv").read_text().splitlines()))
        able = [row for row, n in zip(rows, published.read_table(f"{paper}/{part}"), strict=True) if can(n)]
        others = {row["task"] for row in rows}
        for row in able:
            model = arrangement.names().models[row["model"]]
            policy = RENAMED.get((paper, row["method"]), row["method"])
            budget = "" if row["budget_kind"] == "bits" or policy == "kivi" else row["budget"]
            budget = RATIOS.get((row["method"], budget), budget)
            block = part.partition("_block")[2]
            grid |= {(policy, model, budget, f"{task} {block}") for task in tasks_of(row["task"], others)}
    return grid, set(product(*({run[axis] for run in grid} for axis in range(4))))


def can(number: published.Number) -> bool:
    return isinstance(plan(number), Plan)


def read_grid(name: str) -> list[Run]:
    """The runs of an experiment as the reader of the command line expands them."""
    found = []
    for grid in grids_of(name):
        for values in product(*grid.values()):
            run = dict(zip(grid, values, strict=True))
            length = run.get("task.length") or {"[1000,42": "50k"}.get(run.get("task.lengths", "")[:8], "")
            if length == "50k" and run["task.lengths"].count(",") == 30:
                length = "100k"
            block = run["block"] if name == "caote/table6" else ""
            task = f"{run['task']}{f' at {length}' if length else ''}"
            found.append((run["policy"], run["model"], run.get("budget", ""), f"{task} {block}"))
    return found


@pytest.mark.parametrize("name", TABLES)
def test_the_grid_of_runs_is_the_published_grid(name: str) -> None:
    """What the text of the paper has lost is run as well, where the paper's table has a cell for it."""
    runs = read_grid(name)
    grid, combinations = published_grid(name)
    assert len(runs) == len(set(runs))
    for method in {run[0] for run in [*runs, *grid]}:
        own = {run for run in runs if run[0] == method}
        known = {run for run in grid if run[0] == method}
        assert known <= own, method
        assert own <= combinations, method
        if not any(cell.hole for cell in lay_out(name).cells):
            assert own == known, method


def test_every_table_has_an_experiment_or_cannot_be_run() -> None:
    assert set(runnable_tables()) == set(TABLES)
    for name in set(arrangement.tables()) - set(TABLES):
        assert not any(can(number) for number in arrangement.numbers(name)), name


@pytest.mark.parametrize("name", TABLES)
def test_the_files_are_those_that_the_script_writes(name: str) -> None:
    assert (CONF / "experiment" / f"{name}.yaml").read_text() == experiment(name), "run scripts/write_experiments.py"


def kinds_of(paper: str) -> list[list[str]]:
    """One line of each kind of a paper's experiments: others differ in values alone."""
    kinds = {}
    for name in (name for name in TABLES if name.startswith(f"{paper}/")):
        for grid, line in zip(grids_of(name), lines_of(name), strict=True):
            kinds.setdefault((tuple(grid), grid["task"][0].split("/")[0], grid["policy"][-1]), line)
    return list(kinds.values())


SLOW = [
    pytest.param(line, marks=pytest.mark.slow("composes hundreds of configurations"))
    for paper in published.papers()
    for line in kinds_of(paper)
]


@pytest.mark.parametrize("line", [*(max(kinds_of(paper), key=len) for paper in published.papers()), *SLOW])
def test_a_line_of_every_kind_is_one_that_the_command_line_accepts(line: list[str]) -> None:
    given = dict(word.split("=", 1) for word in line)
    assert str(composed(*first_of(line)).budget) == given.get("budget", "128").split(",")[0]
