"""ROUGE-L as in LongBench: summary level, over sets of words. The package `rouge_score` computes it differently.

x: the n words of a sentence of the answer; y: the m words of a sentence of the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# Package rouge 1.0.1 traces a longest common subsequence recursively. With Python's default limit of 1000 frames it
# completes this many steps when LongBench's eval.py calls it (measured on Python 3.11). A longer trace raises an error
# that eval.py ignores, and the whole score becomes 0. The call stack for Chinese has one frame more.
OFFICIAL_STEPS = 990
OFFICIAL_STEPS_ZH = 989


def rouge_l(prediction: str, answer: str, most_steps: int | None = None) -> float:
    """F of summary-level ROUGE-L, 0 to 0.999999995: distinct words in common sentence by sentence, in order.

    most_steps: the result is 0.0 if a sentence pair needs more steps through the table, as in the official code; None:
    the true value. An empty side scores 0.0.
    Source: package rouge 1.0.1, rouge-l with its defaults; methods of Lin (2004), section 3.2, on sets.
    """
    predicted, expected = _sentences(prediction), _sentences(answer)
    common = _common_words(predicted, expected, most_steps) if predicted and expected else None
    if common is None:
        return 0.0
    precision = len(common) / len({word for y in predicted for word in y})
    recall = len(common) / len({word for x in expected for word in x})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_recalls(prediction: str, answer: str) -> dict[str, float] | None:
    """Recall of rouge-1, rouge-2 and rouge-l, over distinct words and pairs of the answer; None for an empty side.

    Used by LooGLE. Source: package rouge 1.0.1, in which rouge-1 and rouge-2 ignore the ends of sentences.
    """
    predicted, expected = _sentences(prediction), _sentences(answer)
    if not predicted or not expected:
        return None
    theirs, ours = ([word for sentence in side for word in sentence] for side in (expected, predicted))
    common = _common_words(predicted, expected, None)
    assert common is not None, "only a limit of steps gives none"
    pairs = set(pairwise(theirs))
    return {
        "rouge-1": len(set(theirs) & set(ours)) / len(set(theirs)),
        "rouge-2": len(pairs & set(pairwise(ours))) / len(pairs) if pairs else 0.0,
        "rouge-l": len(common) / len(set(theirs)),
    }


def _common_words(
    predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], most_steps: int | None
) -> set[str] | None:
    """Distinct words in common sentence by sentence, in order; None if a pair needs more steps than allowed."""
    common: set[str] = set()
    for x in expected:
        for y in predicted:
            words, steps = _common_subsequence(x, y, most_steps is not None)
            if most_steps is not None and steps > most_steps:
                return None
            common |= words
    return common


def _sentences(text: str) -> list[list[str]]:
    """Words of every sentence. A sentence of white space has one word, the empty one: "".split(" ") is [""]."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common_subsequence(x: Sequence[str], y: Sequence[str], count_steps: bool) -> tuple[set[str], int]:
    """Words of one longest common subsequence, and the steps back through its table (0 if they are not wanted).

    Among equally long ones, the one without the last word of y is used.
    """
    if not count_steps and set(x).isdisjoint(y):
        return set(), 0
    table = _lengths(x, y)
    words: set[str] = set()
    i, j, steps = len(x), len(y), 0
    while i and j:
        steps += 1
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words, steps


def _lengths(x: Sequence[str], y: Sequence[str]) -> list[list[int]]:
    """[n + 1][m + 1]: length of the longest common subsequence of the first i words of x and the first j of y."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    return table
