"""`experiment=<paper>/<table>`: the grid of its runs is the published grid, and kvbench accepts every one of them."""

import csv
from itertools import product

import pytest

from kvbench.config import sweeps
from kvbench.config.overrides import check
from kvbench.config.tree import CONF, names
from kvbench.papers import arrangement, published
from kvbench.papers.experiments import experiment, runnable_tables
from kvbench.papers.layout import lay_out
from kvbench.papers.protocol import Plan, plan
from kvbench.terminal.errors import UsageError

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
    for line in sweeps.read(name):
        for words in sweeps.cells(line):
            run = dict(word.split("=", 1) for word in words)
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


def lines_of(paper: str) -> list[list[str]]:
    """The command lines of a paper's experiments, one of each kind: others differ in values alone."""
    kinds = {}
    for name in (name for name in TABLES if name.startswith(f"{paper}/")):
        for line in sweeps.read(name):
            kinds.setdefault((tuple(line), line["task"][0].split("/")[0], line["policy"][-1]), sweeps.words(line))
    return list(kinds.values())


SLOW = [
    pytest.param(line, marks=pytest.mark.slow("composes hundreds of configurations"))
    for paper in published.papers()
    for line in lines_of(paper)
]


@pytest.mark.parametrize("line", [*(max(lines_of(paper), key=len) for paper in published.papers()), *SLOW])
def test_a_line_of_every_kind_is_one_that_the_command_line_accepts(line: list[str]) -> None:
    asked = check(["-m", *line])
    config = asked.first.config
    given = dict(word.split("=", 1) for word in line)
    assert str(config["budget"]) == given.get("budget", "128").split(",")[0]
    assert asked.is_sweep


def test_a_table_becomes_a_command_line_for_each_of_its_sweeps() -> None:
    """CAOTE, table 9: nine policies at 2,048 tokens, and the full cache without budget or schedule."""
    lines = sweeps.command_lines(["experiment=caote/table9", "limit=5"])
    rest, full = ({word.partition("=")[0]: word.partition("=")[2] for word in line} for line in lines)
    assert rest["policy"].split(",")[:3] == ["h2o_norecent", "caote_h2o", "fastcaote_h2o"]
    assert (rest["budget"], rest["block"], rest["task"], rest["limit"]) == ("2048", "128", "booksum", "5")
    assert full == {"-m": "", "model": rest["model"], "policy": "full", "task": "booksum", "limit": "5"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["caote/table2", "policy=cake"], r"policy=cake: cake is not in experiment=caote/table2, which has caote_h2o"),
        (
            ["cake/table5", "policy=cake", "policy.allocator.tau1=0.9", "budget=1024"],
            "budget=1024 leaves no run of experiment=cake/table5",
        ),
        (["demo,caote/table2"], "names a table and another experiment"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        sweeps.command_lines([f"experiment={words[0]}", *words[1:]])
    assert sweeps.command_lines(["experiment=demo"]) == [["experiment=demo"]]


def test_values_of_the_table_select_and_others_take_their_place() -> None:
    (only,) = sweeps.command_lines(["experiment=caote/table2", "policy=tova,caote_tova", "budget=4096"])
    assert "policy=tova,caote_tova" in only
    assert "budget=4096" in only
    full, rest = sweeps.command_lines(["experiment=caote/table2", "model=/my/model", "task=longbench/trec"])
    assert {"model=/my/model", "task=longbench/trec", "policy=full"} <= set(full)
    assert {"model=/my/model", "budget=2048,4096"} <= set(rest)
