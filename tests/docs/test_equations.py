"""Equations of docstrings become the MathML that a reader of MathML would write."""

import re

import pytest
from equations import mathml


def shown(line: str) -> str:
    """The MathML inside `<math>`, without rows that only hold together what stands in them anyway."""
    inside = re.sub(r"</?math[^>]*>", "", mathml(line))
    fences = inside.replace(' fence="true" stretchy="true"', "")
    return re.sub(r"</?mrow>", "", fences)


def test_a_fraction_takes_the_symbols_beside_it_and_drops_their_parentheses() -> None:
    assert shown("a_j / (1 - b)") == ("<mfrac><msub><mi>a</mi><mi>j</mi></msub><mn>1</mn><mo>−</mo><mi>b</mi></mfrac>")


def test_sums_and_largest_carry_their_range_below() -> None:
    assert shown("sum_(q >= j) x") == "<munder><mo>∑</mo><mi>q</mi><mo>≥</mo><mi>j</mi></munder><mi>x</mi>"
    assert shown("max_i^n x") == "<munderover><mo>max</mo><mi>i</mi><mi>n</mi></munderover><mi>x</mi>"


def test_words_are_escaped_and_the_notation_stays_readable() -> None:
    got = mathml('s < "a<b"')
    assert "<mtext>\u00a0a&lt;b\u00a0</mtext>" in got
    assert 'alttext="s &lt; &quot;a&lt;b&quot;"' in got


@pytest.mark.parametrize("line", ["(a", "a)", "|x", "a /", "a $ b", 'b "open'])
def test_what_is_no_equation_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no equation"):
        mathml(line)
