"""LooGLE's scores of one output. BERTScore and the judge GPT-4 are left out: each needs another model.

Sources: bigai-nlco/LooGLE at 6734382, Evaluation/automatic_metrics.py and automatic_eval.py; NVIDIA/kvpress at 8bb29b9,
evaluation/benchmarks/loogle/calculate_metrics.py. All words are cut at white space.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from random import Random
from statistics import fmean
from warnings import catch_warnings, simplefilter

from kvbench.tasks.longbench.rouge import rouge_recalls
from kvbench.tasks.task import is_blank

CLOZE = "shortdep_cloze"
TASKS = ("shortdep_qa", "longdep_qa", CLOZE, "longdep_summarization")
ORDERS = 16
Counts = tuple[int, int]
UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def metric(task: str) -> str:
    """The metric that is used as the score of a task."""
    return "exact_match" if task == CLOZE else "rouge-l"


def similarities(output: str, reference: str, protocol: str = "authors") -> dict[str, float]:
    """BLEU, recall of ROUGE, METEOR. The authors replace an empty output by "None"; full stops alone raise an error."""
    if protocol == "authors" and not output:
        output = "None"
    return {**bleu(output, reference), **_rouge(output, reference, protocol), **meteor(output, reference)}


def bleu(output: str, reference: str) -> dict[str, float]:
    """BLEU of single words, and of 4-grams only; without a common n-gram the value is close to 0."""
    from nltk.translate.bleu_score import sentence_bleu  # here: takes a second to import

    weights = {"bleu1": (1, 0, 0, 0), "bleu4": (0, 0, 0, 1)}
    with catch_warnings():
        simplefilter("ignore")  # nltk warns about texts without common 4-grams
        return {name: float(sentence_bleu([reference.split()], output.split(), each)) for name, each in weights.items()}


def meteor(output: str, reference: str) -> dict[str, float]:
    """METEOR of distinct words without WordNet's synonyms: the mean over `ORDERS` orders, and in the text's order.

    The official code converts the words to sets. Their order, and therefore the number of chunks, depends on
    PYTHONHASHSEED. Each random order ranks the words of both sides.
    """
    from nltk.translate.meteor_score import single_meteor_score  # here: see `bleu`

    sides = [list(dict.fromkeys(text.split())) for text in (reference, output)]
    draw, every = Random(0), sorted({word for side in sides for word in side})
    rankings = [draw.sample(every, len(every)) for _ in range(ORDERS)]
    orders = [[[word for word in ranking if word in set(side)] for side in sides] for ranking in rankings]
    mean, in_order = (
        fmean(single_meteor_score(*pair, wordnet=_NoSynonyms()) for pair in pairs) for pairs in (orders, [sides])
    )
    return {"meteor_no_synonyms": mean, "meteor_in_order": in_order}


def cloze(output: str, reference: str, protocol: str = "authors") -> dict[str, Counts | None]:
    """(hits, blanks) of exact_match, equal values, and partial_match, a word in common.

    An output that is not a dict counts as one blank of exact_match in kvpress, as all blanks in the authors' code. With
    a value that is not a text, partial_match is 0 in kvpress and None here, because the authors' code raises an error.
    """
    wanted = blanks(reference)
    filled = read_dict(output)
    if filled is None:
        return {"exact_match": (0, 1 if protocol == "kvpress" else len(wanted)), "partial_match": (0, len(wanted))}
    exact = sum(mask in filled and filled[mask] == value for mask, value in wanted.items())
    if all(isinstance(filled.get(mask, ""), str) for mask in wanted):
        return {"exact_match": (exact, len(wanted)), "partial_match": (_shared(filled, wanted), len(wanted))}
    return {"exact_match": (exact, len(wanted)), "partial_match": (0, len(wanted)) if protocol == "kvpress" else None}


def sound_cloze(output: str, reference: str) -> dict[str, Counts | None]:
    """`cloze` for the first {...} anywhere in an output, as JSON or Python; every blank counts."""
    wanted = blanks(reference)
    found = re.search(r"\{.*?\}", output, re.DOTALL)
    filled = {mask: str(value) for mask, value in ((read_dict(found[0]) if found else None) or {}).items()}
    exact = sum(filled.get(mask) == value for mask, value in wanted.items())
    return {"exact_match": (exact, len(wanted)), "partial_match": (_shared(filled, wanted), len(wanted))}


def blanks(reference: str) -> dict[str, str]:
    """The reference of a cloze: the text of each blank. ValueError if it has another format."""
    found = json.loads(reference)
    wanted: dict[str, str] = found if isinstance(found, dict) else {}
    values = list(wanted.values())
    if not values or not all(isinstance(value, str) and not is_blank(value) for value in values):
        raise ValueError(
            f"references must be a JSON object of texts for a cloze, none of them empty, got {reference!r:.60}"
        )
    return wanted


def read_dict(output: str) -> Mapping[object, object] | None:
    """The dict in an output, as a literal or a call of dict; None for anything else. No code is executed."""
    try:
        node = ast.parse(output.lstrip(" \t"), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
            return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        value = ast.literal_eval(node)
    except UNREADABLE:
        return None
    return value if isinstance(value, dict) else None


def _shared(filled: Mapping[object, object], wanted: Mapping[str, str]) -> int:
    """How many values have a word in common."""
    return sum(not set(value.split()).isdisjoint(str(filled.get(mask, "")).split()) for mask, value in wanted.items())


def _rouge(output: str, reference: str, protocol: str) -> dict[str, float]:
    found = rouge_recalls(output, reference)
    if found is None:
        if protocol == "authors":
            raise ValueError("Hypothesis is empty.")
        return dict.fromkeys(("rouge-1", "rouge-2", "rouge-l"), 0.0)
    return found


class _NoSynonyms:
    """A WordNet without words."""

    def synsets(self, _: str) -> list[object]:
        return []
