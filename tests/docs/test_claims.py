"""Tables, claims and sub-commands of the pages are right and run."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

from kvbench.cli import COMMANDS, main
from kvbench.config.compose import load
from kvbench.papers.claims import Claim

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(RESULTS.glob("*/README.md")),
]


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[-+]?\d[\d,]*\.?\d*", cell)]


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    folder = RESULTS / re.search(r"\]\(results/(\w+)/needles.svg\)", readme)[1]  # type: ignore[index]
    known = {}
    for table in ("needles", "stores"):
        if (folder / f"{table}.csv").exists():
            with (folder / f"{table}.csv").open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            known |= {
                (row["policy"], row["budget"].split(".")[0]): row
                for row in rows
                if row["task"] in ("niah", "niah 2048")
            }
    table = readme.split("| policy | budget |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    assert len(table) > 5
    for line in table:
        policy, budget, found, difference, kept, mib, share = (cell.strip() for cell in line.strip("|").split("|"))
        slug = {"turboquant, 4 bits": "turboquant"}.get(policy, policy)
        row = next(known[slug, key] for key in (budget.replace(",", ""), "") if (slug, key) in known)
        assert numbers(found) == [round(float(row[name]), 2) for name in ("score", "low", "high")], line
        if difference:
            expected = [round(float(row[name]), 2) for name in ("vs_full", "vs_full_low", "vs_full_high")]
            assert numbers(difference) == expected, line
        assert numbers(kept) == [pytest.approx(float(row["kept_per_head"]), abs=0.51)], line
        assert numbers(mib) == [pytest.approx(float(row["cache_mib"]), abs=0.051)], line
        assert numbers(share) == [pytest.approx(100 * float(row["share_of_full"]), abs=0.51)], line


def test_every_claim_names_its_source_and_the_example_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    (shown,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])["claims"]  # type: ignore[index]
    claims = {one["name"]: one for file in RESULTS.glob("paper/*/claims.yaml") for one in load(file)["claims"]}
    assert all(claim["source"] for claim in claims.values())
    own = claims[shown["name"]]
    assert shown["pairs"].items() <= own["pairs"].items()
    assert Claim(**shown | {"pairs": own["pairs"]}) == Claim(**own)


@cache
def sub_commands() -> list[tuple[str, str]]:
    """The sub-commands in the pages, each with its arguments."""
    found = set()
    for page in PAGES:
        for text in page.read_text(encoding="utf-8").splitlines():
            line, _, comment = text.strip().removeprefix("$ ").partition(" #")
            words = re.match(r"(?:kvbench |python -m kvbench\.)([\w-]+)(.*)", line)
            if words and (name := words[1].replace("_", "-")) in COMMANDS.places:
                rest = words[2].strip()
                others = re.findall(r"(?<!\w)\.[a-z]+\b", comment)  # "or .tex"
                found |= {(name, rest), *((name, re.sub(r"(-o \w+)\.\w+", rf"\1{other}", rest)) for other in others)}
    return sorted(found)


def test_sub_commands_of_the_pages_have_these_options() -> None:
    assert len(sub_commands()) > 40
    for name, rest in sub_commands():
        command, arguments = COMMANDS.get_command(click.Context(COMMANDS), name), shlex.split(rest)
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), arguments.pop(0))
        assert command is not None, (name, rest)
        command.make_context(name, arguments)  # raises a usage error


FAST = (
    "results collect results/runs -o",
    "tables list",
    "tables show",
    "tables compare",
    "sweep status results",
)
SLOW = (
    "claims",
    "results check",
    "results collect results/runs --price",
    "plot results/",
    "report",
    "memory",
    "diagnose",
    "tables run",
)
ELSEWHERE = {
    "--at-size": "its runs are those of a policy that sets its own size: tests/kvbench/test_results.py",
    "--price": "its runs are those of constraints of engines: tests/kvbench/test_price.py",
    "--by turn": "its runs have no turns: tests/kvbench/test_turns.py",
    "results collect results/runs/": "its runs are those of a table of results/pocket",
    "results log": "tests/kvbench/test_wandb.py",
    "sweep ": "its jobs are on a cluster: tests/kvbench/test_jobs.py",
    "lm-eval": "its model is the reader's: tests/kvbench/test_lm_eval_command.py",
    "predictions.jsonl": "its predictions are the reader's: tests/kvbench/test_score.py",
    "mine.yaml": "its claims are the reader's: tests/kvbench/test_claims.py",
    "llama32_3b": "its model is on the Hub",
    "tables run": "tests/kvbench/test_papers_compare.py",
    "smollm2": "its model takes minutes on a CPU",
    "calibrate": "takes minutes on a CPU: tests/kvbench/test_diagnostics.py",
    "bench": "takes minutes on a CPU: tests/kvbench/bench",
}
"""Parts of the commands that are not run here, and why."""


def run_here(which: tuple[str, ...]) -> list[str]:
    """The commands of the pages that begin so, and that are not run elsewhere."""
    lines = [f"{name} {rest}".strip() for name, rest in sub_commands()]
    return [line for line in lines if line.startswith(which) and not elsewhere(line, which)]


def elsewhere(line: str, which: tuple[str, ...] = ()) -> bool:
    """Whether a command is not run here; one that begins with a whole entry of `which` is."""
    own = "sweep status results" in which and line.startswith("sweep status results")
    return not own and any(part in line or line.startswith(part) for part in ELSEWHERE)


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it after a first sweep, with the results of the repository."""
    here = tmp_path_factory.mktemp("reader")
    shutil.copytree(RESULTS / "pocket", here / "results/pocket")
    small = ["task.lengths=[300]", "task.depths=[0.5]", "task.repeats=5", "task.max_new_tokens=2", "device=cpu"]
    out = f"out={here / 'results/runs'}"
    assert main(["-m", "policy=full,snapkv,tova", "budget=64", "schedule=prompt", "decode=evict", *small, out]) == 0
    return here


def run_in(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)) in (0, None), capsys.readouterr().err
    assert capsys.readouterr().out
    if output := re.search(r" -o (\S+)", command):
        assert (folder / output[1]).exists()


@pytest.mark.parametrize("command", run_here(FAST))
def test_a_sub_command_of_the_pages_runs(
    command: str, folder_of_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(folder_of_runs, command, monkeypatch, capsys)


@pytest.mark.slow("draws and computes")
@pytest.mark.parametrize("command", run_here(SLOW))
def test_a_slow_sub_command_of_the_pages_runs(
    command: str, folder_of_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(folder_of_runs, command, monkeypatch, capsys)


def test_every_sub_command_of_the_pages_is_run_by_a_test() -> None:
    lines = {f"{name} {rest}".strip() for name, rest in sub_commands()}
    assert lines - {*run_here(FAST), *run_here(SLOW)} - {line for line in lines if elsewhere(line)} == set()


def test_every_script_is_named_by_a_page_a_test_or_a_script() -> None:
    scripts = [file for file in (ROOT / "scripts").iterdir() if file.suffix in (".py", ".sh")]
    others = (*PAGES, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile", *scripts)
    texts = {file: file.read_text(encoding="utf-8") for file in others}
    named = {one for one in scripts for file, text in texts.items() if file != one and one.stem in text}
    assert set(scripts) - named == set()
