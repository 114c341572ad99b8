import pytest

from kvbench.tasks.scores import contains, contains_any, needle_words, rouge1_recall

SANDWICH = ("eat a sandwich and sit in Dolores Park on a sunny day.",)


def test_contains_is_the_share_of_references_ignoring_case() -> None:
    assert contains("ABC and 12", ("abc", "12", "x", "y")) == 0.5
    assert contains_any("ABC and 12", ("x", "12")) == 1.0
    assert contains_any("ABC and 12", ("x", "y")) == 0.0


@pytest.mark.parametrize(
    ("output", "score"),
    [  # the eleven words: eat a sandwich and sit in dolores park on sunny day.
        ("Eat a sandwich and sit in Dolores Park on a sunny day.", 1.0),
        ("eat a sandwich and sit in dolores park on a sunny day", 10 / 11),  # "day" without its full stop is a miss
        ("sandwich sandwich", 1 / 11),
        ("go to the zoo", 0.0),
        ("", 0.0),
    ],
)
def test_needle_words_counts_distinct_words_with_their_punctuation(output: str, score: float) -> None:
    assert needle_words(output, SANDWICH) == pytest.approx(score)


@pytest.mark.parametrize(
    ("output", "score"),
    [  # twelve words, "a" twice; stemming makes "sandwiches" a sandwich
        (SANDWICH[0], 1.0),
        ("eat sandwiches", 2 / 12),
        ("a a a", 2 / 12),
        ("nothing", 0.0),
    ],
)
def test_rouge1_recall_counts_stemmed_words_as_often_as_they_stand(output: str, score: float) -> None:
    assert rouge1_recall(output, SANDWICH) == pytest.approx(score)
