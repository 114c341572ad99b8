"""The official scores of recorded predictions on LooGLE."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.tasks.loogle.metrics import CLOZE, TASKS, Counts, blanks, cloze, metric, similarities, sound_cloze
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import RAISED, Line, nested, one_of, raised, text, texts

FIELDS = "task, prediction and references (one text, for clozes a JSON object); or for clozes lists of both"


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score`, of QA and summaries the recall of ROUGE-L, of clozes the share of exact matches, and all `scores`.

    Clozes have score_sound and scores_sound beside them, which find the object in the output's other text. Of a list of
    clozes the scores are sums of hits over sums of blanks, 4 decimals. Raises ValueError, naming the field, where the
    line is of another form.
    """
    task = one_of(line, "task", TASKS)
    if not isinstance(line.get("prediction"), list):
        pairs = [(text(line, "prediction"), texts(line, "references")[0])]
    elif task == CLOZE:
        outputs = texts(line, "prediction")
        wanted = nested(line, "references", len(outputs))
        pairs = [(output, answers[0]) for output, answers in zip(outputs, wanted, strict=True)]
    else:
        raise ValueError(f"prediction must be a text for {task}, only lists of {CLOZE} have a score of their own")
    if task == CLOZE:
        return _cloze(pairs, protocol, single=not isinstance(line["prediction"], list))
    try:
        found = similarities(*pairs[0], protocol)
    except RAISED as error:
        return {"score": None, "error": raised(error)}
    return {"score": found[metric(task)], "scores": found}


def _cloze(pairs: Sequence[tuple[str, str]], protocol: str, single: bool) -> Line:
    for _, reference in pairs:
        blanks(reference)
    counts = [cloze(*pair, protocol) for pair in pairs]
    shares, sound = _shares(counts, single), _shares([sound_cloze(*pair) for pair in pairs], single)
    found: Line = {"score": shares["exact_match"], "scores": counts[0] if single else shares}
    found |= {"score_sound": sound["exact_match"], "scores_sound": sound}
    if shares["partial_match"] is None:
        found["error"] = raised(AttributeError("a value of the output is no text, so partial_match has no value"))
    return found


def _shares(counts: Sequence[dict[str, Counts | None]], single: bool) -> dict[str, float | None]:
    """Hits over blanks of each metric, of a file to 4 decimals; None for what an output has no count of."""
    found: dict[str, float | None] = {}
    for name in counts[0]:
        pairs = [pair for one in counts if (pair := one[name]) is not None]
        share = sum(hits for hits, _ in pairs) / sum(asked for _, asked in pairs) if pairs else 0.0
        found[name] = None if len(pairs) < len(counts) else share if single else round(share, 4)
    return found
