"""The numbers of pages about results are in the CSV files of the folders that the pages name."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page for page in sorted(ROOT.glob("results/*/README.md")) if any(page.parent.glob("*.csv"))]
PAGES += [ROOT / "docs" / "results.md"]
SETTINGS = {"95%", "2.5", "1.3", "5%", "10%", "29%", "12.5%", "6.25%", "40%"}
"""Numbers of pages that are settings (confidence, bits, parameters, shares of the prompt), not results."""
NUMBER = re.compile(r"(?<![\w.`/-])[-+]?\d[\d,]*(?:\.\d+)?%?(?![\w`/]|\.\d)")
INTERVAL = re.compile(r"(?<![\w.`/-])(_)\*?(?: \(|, )(_)(?: to |\.\.|-)(_)(?![\w%])".replace("_", r"[-+]?\d+\.\d+"))


@dataclass(frozen=True)
class Row:
    """A row of a CSV file. policy: its name; words: those of its name and of the policy that it is compared with."""

    policy: str
    words: frozenset[str]
    budget: str
    numbers: tuple[float, ...]

    def shows(self, texts: Sequence[str]) -> bool:
        """Whether the numbers of the row, or their negatives (a loss is a negative gain), round to all these texts."""
        return any(all(self._has(text, sign) for text in texts) for sign in (1, -1))

    def _has(self, text: str, sign: int) -> bool:
        value, unit = float(re.sub("[,%+]", "", text)), 100 if text.endswith("%") else 1
        near = 0.5001 * 10.0 ** -len(text.rstrip("%").partition(".")[2])
        return any(abs(sign * unit * number - value) <= near for number in self.numbers)


@cache
def rows(folder: Path) -> list[Row]:
    """Every row of the CSV files of a folder."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                policy = (row.get("policy") or row.get("comparison") or "").partition(" (")[0]
                names = policy.partition(" at ")[0] + "_" + (row.get("base") or "")
                cells = [cell for cell in row.values() if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell or "")]
                words = frozenset(re.findall("[a-z0-9]+", names)) - {"full"}
                found.append(Row(policy, words, (row.get("budget") or "").split(".")[0], tuple(map(float, cells))))
    return found


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items and rows of tables, each in one line."""
    block = ""
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        if block and re.match(r"\s*(\||- |\d+\. |#|!|$)", line):
            yield block.strip()
            block = ""
        block += f" {line.strip()}"
    yield block.strip()


def meant(text: str, known: Sequence[Row]) -> list[Row]:
    """The rows of the policies that a text names, at the budgets that it names; in a table, of the policy in a cell."""
    if text.startswith("|"):
        cells = {cell.strip(" `") for cell in text.split("|")} - {""}
        if exact := [row for row in known if row.policy in cells]:
            return exact
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    named = [row for row in known if row.words and all(word in letters for word in row.words)]
    budgets = {number.replace(",", "") for number in NUMBER.findall(text)} & {row.budget for row in named} - {""}
    return [row for row in named if not budgets or row.budget in {*budgets, ""}]


def unknown(block: str, known: Sequence[Row]) -> list[str]:
    """The intervals, decimals and percentages of a block that no row has: none of its sentence, or else of the block.

    The full cache needs no name. A number after "within", "below" and the like is a bound, not a result.
    """
    found, full = [], [row for row in known if not row.words]
    block = re.sub(r"`[^`]*`", lambda code: re.sub(r"\d+\.\d+", "", code[0]), block)
    block = re.sub(r"\]\([^)]*\)|\b(within|less than|below|above|about|reaches) [\d.]+", "", block)
    for sentence in [block] if block.startswith("|") else re.split(r"(?<=[.;])\s", block):
        own, rest = meant(sentence, known) or meant(block, known) or list(known), sentence
        for interval in INTERVAL.finditer(sentence):
            rest = rest.replace(interval[0], " ", 1)
            found += [] if any(row.shows(interval.groups()) for row in own) else [interval[0]]
        numbers = [number for number in NUMBER.findall(rest) if "." in number or "%" in number]
        found += [one for one in numbers if one not in SETTINGS and not any(row.shows([one]) for row in own + full)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_number_of_a_page_is_in_its_csv_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    heads = [path.open(encoding="utf-8").readline() for path in page.parent.glob("*.csv")]
    assert page.parent.name == "docs" or re.search(r"\b(?=\w*\d)[0-9a-f]{8}\b", text), "no commit"
    assert "kvbench_revision" in text or not any("kvbench_revision" in head for head in heads), "no revision"
    named = {ROOT / "results" / name for name in re.findall(r"results/(\w+)/", text) if page.parent.name == "docs"}
    known = [row for folder in sorted(named or {page.parent}) for row in rows(folder)]
    wrong = [(number, block) for block in blocks(text) for number in unknown(block, known)]
    assert wrong == []
    for policy in ("snapkv", "SnapKV"):  # and a wrong one is found
        assert unknown(f"| {policy} | 0.123 (0.111-0.456) |", known) == ["0.123 (0.111-0.456"]


def test_the_kib_of_a_table_are_the_bytes_of_its_csv_files() -> None:
    folder, asked = ROOT / "results" / "pocket", 0
    known: dict[tuple[str, str], set[int]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = row["policy"].partition(" (")[0], (row["budget"] or "").split(".")[0]
                for size in ("cache_bytes", "held_bytes"):
                    known.setdefault(key, set()).update([round(float(row[size]) / 1024)] if row.get(size) else [])
    header: list[str] = []
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        header = cells if cells[0] == "policy" else header
        for name, cell in zip(header, cells, strict=False) if line.startswith("| ") and cells != header else ():
            if name.startswith("KiB held, "):
                asked += 1
                sizes = known.get((cells[0], name.removeprefix("KiB held, "))) or known[cells[0], ""]
                assert int(cell) in sizes, line
    assert asked > 100


def test_every_measured_number_of_the_speed_page_is_in_the_file_that_its_section_names() -> None:
    for section in (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        files = [ROOT / name for name in re.findall(r"`(results/[\w./-]+\.(?:csv|json|log))`", section)]
        texts = [path.read_text(encoding="utf-8") for file in files for path in sorted(file.parent.glob("*.*"))]
        known = [Row("", frozenset(), "", tuple(float(n) for n in re.findall(r"\b\d+\.\d+\b", "".join(texts))))]
        section = re.sub(r"(torch|Triton|transformers|Llama-) ?[\d.]+", "", section)
        measured = re.findall(r"(?<![\w.-])(\d+\.\d+|\d+(?= ?m?s\b))(?!\d|\.\d)", section)
        assert [number for number in measured if not known[0].shows([number])] == [], section[:30]


def test_counts_of_rows_and_examples_are_those_of_the_csv_files() -> None:
    asked = 0
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        folders = [ROOT / "results" / name for name in re.findall(r"results/(\w+)/", text)] + [page.parent]
        for n, name in re.findall(r"All (\d+) rows are in `(\w+\.csv)`", text):
            asked += 1
            assert int(n) in {
                len(list(csv.DictReader((one / name).open()))) for one in folders if (one / name).exists()
            }
        for name, rest in re.findall(r"\| `(\w+\.csv)` \|([^|]*\(n = [^|]*)\|", text):
            asked += 1
            known = {row.get("n") for row in read_rows(page.parent / name)}
            assert {*re.findall(r"n = (\d+)", rest)} <= known, name
    assert asked > 5


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none if it does not exist."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
