"""The metrics by hand, and ROUGE beside the package that the official code calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.tasks.longbench.metrics import (
    classification,
    code_sim,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
    score,
)
from kvbench.tasks.longbench.rouge import rouge_l
from kvbench.tasks.longbench.subsets import SUBSETS


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The Blue Hotel!", "blue hotel", 1.0),  # case, article and punctuation go
        ("well-known", "wellknown", 1.0),  # a hyphen is deleted, not replaced
        ("the a an", "the", 0.0),  # nothing is left of either
        ("red hotel", "blue hotel in town", 2 * (1 / 2) * (1 / 4) / (1 / 2 + 1 / 4)),
        ("blue blue", "blue", 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # a bag: the second blue finds no partner
        ("cafe\u0301", "café", 0.0),  # no Unicode normalisation
    ],
)
def test_qa_f1_is_the_f1_of_bags_of_plain_words(prediction: str, answer: str, expected: float) -> None:
    assert qa_f1(prediction, answer) == pytest.approx(expected)


def test_qa_f1_zh_cuts_first_and_drops_punctuation_then() -> None:
    assert qa_f1_zh("灯塔，在北岸。", "灯塔在北岸") == 1.0
    assert qa_f1_zh("", "灯塔") == 0.0
    assert 0 < qa_f1_zh("灯塔在南岸", "灯塔在北岸") < 1


SENTENCES = st.lists(st.sampled_from(["a", "b", "c", "d", "B", ".", " ", "..", "\n", "e."]), max_size=25).map(" ".join)


@settings(max_examples=300)
@given(prediction=SENTENCES, answer=SENTENCES)
def test_rouge_equals_package_rouge(prediction: str, answer: str) -> None:
    package = pytest.importorskip("rouge", reason="package rouge 1.0.1 is not installed")
    try:
        expected = package.Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except ValueError:  # an empty side, which the official code turns into 0
        expected = 0.0
    assert rouge_l(prediction, answer) == expected


def test_official_chinese_rouge_overflows_one_step_earlier() -> None:
    fits, overflows = "天 " * 989, "天 " * 990  # jieba's words are 天 and blanks, which vanish when words are joined
    assert score(SUBSETS["vcsum"], fits, [fits], official=True) > 0.99
    assert score(SUBSETS["vcsum"], overflows, [overflows], official=True) == 0.0
    assert score(SUBSETS["vcsum"], overflows, [overflows]) > 0.99


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "expected"),
    [
        ("Date", "Date", ["Date", "Food"], 1.0),
        ("Date or Food", "Date", ["Date", "Food"], 1 / 2),
        ("date", "Date", ["Date"], 0.0),
        # "City" is part of the label and goes; "Food" does not
        ("Other city: City, Food", "Other city: City", ["City", "Food", "Other city: City"], 1 / 2),
        # "b" is removed from the first place, so that "c" is not looked at and stays
        ("a b c", "a b c", ["b", "c", "a b c"], 1 / 2),
        ("a b c", "a b c", ["a b c", "b", "c"], 1 / 2),
    ],
)
def test_classification_shares_the_point_among_the_classes_named(
    prediction: str, answer: str, classes: list[str], expected: float
) -> None:
    assert classification(prediction, answer, classes) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "expected"), [("14", 1.0), ("14.0", 0.5), ("about 14 or 15", 0.5), ("１４", 0.0), ("", 0.0)]
)
def test_count_is_the_share_of_numbers_written_like_the_answer(prediction: str, expected: float) -> None:
    assert count(prediction, "14") == expected


def test_retrieval_compares_with_the_paragraph_of_the_answer() -> None:
    assert retrieval("Paragraph 3 of 30", "Paragraph 3") == 0.5
    assert retrieval("03", "Paragraph 3") == 0.0
    assert retrieval_zh("段落3", "段落3") == 1.0
    with pytest.raises(ValueError, match="answer 'page 3' does not name a paragraph"):
        retrieval("3", "page 3")


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("\n\nreturn x", "return x", 1.0),
        ("# note\nreturn x\ny", "return x", 1.0),
        ("// a\n```\nreturn x", "return x", 1.0),
        ("  \nreturn x", "return x", 0.2),  # a blank line is a line: one blank in common, 2 * 1 / 10
        ("# only", "return x", 0.0),
        ("abcd", "bcde", 0.75),  # difflib: the block bcd, 2 * 3 / 8
        ("# only", "", 1.0),
        # not symmetric: the longest block of the first text decides, by the junk rule of the second
        ("tide", "diet", 0.25),
        ("diet", "tide", 0.5),
    ],
)
def test_code_sim_is_difflibs_ratio_of_the_first_line_of_code(prediction: str, answer: str, expected: float) -> None:
    assert code_sim(prediction, answer) == expected


def test_only_the_first_line_of_the_few_shot_subsets_counts() -> None:
    asked = ("\n\nthe Orre\nPassage: more", ["the Orre"])
    assert score(SUBSETS["triviaqa"], *asked) == 1.0
    assert score(SUBSETS["hotpotqa"], *asked) < 1.0
    assert score(SUBSETS["triviaqa"], " \nthe Orre", ["the Orre"]) == 0.0  # newlines are stripped, blanks are not
