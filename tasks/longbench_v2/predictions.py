"""The official scores of recorded predictions on LongBench v2."""

from __future__ import annotations

from statistics import fmean

from kvbench.tasks.longbench_v2.summary import RULES, by_group
from kvbench.tasks.predictions import JUDGES as JUDGES
from kvbench.tasks.predictions import Line, nested, text, texts, wanted_texts

FIELDS = "prediction and references (the letter); or lists of predictions, references of each, difficulty and length"


def score_predictions(line: Line, protocol: str = "authors") -> Line:
    """`score` from 0 to 1. For lists: the mean, and `scores` by difficulty and length (in percent; kvpress: 0 to 1).

    The authors leave empty outputs out of every mean. Raises ValueError, naming the field, if the line has another
    format.
    """
    rule = RULES[protocol]
    if not isinstance(line.get("prediction"), list):
        return {"score": rule(text(line, "prediction"), tuple(wanted_texts(line, "references")))}
    predictions = texts(line, "prediction")
    columns = nested(line, "references", len(predictions)), texts(line, "difficulty"), texts(line, "length")
    if {len(column) for column in columns} != {len(predictions)}:
        raise ValueError(f"difficulty and length must have an entry for each of the {len(predictions)} predictions")
    rows = list(zip(predictions, *columns, strict=True))
    if protocol == "authors":
        rows = [row for row in rows if row[0]]
    if not rows:
        return {"score": None, "error": "every output is empty, and the authors' mean leaves those out"}
    scores = [rule(output, tuple(wanted)) for output, wanted, *_ in rows]
    means = by_group(scores, [row[2] for row in rows], [row[3] for row in rows])
    if protocol == "authors":
        means = {name: round(100 * mean, 1) for name, mean in means.items()}
    else:
        means["average"] = means.pop("overall")
    return {"score": fmean(scores), "scores": means}
