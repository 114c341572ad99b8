"""Answers that end in a loop: worked examples, the recorded cases, a brute-force oracle, columns, and a real run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from plotted_runs import sample, write_run
from task_data import GOLDEN

from kvbench.report.table import results_table
from kvbench.report.text_table import text
from kvbench.results.changes import changes
from kvbench.results.columns import frame
from kvbench.results.loading import load_results
from kvbench.results.metrics import metrics
from kvbench.results.repetition import Repetition, repetition
from kvbench.results.samples import Sample, SampleFile, read_samples
from kvbench.results.summary import outcomes_of

LOOP, TEXT = repetition([7] * 30), repetition(range(30))


def answers(found: list[Repetition | None], limit: int = 300, tokens: int = 300) -> list[Sample]:
    reason = "length" if tokens >= limit else "stop"
    fields = {"generated_tokens": tokens, "decode_steps": tokens, "max_new_tokens": limit, "finish_reason": reason}
    return [replace(sample(i, 0.5), repetition=one, **fields) for i, one in enumerate(found)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], Repetition(None)),
        ([1] * 3, Repetition(None)),
        ([1] * 23, Repetition(1 - 1 / 20)),  # a loop has 24 tokens
        ([1] * 24, Repetition(1 - 1 / 21, 1, 24, 0)),
        ([9, 8, *[1, 2, 3] * 8, 1], Repetition(1 - 5 / 24, 3, 8, 2)),  # 25 tokens of period 3
        ([*[1, 2, 3] * 8, 9], Repetition(1 - 4 / 22)),  # the loop ended
        ([*range(13)] * 2, Repetition(1 - 13 / 23)),  # 2 copies are too few
        ([*range(64)] * 3, Repetition(1 - 64 / 189, 64, 3, 0)),
        ([*range(65)] * 3, Repetition(1 - 65 / 192)),  # too long a period
    ],
)
def test_worked_examples(tokens: list[int], expected: Repetition) -> None:
    found = repetition(tokens)
    assert (found.period, found.copies, found.start) == (expected.period, expected.copies, expected.start)
    assert found.rep_4 == pytest.approx(expected.rep_4)


def test_the_recorded_cases() -> None:
    path = GOLDEN / "additions3" / "repetition.jsonl"
    if not path.is_file():
        pytest.skip(f"the recorded cases are not at {path}")
    for case in map(json.loads, path.read_text().splitlines()):
        found = repetition(re.findall(r"\w+|[^\w\s]", case["text"]))
        loop = None if case["loop"] is None else {key: case["loop"][key] for key in ("period", "copies", "start")}
        own = {"period": found.period, "copies": found.copies, "start": found.start} if found.looping else None
        assert (own, found.looping) == (loop, case["looping"]), case["case"]
        assert found.rep_4 == pytest.approx(case["rep_4"], abs=1e-8), case["case"]


def test_a_loop_is_the_shortest_period_of_the_end() -> None:
    """Against the definition, on random texts of few words that often loop."""
    random = Random(0)
    for _ in range(300):
        unit = [random.randrange(3) for _ in range(random.randint(1, 9))]
        tokens = [*(random.randrange(3) for _ in range(random.randint(0, 9))), *unit * random.randint(1, 9)]
        n, loops = len(tokens), []
        for p in range(1, min(64, n // 3) + 1):
            run = max(r for r in range(p, n + 1) if all(tokens[i] == tokens[i + p] for i in range(n - r, n - p)))
            loops += [(p, run // p, n - run)] if run >= max(3 * p, 24) else []
        found = repetition(tokens)
        assert (found.period, found.copies, found.start) == (loops[0] if loops else (None, None, None))


def test_samples_keep_it_and_older_ones_do_not_have_it(tmp_path: Path) -> None:
    written = answers([LOOP, TEXT, None])
    file = SampleFile(tmp_path / "samples.jsonl")
    for one in written:
        file.append(one)
    file.close()
    assert read_samples(file.path) == written
    assert "repetition" not in file.path.read_text().splitlines()[2]
    assert metrics(answers([None] * 5))["looping_share"] is None


def test_numbers_of_a_run_and_against_full() -> None:
    mixed, healthy = answers([LOOP, repetition([*range(4), *[7] * 30]), TEXT, TEXT, TEXT]), answers([TEXT] * 5)
    found = metrics(mixed)
    assert (found["looping_share"], found["looping_cut_share"], found["loop_start"]) == (0.4, 0.4, 2)
    assert 0 < found["looping_share_low"] < 0.4 < found["looping_share_high"] < 1
    assert metrics(answers([LOOP] * 5, tokens=40))["looping_cut_share"] == 0, "a loop that was ended by a stop token"
    assert metrics(healthy)["loop_start"] is None
    compared = changes(outcomes_of(healthy), outcomes_of(mixed))
    assert (compared.looping.mean, compared.looping.method) == (0.4, "tango")
    assert compared.rep_4.mean == pytest.approx(found["rep_4"])


def test_tables_have_it_beside_the_answers_that_were_cut_off(tmp_path: Path) -> None:
    write_run(tmp_path, "full", answers([TEXT] * 5))
    write_run(tmp_path, "tova", answers([LOOP, LOOP, TEXT, TEXT, TEXT]))
    rows = load_results(tmp_path)
    shown = results_table(rows).frame
    place = list(shown).index("looping")
    assert list(shown)[place - 1] == "cut off"
    assert [*shown["looping"]] == ["0.0%", "40.0%"]
    assert "looping: answers that end in a loop" in text(results_table(rows))
    tidy = frame(rows).set_index("policy").loc["tova"]
    assert (tidy["looping_share"], tidy["looping_vs_full"], tidy["looping_cut_share"]) == (0.4, 0.4, 0.4)
