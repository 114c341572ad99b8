"""LongBench's metrics: one prediction against one answer, 0 to 1, as in the official scripts.

Quirks of the scripts are kept, because published numbers contain them.
Source: THUDM/LongBench at 2e00731, LongBench/metrics.py.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from kvbench.errors import ConfigError, from_extra
from kvbench.tasks.longbench.rouge import OFFICIAL_STEPS, OFFICIAL_STEPS_ZH, rouge_l
from kvbench.tasks.longbench.subsets import Subset
from kvbench.tasks.scores import bag_f1

# qa_f1_zh deletes these marks and ASCII punctuation, but neither U+300A nor the space.
_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DIGITS = re.compile(r"\d+")
_NO_ASCII_MARKS = str.maketrans("", "", string.punctuation)
_NO_MARKS = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)


def score(
    subset: Subset,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
    official: bool = False,
) -> float:
    """Best score of a prediction over its answers, 0 to 1, unrounded.

    all_classes: the labels of the row, for trec and lsht. official: ROUGE is 0 if the official code overflows Python's
    stack. Raises ValueError if an answer does not have the format of its subset, or if the labels are missing.
    """
    if subset.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if subset.metric == "classification":
        if not all_classes:
            raise ConfigError(
                "all_classes", all_classes, why=f"is not allowed, {subset.name} is scored by its list of classes"
            )
        return max(classification(prediction, answer, all_classes) for answer in answers)
    if official and subset.metric in _OFFICIAL_STEPS:
        steps = _OFFICIAL_STEPS[subset.metric]
        return max(METRICS[subset.metric](prediction, answer, steps) for answer in answers)
    return max(METRICS[subset.metric](prediction, answer) for answer in answers)


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the bags of words, without case, articles and ASCII punctuation (deleted, not replaced by a space)."""
    return bag_f1(plain(prediction).split(), plain(answer).split())


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 of the bags of jieba's words; case and punctuation are removed after segmentation."""
    return bag_f1(_words_zh(prediction), _words_zh(answer))


def character_f1(prediction: str, answer: str) -> float:
    """F1 of the bags of characters, without case, punctuation and white space: Chinese in InfiniteBench and SCBench."""
    return bag_f1(*(list("".join(text.lower().translate(_NO_MARKS).split())) for text in (prediction, answer)))


def rouge_zh(prediction: str, answer: str, most_steps: int | None = None) -> float:
    """ROUGE-L over jieba's words."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)), most_steps)


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 / (classes named in the prediction) if the answer is among them.

    Classes that are part of the answer's name do not count. The official code removes them from a list while it
    iterates over it, which skips the next class; this is kept.
    """
    named = [label for label in all_classes if label in prediction]
    place = 0
    while place < len(named):
        label = named[place]
        if label in answer and label != answer:
            named.remove(label)
        place += 1
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that equal the answer as text."""
    numbers = _DIGITS.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the one after "Paragraph" in the answer."""
    return count(prediction, _number_after("Paragraph ", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the one after 段落 in the answer."""
    return count(prediction, _number_after("段落", answer))


def code_sim(prediction: str, answer: str) -> float:
    """Similarity of the first line that is neither comment nor markup to the answer, in whole percent.

    difflib's ratio is not symmetric, and from 200 characters on it ignores frequent ones. The official code calls
    fuzzywuzzy, which gives other values if python-Levenshtein is installed; its requirements do not list that package.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: dict[str, Callable[..., float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "code_sim": code_sim,
    "rouge": rouge_l,
    "rouge_zh": rouge_zh,
}
"""Functions of a prediction and an answer; ROUGE also takes the maximum of steps, see `rouge_l`."""
_OFFICIAL_STEPS = {"rouge": OFFICIAL_STEPS, "rouge_zh": OFFICIAL_STEPS_ZH}


def plain(text: str) -> str:
    """Lower case, without ASCII punctuation, and with a space for each article."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_ASCII_MARKS))


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_NO_MARKS).split()) for word in _cut(text))
    return [word for word in words if word]


def _cut(text: str) -> list[str]:
    """jieba's words in its default mode."""
    with from_extra("longbench", "scoring Chinese"):
        import jieba  # here: loads a large dictionary

    jieba.setLogLevel(logging.WARNING)
    words: list[str] = jieba.lcut(text)
    return words


def _number_after(word: str, answer: str) -> str:
    found = re.search(rf"{word}(\d+)", answer)
    if found is None:
        raise ValueError(f"answer {answer!r} does not name a paragraph, such as {word + '3'!r}")
    return found[1]
