"""Published numbers and our runs: every number has a run that can be made or a reason; made-up runs stand beside."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotted_runs
import pytest
from command_lines import composed

from kvbench.analysis.load import read_result
from kvbench.analysis.result import Result
from kvbench.config.named import named_config
from kvbench.identity import cell
from kvbench.papers import arrangement, published
from kvbench.papers.cli import main
from kvbench.papers.compare import HEADER, compare
from kvbench.papers.matching import differences, plan_task
from kvbench.papers.protocol import Plan, plan, rules, runs_of
from kvbench.papers.sweeps import in_sweeps
from kvbench.records.sample import Likelihood, Sample
from kvbench.report.grid import Grid, Row

LLAMA = "llama31_8b_instruct"


def command(one: Plan) -> tuple[str, ...]:
    """The words that make one run."""
    (sweep,) = in_sweeps([one])
    return tuple(sweep.command)


def plans() -> dict[tuple[str, ...], Plan]:
    """One plan for every distinct command of all tables."""
    able = (number for number in published.all_numbers() if isinstance(plan(number), Plan))
    return {command(one): one for number in able for one in runs_of(number)}


PLANS = plans()


def test_every_number_can_be_run_or_has_a_reason() -> None:
    for number in published.all_numbers():
        own = plan(number)
        assert isinstance(own, Plan) or own.reason, number


def test_models_policies_and_tasks_of_all_plans_exist() -> None:
    for group in ("model", "policy", "task"):
        for name in {getattr(one, group) for one in PLANS.values()}:
            named_config(group, name)


def test_every_rule_is_about_some_number_and_says_where_it_is_from() -> None:
    for paper in published.papers():
        numbers = [number for name in published.tables(paper) for number in published.read_table(name)]
        for rule in rules(paper):
            assert rule.source, rule
            assert any(map(rule.holds, numbers)), rule


def kind(one: Plan) -> tuple[object, ...]:
    """Commands alike in this differ in the model, in numbers, or in which task of a benchmark they ask."""
    return one.policy, one.budget is None, isinstance(one.budget, float), one.task.split("/")[0], *one.settings


KINDS = {kind(one): words for words, one in PLANS.items()}
FAST = [("caote_h2o", "longbench"), ("cake", "needlebench"), ("d2o", "niah_text"), ("ott_g32_r128", "ruler")]
FEW = [next(words for one, words in KINDS.items() if (one[0], one[3]) == fast) for fast in [*FAST, ("d2o", "lm_eval")]]
SLOW = [
    pytest.param(words, marks=pytest.mark.slow("composes hundreds of configurations")) for words in KINDS.values()
]  # half a second each


@pytest.mark.parametrize("words", [*FEW, *SLOW], ids=lambda words: " ".join(words[3:])[:80])
def test_a_command_is_accepted_and_its_run_is_known_again_by_what_it_records(words: tuple[str, ...]) -> None:
    run, one = composed(*words[3:]), PLANS[words]
    policy = cell._policy(run)
    assert policy.budget == one.budget
    if not one.task.startswith("lm_eval/"):  # which would look for its data
        task = cell._task(run)
        assert task.name == plan_task(one)
        generation = {"max_prompt_tokens": run.model["max_prompt_tokens"]}
        identity = {"policy": cell.describe(policy), "task": cell.describe(task), "generation": generation}
        assert differences(one, identity) == []


PROTOCOLS = """\
caote/table2 Llama-3.1-8B-Instruct h2o 2048 qasper
    policy=h2o_norecent budget=2048 task=longbench/qasper schedule=blocks block=128 decode=evict
caote/table2 Llama-3.1-8B-Instruct full None lcc
    policy=full task=longbench/lcc
cake/table7 Mistral-7B-Instruct-v0.3 cake 512 trec
    policy=cake budget=512 task=longbench/trec schedule=prompt decode=evict
cake/table7 Mistral-7B-Instruct-v0.3 cake 1024 trec
    policy=cake budget=1024 task=longbench/trec schedule=prompt decode=evict \
policy.allocator.tau1=0.8 policy.allocator.tau2=0.5
ott/table2 Llama-2-7B-chat-hf kivi_g128_r128 2.0 lcc
    policy=kivi_g128_r128 task=longbench/lcc task.extended=true
""".splitlines()
"""Numbers, and how they are run: CAOTE evicts in blocks of 128, its H2O has no recent window (section 4.1); the full
cache has no schedule, a store no budget; CAKE has temperatures where its authors' code has any."""


@pytest.mark.parametrize(("place", "words"), [*zip(PROTOCOLS[::2], PROTOCOLS[1::2], strict=True)])
def test_a_number_is_measured_as_its_paper_says(place: str, words: str) -> None:
    table, *about = place.split()
    (own,) = (plan(n) for n in arrangement.numbers(table) if [n.model, n.method, str(n.budget), n.task] == about)
    assert isinstance(own, Plan)
    assert shlex.join(command(own)) == f"python -m kvbench model={own.model} {words.strip()}"


def sample(index: int, score: float | None, **fields: Any) -> Sample:
    held = {"kept_tokens": [[10, 20], [30, 40]], "cache_bytes": 3 * 2**19}
    return replace(plotted_runs.sample(index, 1.0), score=score, **{**held, **fields})


def made(out: Path, task: str, samples: list[Sample], policy: str = "caote_h2o", **changed: Any) -> Result:
    """A finished run of CAOTE's table 2 on disk, read back."""
    parts = plotted_runs.described(None if policy == "full" else policy, size=changed.pop("block", 128))
    about = {"budget": 2048, "model": LLAMA, "parts": parts, **changed}
    return read_result(plotted_runs.write_run(out, policy, samples, task=task, **about))


def line(grid: Grid, block: str, label: str) -> tuple[Row, dict[str, str]]:
    """A row of a comparison, and its cells by column; holes are –."""
    (row,) = [r for b in grid.blocks if b.title == block for r in b.rows if r.label == label]
    return row, {name: "–" if c.hole else c.text for name, c in zip(HEADER, row.cells, strict=True)}


BLOCK = "Llama-3.1-8B-Instruct, budget 2048"


def test_ours_stands_beside_the_print_with_interval_difference_and_what_was_held(tmp_path: Path) -> None:
    """Two of four right: 50.00, by Wilson 15.00 to 85.00; the paper prints 38.34; tokens (10+20+30+40)/4.

    Predicted: 32 layers of 8 KV heads, 2,049 slots of 2 x 128 numbers of 2 bytes, a position and a sum of attention:
    256 x 2049 x 520 / 2^20 = 260.1.
    """
    run = made(tmp_path, "longbench_qasper", [sample(i, float(i % 2)) for i in range(4)])
    _, cells = line(compare("caote/table2", [run]), BLOCK, "H2O + CAOTE, Qasper")
    assert cells == {
        "published": "38.34",
        "ours": "50.00",
        "95% interval": "15.00 to 85.00",
        "difference": "+11.66",
        "n": "4",
        "tokens": "25.0",
        "MiB": "1.500",
        "predicted": "260.1",
        "to do": "",
    }


def test_holes_carry_the_command_that_fills_them(tmp_path: Path) -> None:
    run = made(tmp_path, "longbench_qasper", [sample(0, 1.0), sample(1, 1.0)])
    grid = compare("caote/table2", [run])
    _, cells = line(grid, BLOCK, "H2O + CAOTE, TREC")
    assert (cells["published"], cells["ours"]) == ("62.00", "–")
    said = dict(grid.notes)[cells["to do"].strip("[]")]
    assert said.startswith(
        "python -m kvbench -m model=llama31_8b_instruct policy=caote_h2o budget=2048 task=longbench/"
    )
    tasks = next(word for word in shlex.split(said) if word.startswith("task=")).removeprefix("task=").split(",")
    assert len(tasks) == 15  # all but the one that is there
    assert "longbench/qasper" not in tasks


def longbench(scores: dict[str, list[float]]) -> list[Sample]:
    pairs = [(task, score) for task, each in scores.items() for score in each]
    return [
        sample(i, score, metadata={"benchmark": "longbench", "task": task, "subset": task})
        for i, (task, score) in enumerate(pairs)
    ]


def test_an_average_weighs_every_task_the_same_and_needs_them_all(tmp_path: Path) -> None:
    """15 tasks of 0.5 (one of them with four examples), one of 1.0: (15 * 50 + 100) / 16 = 53.125."""
    tasks = list(arrangement.names().categories)
    scores = {task: [0.0, 1.0] for task in tasks} | {tasks[0]: [0.0, 1.0, 0.0, 1.0], tasks[1]: [1.0, 1.0]}
    whole = made(tmp_path, "longbench", longbench(scores))
    _, cells = line(compare("caote/table2", [whole]), BLOCK, "H2O + CAOTE, Avg.")
    assert (cells["ours"], cells["published"], cells["n"]) == ("53.12", "33.31", "34")
    low, high = map(float, cells["95% interval"].split(" to "))
    assert low < 53.12 < high
    scores.pop("trec")
    grid = compare("caote/table2", [made(tmp_path, "longbench", longbench(scores))])
    assert line(grid, BLOCK, "H2O + CAOTE, Avg.")[1]["ours"] == "–"
    assert line(grid, BLOCK, "H2O + CAOTE, Qasper")[1]["ours"] == "100.00"


def test_a_run_with_failed_examples_has_no_score_and_says_so(tmp_path: Path) -> None:
    failed = plotted_runs.sample(1, None)
    run = made(tmp_path, "longbench_qasper", [sample(0, 1.0), failed])
    grid = compare("caote/table2", [run])
    row, cells = line(grid, BLOCK, "H2O + CAOTE, Qasper")
    assert cells["ours"] == "–"
    assert f"1 of 2 examples of {run.run_id} failed" in dict(grid.notes)[row.notes[0]]


def read_text(nll: float) -> Sample:
    likelihood = Likelihood(nll=nll, tokens=10, lengths=[20], cumulative=[nll], block=128, max_kept_tokens=[[5]])
    return sample(0, None, output=None, likelihood=likelihood)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "kvec", "-o", "t.md"], "table10f"),
        (["show", "caote/table5", "-o", "t.html"], "0.330"),
        (["compare", "caote/table2", "--runs", "runs", "-o", "t.tex"], "+11.66"),
    ],
)
def test_every_command_writes_files(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "runs", "longbench_qasper", [sample(i, float(i % 2)) for i in range(4)])
    assert main(words) == 0
    assert said in Path(words[-1]).read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "caote/tabel2"], "did you mean caote/table2"),
        (["compare", "cake/table5", "--runs", "nowhere"], "nowhere is not a folder"),
        (["show", "caote/table2", "-o", "t.pdf"], "-o t.pdf must end in one of .txt, .md, .tex, .html, .csv"),
        (["run", "caote/table5"], "caote/table5 cannot be run: the paper gives neither needle, haystack"),
        (["run", "caote/table2", "methods=cake"], "methods=cake is not in caote/table2 (allowed: caote_h2o"),
        (["run", "caote/table2", "model=pocket"], "model=pocket is no selection of a table (allowed: models"),
        (["run", "caote/table9", "scale=pocket"], "caote/table9 has nothing that the pocket model can stand in for"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("changed", [{"block": 32}, {"budget": 1024}, {"model": "pocket"}, {"policy": "h2o"}])
def test_runs_of_other_cells_fill_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    grid = compare("caote/table2", [made(tmp_path, "longbench_qasper", [sample(0, 1.0)], **changed)])
    assert all(row.cells[1].hole for block in grid.blocks for row in block.rows)
    row, _ = line(grid, BLOCK, "H2O + CAOTE, Qasper" if "block" in changed else "H2O + CAOTE, 17 numbers")
    remarks = [dict(grid.notes)[letter] for letter in row.notes]
    assert any("another experiment: a run with block=32" in said for said in remarks) == ("block" in changed)
