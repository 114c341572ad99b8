"""SCBench's scores of one answer, 0 to 1, and sound ones where its own take a text for a list of its characters.

Source: microsoft/MInference at fb56c91, scbench/compute_scores.py.
"""

from __future__ import annotations

from typing import Any

from kvbench.tasks.infinitebench import metrics as infinitebench
from kvbench.tasks.infinitebench.metrics import any_inside, best, listed
from kvbench.tasks.longbench.metrics import character_f1
from kvbench.tasks.scores import contains, rouge_lsum

MIXED = {
    "scbench_summary_with_needles": ("scbench_summary", "scbench_passkey"),
    "scbench_repoqa_and_kv": ("scbench_repoqa", "scbench_kv"),
}
"""Tasks whose turns are of two kinds, each with a score of its own."""
REPOQA = "scbench_repoqa"


def inside(output: str, references: Any) -> float:  # noqa: ANN401 - as the data has them
    """1 if the answer is part of the output as it is written."""
    return float(references in output)


def names(output: str, references: Any) -> float:  # noqa: ANN401
    """Share of the names in the output, in any case, to two decimals."""
    return round(contains(output, references), 2)


def number_cut(output: str, references: Any) -> float:  # noqa: ANN401
    """1 if the first number, without sign and cut to an integer where the answer is one, is the answer."""
    wanted = infinitebench.first(references)
    return infinitebench.first_number(_cut_first(output) if isinstance(wanted, int) else output, wanted)


def _cut_first(output: str) -> str:
    """The output with its first number cut to an integer."""
    found = infinitebench.NUMBER.search(output)
    return output if found is None else str(int(float(found[0])))


RULES: dict[str, infinitebench.Rule] = {
    "scbench_kv": inside,
    "scbench_prefix_suffix": inside,
    "scbench_vt": names,
    "scbench_qa_eng": any_inside,
    "scbench_qa_chn": best(character_f1),
    "scbench_choice_eng": infinitebench.choice_authors,
    "scbench_many_shot": any_inside,
    "scbench_mf": number_cut,
    "scbench_summary": lambda output, references: best(rouge_lsum)(output, listed(references)),
    "scbench_passkey": infinitebench.first_digits,
}
"""By task, RepoQA apart (`repoqa`)."""
SOUND: dict[str, infinitebench.Rule] = {
    "scbench_qa_eng": lambda output, references: any_inside(output, listed(references)),
    "scbench_qa_chn": lambda output, references: best(character_f1)(output, listed(references)),
    "scbench_choice_eng": infinitebench.SOUND["longbook_choice_eng"],
    "scbench_many_shot": lambda output, references: any_inside(output, listed(references)),
    "scbench_mf": infinitebench.same_number,
}
"""By task, where the official rule judges right answers wrong or wrong ones right."""
