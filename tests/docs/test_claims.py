"""Tables, claims and sub-commands of the pages are right and run."""

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


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_the_table_of_policies_is_that_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = RESULTS / re.search(r"\]\([./]*results/(\w+)/ruler_average.svg\)", text)[1]
    with (folder / "ruler_average.csv").open(encoding="utf-8") as file:
        known = {(row["policy"], row["budget"].split(".")[0]): row for row in csv.DictReader(file)}
    header, _, *table = text.split("\n| policy | budget |", 1)[1].split("\n\n", 1)[0].splitlines()
    tasks = [cell.strip() for cell in header.strip("| ").split("|")][2:]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len(shown) > 5
    for policy, budget, size, average, *scores in shown:
        row = known[policy, budget.strip("-")]
        held = f"{float(row['cache_mib']):.1f} ({float(row['share_of_full']):.0%})" if row["cache_mib"] else ""
        ends = [row["average"], row["low"], row["high"]]
        ends += [row[f"ruler_{task}{end}"] for task in tasks for end in ("", "_low", "_high")]
        assert size == held, policy
        assert re.findall(r"\d\.\d\d", " ".join([average, *scores])) == [f"{float(end):.2f}" for end in ends], policy
    official = {policy for policy, *_ in shown if policy.endswith(" (official)")}
    assert official
    assert {policy.removesuffix(" (official)") for policy in official} <= {policy for policy, *_ in shown}
    everything = {policy for policy, budget in known if budget in ("", "512")}
    assert page == "README.md" or {policy for policy, *_ in shown} == everything


def test_every_claim_names_its_source_and_the_example_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    (shown,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])["claims"]
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
        command, arguments = COMMANDS, [name, *shlex.split(rest)]
        while isinstance(command, click.Group):
            _, command, arguments = command.resolve_command(click.Context(command), arguments)
        command.make_context(name, arguments)  # raises a usage error


FAST = re.compile(
    r"(results collect results/runs -o|tables list|tables show|tables compare|sweep status results)"
    r"(?!.*--(small|at-size|by turn))"
)
ELSEWHERE = {
    "bench": "takes minutes on a CPU: tests/kvbench/bench",
    "lm-eval": "its model is the reader's: tests/kvbench/test_lm_eval_command.py",
    "calibrate": "takes minutes, or its texts are the reader's: tests/kvbench/test_diagnostics.py",
    "tables run .*llama32_3b": "its model is on the Hub",
    "tables run .*smollm2": "its model takes minutes on a CPU",
    "score ": "its predictions are the reader's: tests/kvbench/test_score.py",
}
"""Commands that are not run here, and why."""


def run_here(fast: bool) -> list[str]:
    """The commands of the pages that are run here, quickly or not."""
    lines = [f"{name} {rest}".strip() for name, rest in sub_commands()]
    lines = [line for line in lines if not any(re.match(start, line) for start in ELSEWHERE)]
    return [line for line in lines if bool(FAST.match(line)) == fast]


SMALL = ["task.lengths=[300]", "task.depths=[0.5]", "task.repeats=5", "task.max_new_tokens=2", "device=cpu"]


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it after a first sweep, with the results of the repository."""
    here = tmp_path_factory.mktemp("reader")
    shutil.copytree(RESULTS / "pocket", here / "results/pocket")
    shutil.copy(RESULTS / "paper/caote/claims.yaml", here / "mine.yaml")
    out = f"out={here / 'results/runs'}"
    assert main(["-m", "policy=full,snapkv,tova", "budget=64", "schedule=prompt", "decode=evict", *SMALL, out]) == 0
    return here


@pytest.fixture(scope="module")
def folder_of_more_runs(folder_of_runs: Path) -> Path:
    """With pages, a policy without a budget, turns, and the divergence from the full cache."""
    out = folder_of_runs / "results"
    small = [*SMALL, "schedule=prompt", f"out={out / 'runs'}"]
    assert main(["-m", "policy=snapkv,paged_snapkv", "budget=64,96", "decode=grow", *small]) == 0
    assert main(["policy=threshold_knorm", "policy.allocator.tau=-8", "decode=threshold", *small]) == 0
    assert main(["policy=full", "task=niah_turns", "limit=2", *small]) == 0
    assert main(["-m", "policy=snapkv,h2o", "budget=64,128", "decode=grow", *small]) == 0
    few = [*SMALL, "schedule=prompt", "policy=snapkv,h2o", "budget=64"]
    assert main(["-m", *few, f"out={out / 'evidence'}"]) == 0
    assert main(["-m", *few, "task.divergence=true", f"out={out / 'kl'}"]) == 0
    return folder_of_runs


def run_in(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    command = re.sub(r"/shared/first|results/runs/(?!evidence)\w+", "results/runs", command)
    command = command.replace("results/runs/evidence", "results/evidence")
    assert main(shlex.split(command)) in (0, None), capsys.readouterr().err
    assert capsys.readouterr().out
    if output := re.search(r" -o (\S+)", command):
        assert (folder / output[1]).exists()


@pytest.mark.parametrize("command", run_here(fast=True))
def test_a_sub_command_of_the_pages_runs(
    command: str, folder_of_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(folder_of_runs, command, monkeypatch, capsys)


@pytest.mark.slow("draws and computes")
@pytest.mark.parametrize("command", run_here(fast=False))
def test_a_slow_sub_command_of_the_pages_runs(
    command: str, folder_of_more_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(folder_of_more_runs, command, monkeypatch, capsys)


def test_every_script_is_named_by_a_page_a_test_or_a_script() -> None:
    scripts = [file for file in (ROOT / "scripts").iterdir() if file.suffix in (".py", ".sh")]
    others = (*PAGES, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile", *scripts)
    texts = {file: file.read_text(encoding="utf-8") for file in others}
    named = {one for one in scripts for file, text in texts.items() if file != one and one.stem in text}
    assert set(scripts) - named == set()
