"""What pages say about behaviour, counts and places: the sentence is there, and so is what proves it."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.config.compose import names

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "results").glob("*/README.md")),
]
PROVED = {
    ("README.md", "policies and budgets that evict after it"): "test_every_run_of_a_sweep_writes_equal_samples_alone",
    ("README.md", "computed alone: `engine.rows=1`, presses of kvpress and lm-eval"): (
        "test_samples_say_how_they_ran_and_give_seconds_only_where_they_are_theirs"
    ),
    ("docs/concepts/measured.md", "so that changed data makes a new run"): (
        "test_data_counts_by_its_contents_wherever_it_lies"
    ),
    ("kvbench/results/metrics.py", "their positions, 0 for caches that store none"): (
        "test_shares_count_positions_on_both_sides_or_neither_and_a_decoding_press_has_its_own_footnote"
    ),
}
"""Statements about behaviour that were wrong before, by their file, and the test that proves each."""


def test_statements_that_were_wrong_stay_as_they_are_proved() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for (page, statement), test in PROVED.items():
        assert statement in " ".join((ROOT / page).read_text(encoding="utf-8").split()), (page, statement)
        assert f"def {test}(" in code, test
    sentences = re.findall(r"(?i)one prefill[^.]*? serves [^.]*", " ".join(" ".join(map(text_of, PAGES)).split()))
    assert len(sentences) > 1
    assert [one for one in sentences if "evict after" not in one] == []


def test_a_bound_on_differences_that_cannot_be_distinguished_is_that_of_the_tables() -> None:
    text = " ".join(text_of(ROOT / "docs" / "results.md").split())
    told = re.findall(r"n = (\d+), [^.]*?(?:less than|below) (0\.\d+)([^.]*)cannot be distinguished from 0", text)
    for n, bound, scope in told:
        assert "at one budget" in scope, "averages over budgets resolve smaller differences"
        for path in (ROOT / "results").glob("smollm2/needles*.csv"):
            for row in csv.DictReader(path.open(encoding="utf-8")):
                if row["n"] == n and row["vs_full"] and abs(float(row["vs_full"])) < float(bound):
                    assert float(row["vs_full_low"]) <= 0 <= float(row["vs_full_high"]), row


def test_few_files_are_longer_than_contributors_are_told() -> None:
    (limit,) = re.findall(r"Keep files at about (\d+) lines", text_of(ROOT / "CONTRIBUTING.md"))
    files = [path for name in ("kvbench", "policies", "kernels", "tasks") for path in (ROOT / name).rglob("*.py")]
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lengths[-5] <= int(limit)
    assert lengths[-1] <= 1.2 * int(limit)


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    """Policies, ledger and the anchors of the API are made when the site is built, which checks these links."""
    wrong = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            path, _, anchor = target.partition("#")
            if (
                page.parent.name == "ledger"
                or "://" in target
                or "policies/" in path
                or "ledger/" in path
                or anchor.startswith("kvbench.")
            ):
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append((page.name, target))
    assert wrong == []


def test_the_number_of_an_issue_is_that_of_its_link() -> None:
    links = re.findall(r"#(\d+)\]\(https://github\.com/[^)]*/(?:issues|pull)/(\d+)\)", "".join(map(text_of, PAGES)))
    assert len(links) > 10
    assert [shown for shown, linked in links if shown != linked] == []


def test_numbers_of_a_paragraph_that_names_one_test_are_in_this_test() -> None:
    asked = 0
    for page in PAGES:
        for block in re.split(r"\n\n|\n(?=[|-] ?)", text_of(page)):
            files = set(re.findall(r"`(tests/[\w/]+\.py)`", block))
            if len(files) != 1 or page.name in ("CONTRIBUTING.md", "speed.md"):
                continue
            (file,) = files
            code = (ROOT / file).read_text(encoding="utf-8")
            told = re.sub(r"95%|torch [\d.]+|sm_\d+|Triton [\d.]+|e4m3|compute capability [\d.]+", "", block)
            for number in re.findall(
                r"(?<![\w.])\d[\d,]*(?:\.\d+)?%?", re.sub(r"`[^`]*`|\([^)]*\.md\)|gpt-\w+|Gemma \d", "", told)
            ):
                value = number.rstrip("%").replace(",", "")
                forms = {value, number} | ({f"{float(value) / 100:g}"} if number.endswith("%") else set())
                asked += 1
                assert any(re.search(rf"(?<![\d.]){re.escape(form)}(?![\d])", code) for form in forms), (
                    page.name,
                    number,
                )
    assert asked > 5


def test_counts_of_a_gpu_visit_are_in_its_logs() -> None:
    for folder in sorted((ROOT / "results" / "gpu").glob("20*")):
        logs = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.log")))
        told = "".join(text_of(ROOT / name) for name in ("docs/kernels.md", "results/gpu/README.md"))
        counts = set(re.findall(r"(\d+) of (\d+)(?: GPU)? (tests|samples)", told))
        assert len(counts) > 2
        for part, whole, kind in counts:
            passed = f"{int(whole) - int(part)} failed, {part} passed" if kind == "tests" else f"of {whole}: "
            assert passed in logs or f"compared samples: {whole} " in logs, (part, whole, kind)


def test_a_page_counts_the_tasks_of_ruler() -> None:
    told = re.findall(r"RULER \((\d+) tasks\)", "".join(map(text_of, PAGES)))
    assert told
    assert {int(count) for count in told} == {sum(name.startswith("ruler/") for name in names("task"))}


def test_every_script_and_experiment_is_run_or_composed_by_a_test() -> None:
    """A script without a test of its own has --help, which the next test asks for."""
    texts = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    texts += (ROOT / "scripts" / "gpu_check.py").read_text(encoding="utf-8")  # runs others; has a test of its own
    scripts = [path for path in (ROOT / "scripts").glob("*.py") if path not in WITH_HELP]
    experiments = list((ROOT / "conf" / "experiment").glob("*.yaml"))
    assert [p.stem for p in (*scripts, *experiments) if not re.search(rf"\b{p.stem}\b", texts)] == []


WITH_HELP = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "argparse" in path.read_text(encoding="utf-8")]


@pytest.mark.slow("starts each script")
@pytest.mark.parametrize("script", WITH_HELP, ids=lambda path: path.stem)
def test_a_script_says_how_it_is_called(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr
