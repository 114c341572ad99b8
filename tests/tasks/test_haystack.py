import re

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks.words import hide, largest_fitting, sentences_of

SENTENCES = st.lists(st.integers(1, 40).map(lambda size: "x" * size + ". "), min_size=1, max_size=30)
DEPTHS = st.floats(0, 1)


@given(SENTENCES, DEPTHS)
def test_a_needle_stands_within_half_a_sentence_of_its_depth(sentences: list[str], depth: float) -> None:
    text = hide(("NEEDLE.",), (depth,), sentences)
    total = sum(map(len, sentences))
    assert abs(text.index("NEEDLE.") - depth * total) <= max(map(len, sentences)) / 2


@given(SENTENCES, st.lists(DEPTHS, min_size=1, max_size=5))
def test_taking_the_needles_out_leaves_the_text_as_it_was(sentences: list[str], depths: list[float]) -> None:
    needles = tuple(f"<{number}>" for number in range(len(depths)))
    text = hide(needles, tuple(depths), sentences)
    assert sorted(re.findall(r"<\d>", text)) == sorted(needles)
    assert re.sub(r"<\d> ?", "", text).rstrip() == "".join(sentences).rstrip()


def test_sentences_end_at_stops_with_their_closing_marks_and_at_blank_lines() -> None:
    text = 'He said "no." Then 3.5 more!\n\nA title\n\n他来了。她没有？ End'
    assert sentences_of(text) == ['He said "no." ', "Then 3.5 more!\n\n", "A title\n\n", "他来了。", "她没有？ ", "End"]


@settings(max_examples=30)
@given(st.integers(0, 50), st.lists(st.integers(1, 30), min_size=200, max_size=200), st.integers(0, 1500))
def test_the_largest_fitting_size_is_that_of_a_plain_search(start: int, steps: list[int], room: int) -> None:
    def tokens(size: int) -> int:
        return start + sum(steps[:size]) + 10 * max(0, size - len(steps))

    assert largest_fitting(tokens, room) == max((n for n in range(2000) if tokens(n) <= room), default=-1)
