"""The report: who is best, what is doubtful, what is shown of examples, and that nothing leaves its place."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plotted_runs import answered, described, sample, write_run

from kvbench.analysis.load import load_results
from kvbench.analysis.result import Result
from kvbench.analysis.statistics import paired_difference
from kvbench.page import charts, examples, tables
from kvbench.page.caveats import Caveat, caveats, unfinished
from kvbench.page.command import main
from kvbench.page.differences import ADDED, MISSING, pieces
from kvbench.page.ranking import standings
from kvbench.page.render import page, script_json
from kvbench.page.rows import budget_words, in_order
from kvbench.records.kept_heads import counts, kept_heads
from kvbench.records.sample import Sample
from kvbench.report.figures.panels import looks

HOSTILE = '</script><script>window.broken = 1</script><img src="http://evil.test/x.png" onerror="window.broken = 1">'


def right(many: int, of: int = 20, **metadata: Any) -> list[Sample]:
    """The first `many` of `of` examples right."""
    return [answered(i, float(i < many), "x" if i < many else "y", **metadata) for i in range(of)]


def runs(folder: Path, *rights: tuple[str, int]) -> None:
    """Runs of policies at 64 tokens with so many of 20 examples right."""
    for policy, many in rights:
        write_run(folder, policy, right(many), None if policy == "full" else 64)


def rows_of(folder: Path) -> list[Result]:
    return in_order(load_results(folder))


def read(folder: Path) -> dict[str, Result]:
    """The runs below a folder by policy and budget."""
    return {f"{row.name} {budget_words(row.budget)}": row for row in rows_of(folder)}


def titles(folder: Path) -> list[str]:
    return [caveat.title for caveat in said(folder)]


def said(folder: Path) -> list[Caveat]:
    rows = rows_of(folder)
    return caveats(rows, standings(rows), unfinished(folder))


# --- ranking ------------------------------------------------------------------------------------------------------
def test_the_best_and_what_20_examples_cannot_tell_from_it(tmp_path: Path) -> None:
    """Against 20 right: 19 right lose one example (McNemar p = 1), none right all 20 (p = 2^-19, twice by Holm)."""
    runs(tmp_path, ("full", 20), ("h2o", 20), ("tova", 19), ("roco", 0))
    rows = read(tmp_path)
    found = standings(list(rows.values()))
    places = {name: found[entry].place for name, entry in rows.items()}
    assert places == {"full –": "", "h2o 64": "best", "tova 64": "tied", "roco 64": "worse"}
    assert found[rows["tova 64"]].p == 1.0
    assert found[rows["roco 64"]].p == pytest.approx(2 * 2.0**-19)
    assert found[rows["roco 64"]].difference.mean == -1.0  # type: ignore[union-attr]


def test_what_grows_and_what_evicts_while_decoding_are_ranked_apart(tmp_path: Path) -> None:
    """Both compress the whole prompt to 64: snapkv and pyramidkv grow afterwards, h2o and tova do not."""
    runs(tmp_path, ("full", 20), ("snapkv", 20), ("pyramidkv", 0), ("h2o", 10), ("tova", 9))
    rows = read(tmp_path)
    found = standings(list(rows.values()))
    places = {name: found[entry].place for name, entry in rows.items()}
    assert places == {"full –": "", "snapkv 64": "best", "pyramidkv 64": "worse", "h2o 64": "best", "tova 64": "tied"}
    assert found[rows["tova 64"]].difference.mean == -0.05  # type: ignore[union-attr]
    assert all(entry.vs_full for name, entry in rows.items() if name != "full –"), "full is everyone's reference"
    (wide,) = [caveat for caveat in said(tmp_path) if caveat.title.startswith("Intervals too wide")]
    assert wide.where[0].startswith("niah, pocket, budget 64, whole prompt, evict: 1 of 1 others cannot be told")


def test_what_compresses_the_context_alone_is_ranked_apart_and_said_to_be_mixed(tmp_path: Path) -> None:
    write_run(tmp_path, "h2o", right(20))
    write_run(tmp_path, "tova", right(0), compress="context")
    rows = read(tmp_path)
    assert {entry.name: entry.moments[0] for entry in rows.values()} == {"h2o": "whole prompt", "tova": "whole context"}
    assert {s.place for s in standings(list(rows.values())).values()} == {""}
    assert "Prompts and contexts mixed in one comparison" in titles(tmp_path)


def test_rows_stand_by_score_with_their_difference_from_full_and_their_folder(tmp_path: Path) -> None:
    write_run(tmp_path, "full", right(20), None)
    worst = write_run(tmp_path / "more", "h2o", right(10), 64)
    write_run(tmp_path, "tova", right(15), 128)
    write_run(tmp_path, "roco", [*right(19, of=19), sample(19, None)], 32)  # failed: no score
    rows = tables.ranking(known := rows_of(tmp_path), standings(known))
    assert [f"{row.name} {budget_words(row.budget)}" for row in rows] == [
        "full –",
        "tova 128",
        "h2o 64",
        "roco 32",
    ]
    lost = paired_difference([1.0] * 20, [1.0] * 10 + [0.0] * 10)
    assert rows[2].vs_full == lost
    assert lost.claims
    text = page(load_results(tmp_path), tmp_path)
    assert f"<code>more/{worst.name}</code>" in text
    assert f'-0.500 <small class="between">{lost.low:+.2f} to {lost.high:+.2f}</small>' in text


# --- warnings ----------------------------------------------------------------------------------------------------
def test_runs_that_share_examples_and_schedule_and_are_told_apart_raise_no_doubt(tmp_path: Path) -> None:
    runs(tmp_path, ("full", 20), ("h2o", 20), ("tova", 0))
    assert titles(tmp_path) == []
    assert "Nothing to warn of" in page(load_results(tmp_path), tmp_path)


def test_the_worst_comes_first_and_names_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "full", right(20), None)
    write_run(tmp_path, "h2o", [*right(3, of=3), sample(3, None)])
    write_run(tmp_path, "snapkv", right(20, of=21))
    write_run(tmp_path, "caote_snapkv", right(20), environment={"kvbench_revision": "dead"})
    begun = write_run(tmp_path, "tova", right(20))
    (begun / "metrics.json").unlink()
    found = said(tmp_path)
    assert [caveat.title for caveat in found] == [
        "1 run broke their budget",
        "1 run not finished",
        "Schedules and rules of decoding mixed in one comparison",
        "Not the same examples for all",
        "Computed by several revisions of kvbench",
    ]
    assert found[0].where == (
        "h2o at 64 on niah (pocket): 1 of 4 examples; example 3: BudgetError: one token too many",
    )
    assert found[1].where == (begun.name,)
    assert found[3].where == ("niah (pocket): 4 to 21 examples",)


def test_a_budget_that_evicts_nothing_and_unequal_memory_and_machines_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, "h2o", [replace(s, evicted=0.0) for s in right(20)])
    other = {"hardware": {"device_name": "A GPU", "processor": "p", "torch_threads": 1, "platform": "Linux"}}
    write_run(tmp_path, "tova", [replace(s, cache_bytes=2**21) for s in right(0)], environment=other)
    found = {caveat.title: caveat.where for caveat in said(tmp_path)}
    assert found["Nothing was evicted"] == ("h2o at 64 on niah (pocket)",)
    assert found["The same budget is not the same memory"] == (
        "niah (pocket) at 64, whole prompt, evict: tova holds 2.00x the bytes of h2o",
    )
    assert found["Several machines or numbers of threads"] == ("a processor, 1 thread: 1 run", "A GPU: 1 run")
    assert found["The full cache was not run"] == ("niah (pocket)",)


@given(st.text(alphabet="ab \n<_é4"), st.text(alphabet="ab \n<_é4"))
def test_pieces_put_together_are_both_answers(own: str, other: str) -> None:
    found = pieces(own, other)
    assert "".join(words for words, kind in found if kind != MISSING) == own
    assert "".join(words for words, kind in found if kind != ADDED) == other


def test_an_answer_to_another_prompt_is_not_shown_beside(tmp_path: Path) -> None:
    write_run(tmp_path, "full", right(2, of=2), None)
    write_run(tmp_path, "h2o", [answered(0, 1.0, prompt="f" * 64), answered(1, 1.0)])
    (group,) = examples.browser(rows_of(tmp_path)).groups
    assert [[answer is not None for answer in example["answers"]] for example in group["examples"]] == [
        [True, False],
        [True, True],
    ]


# --- which tokens are kept -----------------------------------------------------------------------------------------
@given(st.lists(st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=3), min_size=1, max_size=3))
def test_pairs_say_of_every_token_how_many_heads_keep_it(layers: list[list[set[int]]]) -> None:
    wide = max(len(head) for layer in layers for head in layer)
    padded = [torch.tensor([[*head, *[-1] * (wide - len(head))] for head in layer]) for layer in layers]
    pairs = kept_heads(padded, 30)
    assert counts(pairs) == [sum(token in head for layer in layers for head in layer) for token in range(30)]
    assert all(first != second for (first, _), (second, _) in pairwise(pairs))


def test_a_strip_has_a_level_for_every_part_of_the_prompt(tmp_path: Path) -> None:
    """1,000 tokens in 240 parts: the first 500 in all of four heads, the rest in none but the last token, in one."""
    kept = [[4, 500], [0, 499], [1, 1]]
    write_run(tmp_path, "h2o", [replace(answered(0, 1.0), kept_heads=kept)])
    (group,) = examples.browser(rows_of(tmp_path)).groups
    assert group["examples"][0]["answers"][0]["strip"] == "z" * 120 + "0" * 119 + "9"


# --- tables and figures --------------------------------------------------------------------------------------------
def test_a_chart_has_scores_intervals_and_the_full_cache_where_they_are(tmp_path: Path) -> None:
    write_run(tmp_path, "full", right(20), None)
    for budget, many in ((64, 10), (128, 20)):
        write_run(tmp_path, "h2o", right(many), budget)
    rows = rows_of(tmp_path)
    by_budget, by_bytes = charts.cards(rows, looks(rows))
    line = by_budget.spec["data"][0]
    assert (line["name"], line["x"], line["y"]) == ("h2o", [0, 1], [0.5, 1.0])
    assert by_budget.spec["layout"]["xaxis"]["ticktext"] == ["64", "128"]
    assert line["error_y"]["arrayminus"] == pytest.approx([0.2007, 0.1611], abs=1e-4)  # Wilson, 10 and 20 of 20
    assert by_budget.spec["data"][-1]["y"] == [1.0] * 9
    assert by_bytes.spec["data"][0]["x"] == [1024, 1024]  # KiB, both hold 2^20 bytes


def test_names_in_a_hover_are_no_markup(tmp_path: Path) -> None:
    write_run(tmp_path, "h2o", right(20))
    (entry,) = rows_of(tmp_path)
    assert charts.hover(replace(entry, line="a<b>")).startswith("<b>a&lt;b&gt;</b><br>score 1.000 (0.839 to 1.000)")


# --- the page ------------------------------------------------------------------------------------------------------
def test_what_a_model_wrote_cannot_leave_its_place(tmp_path: Path) -> None:
    write_run(tmp_path, "h2o", [answered(0, 0.0, HOSTILE)])
    text = page(load_results(tmp_path), tmp_path)
    assert "<script>window.broken" not in text
    assert "<img" not in text.replace(text[: text.index("<body>")], "").split('id="datatables"')[0]
    (group,) = examples.browser(rows_of(tmp_path)).groups
    assert json.loads(script_json(group)) == group  # and nothing of it is lost


def test_recurrent_states_have_a_column_where_a_model_has_some(tmp_path: Path) -> None:
    for folder, state in ((tmp_path / "plain", None), (tmp_path / "hybrid", 2**19)):
        write_run(folder, "h2o", [replace(one, state_bytes=state) for one in right(2, of=2)])
        text = page(load_results(folder), folder)
        table = text[text.index('<table class="sortable"') : text.index("</table>")]
        assert (">states</th>" in table) == ('data-order="524288.0">512 KiB</td>' in table) == (state is not None)
    (entry,) = rows_of(tmp_path / "hybrid")
    assert "1024 KiB held, 6.1% of full, 512 of it recurrent states<br>" in charts.hover(entry)


def test_the_page_loads_nothing_and_tells_the_browser_so(tmp_path: Path) -> None:
    write_run(tmp_path, "h2o", right(2, of=2))
    text = page(load_results(tmp_path), tmp_path)
    own = text[text.index("<body>") : text.index('<script type="text/plain" id="plotly">')]
    assert "http" not in own
    assert "Content-Security-Policy\" content=\"default-src 'none';" in text


def test_numbers_stand_beside_the_print_that_they_are_about(tmp_path: Path) -> None:
    """CAOTE's table 2 prints 38.34 for Qasper; ten of twenty right are 50.00."""
    blocks = {"class": "kvbench.policies.schedule.Blocks", "size": 128, "decode": "evict"}
    parts = {**described("H2O", "Caote"), "schedule": blocks}
    folder = write_run(tmp_path, "caote_h2o", right(10), 2048, task="longbench_qasper", parts=parts)
    config = (folder / "config.yaml").read_text().replace("model: pocket", "model: llama31_8b_instruct")
    (folder / "config.yaml").write_text(
        config.replace("decoding: greedy", "decoding: greedy\n    max_prompt_tokens: null")
    )
    text = page(load_results(tmp_path), tmp_path)
    shown = text[text.index('id="published"') : text.index('id="examples"')]
    row = [re.sub("<.*?>", "", cell) for cell in shown[shown.index("Qasper") :].splitlines()[1:6]]
    assert [cell.strip() for cell in row] == ["38.34", "50.00", "29.93 to 70.07", "+11.66", "20"]
    assert shown.count("<td>50.00</td>") == 1  # rows without a number of ours are left out
    assert "python -m" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "kvbench: nowhere is not a folder\n"),
        ([".", "-o", "r.pdf"], "kvbench: -o r.pdf must end in .html\n"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == sentence
