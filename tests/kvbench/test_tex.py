"""Tables for LaTeX are read here as LaTeX reads them: environments, columns of every row, characters with a meaning."""

import re

from hypothesis import given
from hypothesis import strategies as st

from kvbench.report.grid import Block, Cell, Grid, Row
from kvbench.report.render import latex

WORDS = st.text(alphabet="ab1 _%&#$*[]{}~^\\\\-.<", max_size=8)
CELLS = st.builds(Cell, WORDS, st.sampled_from(["", "best", "second"]), hole=st.booleans())


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    width = draw(st.integers(1, 4))
    levels = draw(st.integers(1, 2))
    row = st.builds(Row, WORDS, st.tuples(*[CELLS] * width))
    block = st.builds(Block, WORDS, st.lists(row, min_size=1, max_size=3).map(tuple))
    header = draw(st.tuples(*[st.tuples(*[WORDS] * levels)] * width))
    blocks = draw(st.lists(block, min_size=1, max_size=2).map(tuple))
    notes = draw(st.lists(st.tuples(st.sampled_from(["", "a"]), WORDS), max_size=3).map(tuple))
    return Grid("name", draw(WORDS), draw(WORDS), header, blocks, notes)


def check(text: str) -> None:
    """Assert what LaTeX would trip over."""
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
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
        spans = [int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", line)]
        assert len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans) == len(columns[1]), line


@given(grids())
def test_whatever_a_table_says_latex_can_read_it(grid: Grid) -> None:
    check(latex(grid))
