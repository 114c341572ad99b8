"""Tables for LaTeX are read here as LaTeX reads them: environments, columns of every row, characters with a meaning."""

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvbench.report.formats import latex, renamed
from kvbench.report.text_table import TextTable, frame_of, table_of
from kvbench.report.text_table import text as text_table

WORDS = st.text(alphabet="ab1 _%&#$*[]{}~^\\\\-.<", max_size=8)


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
    names = draw(st.lists(WORDS, min_size=1, max_size=4, unique=True))
    rows = draw(st.lists(st.tuples(*[WORDS] * len(names)), min_size=1, max_size=4))
    return replace(table_of(names, rows, draw(WORDS), names[:1]), notes=draw(st.lists(WORDS, max_size=3)))


def check(text: str) -> None:
    """Assert what LaTeX would trip over."""
    text = text.partition("\n")[2]  # after the comment that names the package
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{([\w*]+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    bare = re.sub(r"\\[_%&#${}\\]", "", text)  # what is escaped, and the ends of rows
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert not set("%#") & set(bare)
    assert "_" not in bare
    assert not re.search(r"\\\\\s*[*\[]", text)  # it would be the command's own star or length
    columns = re.search(r"\\begin\{tabular\}\{([lrc]+)\}", text)
    assert columns
    body = text[columns.end() : text.index("\\end{tabular}")]
    for line in (line for line in body.splitlines() if line.endswith("\\\\")):
        assert len(re.findall(r"(?<!\\)&", line)) + 1 == len(columns[1]), line


@given(tables())
def test_tables_with_special_characters_are_valid_latex(table: TextTable) -> None:
    check(latex(table))


def test_numbers_have_true_minus_signs_and_names_keep_their_hyphens() -> None:
    assert "a-1 & $-$0.90 ($-$0.97..$-$0.59) \\\\" in latex(table_of(("x", "y"), [("a-1", "-0.90 (-0.97..-0.59)")]))


def test_a_table_fits_a_column_a_page_or_is_broken_and_can_be_referenced() -> None:
    names = [f"task{n}" for n in range(24)]
    wide = TextTable(frame_of(["policy", *names], [["snapkv"], *([["50.0"]] * 24)]), "all tasks", left=["policy"])
    narrow = table_of(("policy", "score"), [("snapkv", "0.50")], "own", left=("policy",))
    text = latex(narrow, "my_table")
    assert text.startswith("% \\usepackage{booktabs}\n\\begin{table}\n")
    assert "\\label{tab:my-table}" in text
    text = latex(wide)
    check(text)
    assert text.startswith("% \\usepackage{booktabs}; two columns wide\n\\begin{table*}\n")
    headings = [line for line in text.splitlines() if line.startswith("policy & ")]
    assert [name for line in headings for name in line.removesuffix(r" \\").split(" & ")[1:]] == names
    assert len(headings) == 3
    assert max(map(len, headings)) < 130  # characters of a line, across a page
    other = renamed(narrow, {"policy": "method", "snapkv": "SnapKV (ours)", "score": "acc"}, precision=1)
    assert text_table(other).split() == ["own", "method", "acc", "-" * 18, "SnapKV", "(ours)", "0.5"]


def test_a_table_longer_than_a_page_is_several_tables_with_the_columns_of_names_and_no_empty_rows() -> None:
    """50 rows and 4 budgets, each in a half of the rows: every part has the names, the budget and rows with a score."""
    scores = [[f"0.{n:02}" + " (0.10-0.90)" * 2 if n % 2 == at else "-" for n in range(50)] for at in (0, 0, 1, 1)]
    policies = [f"policy{n}" for n in range(50)]
    frame = frame_of(["policy", "budget", *"abcd"], [policies, ["64"] * 50, *scores])
    text = latex(TextTable(frame, "long", notes=["one note"], left=["policy"]), "own")
    check(text)
    tables = text.split("\\begin{table*}")[1:]
    assert len(tables) == 2  # of at most 44 lines
    assert [re.findall(r"label{(.*?)}", one) for one in tables] == [["tab:own"], ["tab:own-2"]]
    assert ["one note" in one for one in tables] == [False, True]
    headings = [line for line in text.splitlines() if line.startswith("policy & ")]
    assert headings == ["policy & budget & a & b \\\\", "policy & budget & c & d \\\\"]
    rows = [line.split(" & ")[0] for line in text.splitlines() if re.match(r"policy\d", line)]
    assert rows == policies[::2] + policies[1::2]
