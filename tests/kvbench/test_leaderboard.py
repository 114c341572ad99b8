"""Leaderboards: honest submissions hold, doctored ones are refused for what was doctored, the page says who leads."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotted_runs import answered, write_run

from kvbench.analysis.load import load_results, read_result
from kvbench.analysis.metrics_file import write_metrics
from kvbench.cli import main as run
from kvbench.config.sweeps import command_lines
from kvbench.leaderboard.asked import Submission, asked
from kvbench.leaderboard.board import Board, Entry, boards
from kvbench.leaderboard.check import Checker
from kvbench.leaderboard.command import main
from kvbench.records.files import read_yaml, write_yaml

POLICIES = "full,snapkv,knorm,p2a_h2o,kvzip,kivi"
BOARD = "leaderboard/pocket"
Line = dict[str, Any]
Doctor = Callable[[Path], object]


@pytest.fixture(scope="module", autouse=True)
def _smaller() -> Any:
    """The leaderboard as it is, but for three examples at one budget."""
    whole = asked(BOARD)
    small = replace(whole, limit=3, cells=frozenset(cell for cell in whole.cells if cell[1] == 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.leaderboard.check.asked", lambda name: small)
        yield


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs as the experiment's command makes them."""
    out = tmp_path_factory.mktemp("leaderboard") / "mine"
    asks = [f"experiment={BOARD}", f"policy={POLICIES}", "budget=64", "limit=3", f"out={out}"]
    assert run([*asks, "task.max_new_tokens=128"]) == 0
    return out


@pytest.fixture
def mine(honest: Path, tmp_path: Path) -> Path:
    """A copy to doctor."""
    return Path(shutil.copytree(honest, tmp_path / "mine"))


def of(folder: Path, policy: str, task: str = "single_1") -> Path:
    """The folder of a policy's run."""
    (found,) = folder.glob(f"pocket-{policy}-*{task}*")
    return found


def each_line(folder: Path, change: Callable[[Line], object], only: int | None = 1) -> None:
    """Change a line of the samples, or all, and sum the run up again, as a careful forger would."""
    path = folder / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if only in (None, line["index"]):
            change(line)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    summed_up(folder)


def summed_up(folder: Path) -> None:
    write_metrics(folder, read_result(folder).samples)


def each_config(folder: Path, change: Callable[[Line], object]) -> None:
    config = read_yaml(folder / "config.yaml")
    change(config)
    write_yaml(folder / "config.yaml", config)


def refusals(folder: Path, again: int = 0) -> list[str]:
    return Checker(Submission(folder, BOARD, "me"), again=again).refusals()


def test_what_the_experiment_made_holds(honest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(honest)]) == 0  # the sweep says which leaderboard
    assert capsys.readouterr().out == f"{honest} holds: 12 runs of {BOARD}\n"


def test_examples_computed_again_are_the_same(mine: Path) -> None:
    for folder in set(mine.glob("pocket-*")) - {of(mine, "full"), of(mine, "full", "multikey"), *mine.glob("*snapkv*")}:
        shutil.rmtree(folder)
    assert refusals(mine, again=2) == []
    (score,) = [s.score for s in read_result(of(mine, "snapkv")).samples if s.index == 1]

    def answers_right(line: Line) -> None:  # in full agreement with itself: its answer is another's
        line["output"], line["score"] = (line["references"][0], 1.0) if score == 0 else ("nothing", 0.0)

    each_line(of(mine, "snapkv"), answers_right)
    assert refusals(mine) == []
    (sentence,) = refusals(mine, again=2)
    assert sentence.endswith("example 1: computed again, its output is another")


def _swap(line: Line) -> None:
    line["kept_tokens"][0], line["kept_tokens"][1] = (
        [n + d for n in line["kept_tokens"][i]] for i, d in ((0, 9), (1, -9))
    )


def line(only: int | None = 1, **fields: Any) -> Doctor:
    """Gives a line of the samples other values."""
    return lambda folder: each_line(folder, lambda line: line.update(fields), only)


def head(line: Line, layer: int, kv_head: int, tokens: int) -> None:
    line["kept_tokens"][layer][kv_head] = tokens


def config(change: Callable[[Line], object]) -> Doctor:
    return lambda folder: each_config(folder, change)


def text(name: str, old: str, new: str) -> Doctor:
    """Changes a file by hand, and sums nothing up again."""
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


DOCTORED: dict[str, tuple[str, Doctor, str]] = {
    "score": ("knorm", lambda f: each_line(f, lambda x: x.update(score=1 - x["score"])), "example 1: its score is"),
    "output": ("full", line(output="edited"), "and its answer scores 0"),
    "references": ("snapkv", line(references=["1"]), "its references are not the set's"),
    "prompt": ("snapkv", line(prompt_hash="0" * 64), "its prompt is not the set's"),
    "more tokens": (
        "snapkv",
        lambda f: each_line(f, lambda x: head(x, 2, 0, 70)),
        "layer 2 holds 70 tokens per KV head, its budget is 64",
    ),
    "fewer tokens": (
        "kvzip",
        line(kept_tokens=[[20, 20]] * 4),
        "holds 80 tokens per KV head over its 4 layers, its budget is 256",
    ),
    "other layers": ("snapkv", lambda f: each_line(f, _swap), "layer 0 holds 73 tokens per KV head, its budget is 64"),
    "another total": (
        "p2a_h2o",
        lambda f: each_line(f, lambda x: head(x, 3, 1, 99)),
        "tokens per KV head over its 4 layers, its budget is 256",
    ),
    "a token too many": (
        "kivi",
        lambda f: each_line(f, lambda x: head(x, 0, 0, 10**6)),
        "a KV head holds more tokens than the",
    ),
    "bytes": ("snapkv", line(None, cache_bytes=100_000), "its tokens alone take"),
    "bytes of one": ("kivi", line(cache_bytes=90_000), "bytes, not in"),
    "the full cache's bytes": ("snapkv", line(full_cache_bytes=2**30), "its full cache is"),
    "longer answers": (
        "snapkv",
        line(decode_steps=4000, generated_tokens=4000),
        "it has 4000 new tokens in 4000 steps, and 128 were allowed",
    ),
    "a missing example": ("snapkv", lambda f: _cut(f, lambda x: x[:2]), "it has 2 of the set's 3 examples"),
    "a hole": ("snapkv", lambda f: _cut(f, lambda x: x[::2], sums=False), "line 2: not the sample of example 1"),
    "an example twice": ("full", lambda f: _cut(f, lambda x: [*x[:2], x[0]], number=True), "example 2: its prompt"),
    "another seed": ("snapkv", config(lambda x: x["config"].update(seed=1)), "seed=1 is not"),
    "another seed's answers": (
        "snapkv",
        config(lambda x: x["identity"].update(seed=1)),
        "its seed is not what its configuration makes",
    ),
    "another budget": (
        "snapkv",
        config(lambda x: (x["config"].update(budget=65), x["identity"].update(budget=65))),
        "budget=65 is none of the leaderboard's",
    ),
    "another model": (
        "snapkv",
        config(lambda x: x["identity"]["model"].update(sha256="0" * 64)),
        "its model is not what its configuration makes",
    ),
    "another model's name": (
        "snapkv",
        config(lambda x: x["naming"].update(model="llama31_8b_instruct")),
        "it is called llama31_8b_instruct on ruler_niah_single_1, but it is another's run",
    ),
    "another policy": (
        "snapkv",
        config(lambda x: x["naming"].update(policy="knorm")),
        "it is called knorm, but its fields are not those of that name",
    ),
    "another task": (
        "snapkv",
        config(lambda x: x["config"]["task"].update(length=512)),
        "is none of the leaderboard's, in all its fields",
    ),
    "another question": ("snapkv", config(lambda x: x["config"].update(compress="prompt")), "compress=prompt is not"),
    "the digest": ("snapkv", config(lambda x: x.update(run_id="pocket-x-0123456789")), "its run id is not the digest"),
    "samples after the run": (
        "snapkv",
        text("samples.jsonl", '"spare_bytes": ', '"spare_bytes": 1'),
        "metrics.json was not computed from these samples",
    ),
    "the sum": (
        "knorm",
        text("metrics.json", '"score_low": 0', '"score_low": 1'),
        "metrics.json is not what its samples sum up to",
    ),
}


def _cut(folder: Path, pick: Callable[[list[Line]], list[Line]], number: bool = False, sums: bool = True) -> None:
    path = folder / "samples.jsonl"
    lines = pick([json.loads(line) for line in path.read_text().splitlines()])
    lines = [{**line, "index": i} if number else line for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if sums:
        summed_up(folder)


@pytest.mark.parametrize("what", DOCTORED)
def test_a_doctored_submission_is_refused_in_a_sentence_that_says_what(what: str, mine: Path) -> None:
    policy, doctor, sentence = DOCTORED[what]
    for folder in set(mine.glob("pocket-*")) - {of(mine, policy)}:
        shutil.rmtree(folder)
    doctor(of(mine, policy))
    (said,) = refusals(mine)
    assert sentence in said
    assert "\n" not in said


def test_a_refused_submission_has_an_exit_code_and_no_page(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(of(mine, "snapkv"))
    shutil.copytree(of(mine, "kivi"), mine / "again")
    shutil.rmtree(of(mine, "full"))
    assert main(["build", str(mine), "-o", str(mine / "site")]) == 1
    said = capsys.readouterr().err
    assert "kvbench: snapkv has 1 of the 2 runs that the leaderboard asks for\n" in said
    assert "kvbench: kivi has the same run twice\n" in said
    assert not (mine / "site").exists()


def test_without_a_name_nothing_is_guessed(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "sweep.yaml").unlink()
    assert main(["check", str(mine)]) == 2
    assert (
        "nothing says which leaderboard it is for, give --experiment one of leaderboard/kvbench"
        in capsys.readouterr().err
    )
    (mine / "submission.yaml").write_text(f"experiment: {BOARD}\nsubmitter: A. Person\n")
    assert main(["check", str(mine)]) == 0


def test_the_page_links_every_score_to_samples_that_hold_again(mine: Path) -> None:
    site = mine.parent / "site"
    assert main(["build", str(mine), "-o", str(site), "--submitter", "A. <Person>"]) == 0
    text = (site / "index.html").read_text()
    assert "A. &lt;Person&gt;" in text
    assert "http://" not in text.split('<script type="text/plain"')[0].replace("http://www.w3.org", "")
    for folder in mine.glob("pocket-*"):
        link = f"samples/mine/{folder.name}/samples.jsonl"
        assert f'href="{link}"' in text
        assert (site / link).read_bytes() == (folder / "samples.jsonl").read_bytes()
    assert main(["check", str(site / "samples" / "mine")]) == 0
    rows = list(csv.DictReader((site / "leaderboard.csv").read_text().splitlines()))
    assert len(rows) == 6 * 3  # the mean and two tasks of each policy
    (full,) = [row for row in rows if row["policy"] == "full" and row["task"] == "mean"]
    scores = [read_result(of(mine, "full", task)).score for task in ("single_1", "multikey")]
    assert float(full["score"]) == pytest.approx(sum(s or 0 for s in scores) / 2, abs=1e-4)
    assert (full["place"], full["cache_share"]) == ("", "1.0000")


# --- who stands where ---------------------------------------------------------------------------------------------
def board(tmp_path: Path, *runs: tuple[str, int, int]) -> Board:
    """Policies with so many of 20 examples right, in so many bytes; the last example of all is wrong but of full."""
    for policy, right, held in runs:
        lines = [replace(answered(i, float(i < right)), cache_bytes=held, full_position_bytes=0) for i in range(20)]
        write_run(tmp_path, policy, lines, None if policy == "full" else 64)
    me = Submission(tmp_path, BOARD, "me")
    (found,) = boards([(me, row) for row in load_results(tmp_path)])
    return found


def named(found: Board) -> dict[str, Entry]:
    return {entry.first.name: entry for entry in found.entries}


def test_who_scores_more_in_fewer_bytes_beats_who_does_not_if_the_examples_tell(tmp_path: Path) -> None:
    """Against 19 right: 18 lose one example (McNemar p = 1), 5 lose fourteen (p = 2^-13, times four comparisons)."""
    found = board(
        tmp_path,
        ("full", 20, 900),
        ("h2o", 19, 500),
        ("tova", 18, 600),
        ("roco", 5, 700),
        ("snapkv", 6, 100),
        ("cake", 0, 50),
    )
    own = named(found)
    places = {name: entry.place for name, entry in own.items()}
    assert places == {"full": "", "h2o": "best", "tova": "tied", "roco": "worse", "snapkv": "best", "cake": "worse"}
    assert [entry.first.name for entry in found.entries] == ["full", "h2o", "tova", "snapkv", "roco", "cake"]
    assert [found.rank(entry) for entry in found.entries] == [None, 1, 2, 3, 4, 5]
    assert own["tova"].rival is not None
    assert own["tova"].rival.first.name == "h2o"
    assert own["roco"].difference is not None
    assert own["roco"].difference.mean == pytest.approx(-14 / 20)
    assert own["h2o"].ends == own["h2o"].first.ends


def test_as_much_in_more_bytes_is_not_best(tmp_path: Path) -> None:
    found = named(board(tmp_path, ("full", 20, 900), ("h2o", 10, 500), ("tova", 10, 400)))
    assert (found["h2o"].place, found["tova"].place) == ("tied", "best")


@pytest.mark.parametrize("name", ["kvpress", "kvbench", "pocket"])
def test_a_leaderboard_asks_for_one_schedule_and_one_rule(name: str) -> None:
    found = asked(f"leaderboard/{name}")
    context = name != "kvbench"
    assert found.fixed["compress"] == ("context" if context else "prompt")
    assert (found.fixed["schedule"], found.fixed["decode"]) == ("prompt", "grow" if name == "kvpress" else "evict")
    budgets = {budget for _, budget in found.cells}
    assert budgets == ({0.125, 0.25, 0.5, 0.75} if name == "kvpress" else {b for b in budgets if isinstance(b, int)})
    assert len(found.tasks) == {"kvpress": 1, "kvbench": 3, "pocket": 2}[name]
    assert command_lines([f"experiment=leaderboard/{name}"]) == [[f"experiment=leaderboard/{name}"]]
