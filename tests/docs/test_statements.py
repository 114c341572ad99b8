"""What pages say about behaviour, counts and places: the sentence is there, and so is what proves it."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT, prose, read
from long_cache import limit_bits

from kvbench.config.compose import CONF, load, names
from kvbench.config.presets import make_policy
from kvbench.models.cache_shapes import cache_shape
from kvbench.policies.stores.store import LayerStore
from kvbench.results.statistics import paired_difference


def test_a_bound_on_differences_that_cannot_be_distinguished_is_that_of_the_tables() -> None:
    text = " ".join(prose("docs/results.md").split())
    told = re.findall(r"n = (\d+), [^.]*?(?:less than|below) (0\.\d+)([^.]*)cannot be distinguished from 0", text)
    for n, bound, scope in told:
        assert "at one budget" in scope, "averages over budgets resolve smaller differences"
        for path in (ROOT / "results").glob("smollm2/needles*.csv"):
            for row in csv.DictReader(path.open(encoding="utf-8")):
                if row["n"] == n and row["vs_full"] and abs(float(row["vs_full"])) < float(bound):
                    assert float(row["vs_full_low"]) <= 0 <= float(row["vs_full_high"]), row


def test_few_files_are_longer_than_contributors_are_told() -> None:
    (limit,) = re.findall(r"Keep files at about (\d+) lines", prose("CONTRIBUTING.md"))
    files = [path for name in ("kvbench", "policies", "kernels", "tasks") for path in (ROOT / name).rglob("*.py")]
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lengths[-5] <= int(limit)
    assert lengths[-1] <= 1.2 * int(limit)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    """Policies, ledger and the anchors of the API are made when the site is built, which checks these links."""
    wrong = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
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
    links = re.findall(r"#(\d+)\]\(https://github\.com/[^)]*/(?:issues|pull)/(\d+)\)", "".join(map(prose, PAGES)))
    assert len(links) > 10
    assert [shown for shown, linked in links if shown != linked] == []


def test_counts_of_a_gpu_visit_are_in_its_logs() -> None:
    logs = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "results" / "gpu").glob("20*/*.log")))
    told = "".join(prose(name) for name in ("docs/kernels.md", "results/gpu/README.md"))
    counts = set(re.findall(r"(\d+) of (\d+)(?: GPU)? (tests|samples)", told))
    assert len(counts) > 2
    for part, whole, kind in counts:
        passed = f"{int(whole) - int(part)} failed, {part} passed" if kind == "tests" else f"of {whole}: "
        assert passed in logs or f"compared samples: {whole} " in logs, (part, whole, kind)


def test_every_column_of_a_folder_is_told_where_a_page_says_so() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if re.search(r"(?:every|all) columns?\b", text) and (files := sorted(page.parent.glob("*.csv"))):
            columns = {column for file in files for column in file.read_text().partition("\n")[0].split(",")}
            assert columns <= set(re.findall(r"`(\w+)`", text)), page


def test_counts_are_those_of_the_tree() -> None:
    text = " ".join("".join(map(prose, PAGES)).split())
    families = prose("docs/families.md").split("\n## ")[1:]
    rows = {part.partition(":")[0]: part.count("\n| ") - 1 for part in families}
    demo = load(CONF / "experiment" / "demo.yaml")["hydra"]["sweeper"]["params"]["policy"]
    least, beyond = re.findall(r"python = \">=3\.(\d+),<3\.(\d+)", read("pyproject.toml"))[0]
    for pattern, count in (
        (r"RULER \((\d+) tasks\)|(\d+) synthetic tasks", sum(name.startswith("ruler/") for name in names("task"))),
        (r"lists (\d+) verified|## exact: (\d+)", rows["exact"]),
        (r"## refused: (\d+)", rows["refused"]),
        (r"## not tried: (\d+)", rows["not tried"]),
        (r"`LayerStore` has (\d+) public members", sum(not name.startswith("_") for name in dir(LayerStore))),
        (r"\((\d+) rows\)", sum(rows.values())),
        (r"Python 3\.(\d+)(?: to|,)", int(least)),
        (r"Python 3\.\d+(?: to|, 3\.12 or) 3\.(\d+)", int(beyond) - 1),
        (r"runs (\w+) policies on the pocket model", {6: "six"}.get(demo.count(",") + 1)),
    ):
        assert {one for found in re.finditer(pattern, text) for one in found.groups() if one} == {str(count)}, pattern


def test_the_number_of_examples_that_detect_a_difference() -> None:
    text = prose("docs/faq.md")
    ((lost, one, first, two, second),) = re.findall(
        r"from (\d+) lost answers\s+on: (0\.\d+) of (\d+) examples, (0\.\d+) of (\d+)", text
    )
    for share, n in ((one, int(first)), (two, int(second))):
        assert float(share) == int(lost) / n
        for k, seen in ((int(lost), True), (int(lost) - 1, False)):
            assert (paired_difference([1.0] * n, [0.0] * k + [1.0] * (n - k)).claims) == seen
    ((n, share),) = re.findall(
        r"With (\d+) examples a difference of\s+(0\.\d+) is not", prose("docs/concepts/measured.md")
    )
    assert float(share) * int(n) < int(lost)


def test_bytes_of_codes_are_those_of_their_stores() -> None:
    table = prose("docs/kernels.md").split("| bytes of a token per KV head |")[1].split("\n\n")[0]
    rows = [(re.findall(r"`(\w+)`", line), re.findall(r"\d+", line.split("|")[2])) for line in table.splitlines()[2:]]
    assert len(rows) == 3
    for slugs, told in rows:
        bits = [limit_bits(make_policy(slug), cache_shape("llama2_7b")) for slug in slugs]
        positions = 4 * (slugs == ["full"])  # stores of codes have none
        assert [round(one * 256 / 8) - positions for one in bits] == [*map(int, told)]


def test_new_tokens_in_tables_are_those_of_the_benchmarks() -> None:
    text = read("tasks/data/long_sets.json")
    known = {name: benchmark["subsets"] for name, benchmark in json.loads(text).items()}
    asked = 0
    for page in ("long_sets", "shared_contexts"):
        table = prose(f"docs/evaluators/{page}.md").split("---:|\n")[1].split("\n\n")[0]
        for line in table.splitlines():
            tasks, told = re.findall(r"`([\w/]+)`", line.split("|")[1]), line.split("|")[4]
            benchmark, asked = known[tasks[0].partition("/")[0]], asked + 1
            subsets = benchmark if "..." in line or "/" not in tasks[0] else [one.rpartition("/")[2] for one in tasks]
            found = re.findall(r"\d+", "".join(str(benchmark[one]["max_new_tokens"]) + " " for one in subsets))
            ends = {min(found, key=int), max(found, key=int)} if " to " in told else set(found)
            assert set(re.findall(r"\d+", told)) == ends, line
    assert asked > 15


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
