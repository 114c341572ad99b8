"""The report: groups, marks and caveats, what is shown of examples, and the page in a browser without a network."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plotted_runs import answered, sample, write_run

from kvbench.cli import main as run
from kvbench.report.html.caveats import caveats
from kvbench.report.html.examples import LEVELS, examples
from kvbench.report.html.prompts import prompts_of
from kvbench.report.html.report import html_report, write_report
from kvbench.report.html.tables import groups, in_order, marks, matrices
from kvbench.results.columns import frame
from kvbench.results.kept import counts, kept_heads
from kvbench.results.loading import load_results
from kvbench.results.samples import Sample, read_samples

HOSTILE = '</script><script>window.broken = 1</script><img src="http://evil.test/x.png" onerror="window.broken = 1">'
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SMALL = ("task.lengths=[600]", "task.depths=[0.0,0.5]", "task.repeats=1", "task.max_new_tokens=4")


def right(many: int, of: int = 20, **metadata: Any) -> list[Sample]:
    """The first `many` of `of` examples right."""
    return [answered(i, float(i < many), "x" if i < many else "y", **metadata) for i in range(of)]


def runs(folder: Path, *rights: tuple[str, int], of: int = 20) -> None:
    """Runs of policies at 64 tokens with so many examples right."""
    for policy, many in rights:
        write_run(folder, policy, right(many, of), None if policy == "full" else 64)


def marked(folder: Path) -> dict[str, dict[str, str]]:
    """The marks of every group: by its title, then by policy."""
    found = groups(in_order(load_results(folder)))
    return {group.title: {row.name: marks(group).get(row, "") for row in group.rows} for group in found}


def test_a_page_and_the_table_read_no_samples_of_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has every run; figures, changes and examples are those of the first runs, and the page says so."""
    runs(tmp_path, ("full", 20), ("roco", 0), ("tova", 19), ("h2o", 20))
    read: list[Path] = []
    monkeypatch.setattr("kvbench.results.summary.read_samples", lambda path: read.append(path) or read_samples(path))
    monkeypatch.setattr("kvbench.report.html.report.DETAILED", 2)
    rows = load_results(tmp_path)
    assert len(frame(rows)) == 4
    assert read == []
    page = html_report(rows, tmp_path)
    assert page.count("<tr title=") == 4
    assert "Figures, changes and examples leave out 2 policies: roco, tova." in page
    assert sorted(read) == sorted(row.folder / "samples.jsonl" for row in in_order(rows)[:2])  # each once


# --- groups and marks ----------------------------------------------------------------------------------------------
def test_groups_are_ranked_and_ties_with_the_best_are_marked(tmp_path: Path) -> None:
    """Against 20 right: 19 right lose one example (McNemar p = 1), none right all 20 (2^-19, three times by Holm)."""
    runs(tmp_path, ("full", 20), ("roco", 0), ("tova", 19), ("h2o", 20), ("snapkv", 20), ("pyramidkv", 20))
    runs(tmp_path, ("cake", 20))
    assert marked(tmp_path) == {
        "niah, nothing evicted": {"full": "reference"},
        "niah, budget 64, whole prompt, evict": {"h2o": "best", "cake": "best", "tova": "≈ best", "roco": ""},
        "niah, budget 64, whole prompt, grow": {"snapkv": "best", "pyramidkv": "best"},
    }
    assert [list(own) for own in marked(tmp_path).values()][1] == ["cake", "h2o", "tova", "roco"]


def test_policies_by_tasks_has_the_mean_where_no_task_is_missing(tmp_path: Path) -> None:
    for task, many in (("niah", 20), ("vt", 10)):
        write_run(tmp_path, "h2o", right(many), task=task)
    write_run(tmp_path, "tova", right(5), task="vt")
    (matrix,) = matrices(load_results(tmp_path))
    assert matrix.tasks == ("niah", "vt")
    cells = {row.line: ([cell and cell.value for cell in cells], mean) for row, cells, mean in matrix.rows}
    assert cells == {"h2o": ([1.0, 0.5], 0.75), "tova": ([None, 0.25], None)}
    parts = [replace(one, metadata={"task": ("cwe", "qa")[i % 2]}) for i, one in enumerate(right(1))]
    write_run(tmp_path / "suite", "h2o", parts, task="ruler")
    (suite,) = matrices(load_results(tmp_path / "suite"))
    assert (suite.tasks, [cell.value for cell in suite.rows[0][1] if cell]) == (("ruler: cwe", "ruler: qa"), [0.1, 0.0])


def test_runs_of_two_dtypes_are_two_models_in_titles_and_no_label_of_a_policy_has_the_dtype(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        write_run(tmp_path / "one", "h2o", right(20), dtype=dtype)
        write_run(tmp_path / "two", "h2o", right(20), dtype=dtype, model=dtype)
    assert marked(tmp_path / "one") == {
        f"pocket(dtype={dtype}), niah, budget 64, whole prompt, evict": {"h2o": ""} for dtype in ("bfloat16", "float32")
    }
    assert marked(tmp_path / "two") == {
        f"{dtype}, niah, budget 64, whole prompt, evict": {"h2o": ""} for dtype in ("bfloat16", "float32")
    }


# --- caveats -------------------------------------------------------------------------------------------------------
def test_caveats_name_the_runs_they_are_about(tmp_path: Path) -> None:
    runs(tmp_path / "fine", ("full", 20), ("h2o", 20), ("tova", 0))
    fine = in_order(load_results(tmp_path / "fine"))
    assert caveats(fine, groups(fine)) == []
    write_run(tmp_path, "h2o", [*right(3, of=3), sample(3, None)])
    write_run(tmp_path, "snapkv", right(20, of=21), environment={"kvbench_revision": "dead"})
    write_run(tmp_path, "tova", [replace(one, cache_bytes=2**21, evicted=0.0) for one in right(20)])
    begun = write_run(tmp_path, "roco", right(20))
    (begun / "metrics.json").unlink()
    shutil.rmtree(tmp_path / "fine")
    rows = in_order(load_results(tmp_path))
    found = {caveat.title: caveat.where for caveat in caveats(rows, groups(rows))}
    failed = "h2o at 64 on niah (pocket): 1 of 4 examples failed; example 3: BudgetError: one token too many"
    assert found["Failed examples"] == (failed,)
    assert found["Unfinished runs"] == ("roco [unfinished, n=20] at 64 on niah (pocket): 20 examples",)
    assert found["Different schedules or decoding rules"] == (
        "whole prompt, evict: 3 runs",
        "whole prompt, grow: 1 run",
    )
    assert found["Different examples"] == ("niah (pocket): 4 to 21 examples",)
    assert found["Fewer than 5 examples"] == ("h2o at 64 on niah (pocket)",)
    assert found["Nothing was evicted"] == ("tova at 64 on niah (pocket)",)
    assert found["The same budget is not the same memory"] == (
        "niah, budget 64, whole prompt, evict: tova holds 2.00x the bytes of roco [unfinished, n=20]",
    )
    assert found["The full cache was not run"] == ("niah (pocket)",)
    assert len(found["Several revisions or machines"]) == 2


# --- examples ------------------------------------------------------------------------------------------------------
@given(st.lists(st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=3), min_size=1, max_size=3))
def test_pairs_say_of_every_token_how_many_heads_keep_it(layers: list[list[set[int]]]) -> None:
    wide = max(len(head) for layer in layers for head in layer)
    padded = [torch.tensor([[*head, *[-1] * (wide - len(head))] for head in layer]) for layer in layers]
    pairs = kept_heads(padded, 30)
    assert counts(pairs) == [sum(token in head for layer in layers for head in layer) for token in range(30)]
    assert all(first != second for (first, _), (second, _) in pairwise(pairs))


def test_an_answer_to_another_prompt_is_not_shown_and_left_out_examples_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, "full", right(30, of=30), None)
    write_run(tmp_path, "h2o", [answered(0, 1.0, prompt="f" * 64), answered(1, 1.0)])
    (task,) = examples(in_order(load_results(tmp_path)))
    assert [[answer.row.policy for answer in one.answers] for one in task.shown[:3]] == [
        ["full"],
        ["full", "h2o"],
        ["full"],
    ]
    assert task.notes[0] == "The first 25 of 30 examples; samples.jsonl has all."
    assert task.notes[1].startswith("Prompts are not shown")


# --- the page ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Real runs of two policies, and made-up ones with a hostile answer."""
    out = tmp_path_factory.mktemp("page") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        policies = ("-m", f"model={tiny_model}", "policy=full,snapkv", "budget=64,128")
        assert run([*policies, "task=niah", f"out={out}", *SMALL]) == 0
    write_run(out, "full", [answered(i, 1.0, "fine") for i in range(6)], None, task="hostile")
    write_run(out, "h2o", [answered(i, 0.0, HOSTILE) for i in range(6)], task="hostile")
    return out


def test_prompts_are_made_again_and_kept_tokens_are_marked(folder: Path) -> None:
    real = next(one for one in load_results(folder) if one.policy.startswith("snapkv"))
    shown = prompts_of(real, 2).shown
    assert list(shown) == [one.prompt_hash for one in real.samples]
    for one, passages in zip(real.samples, shown.values(), strict=True):
        text = "".join(token for passage in passages for token in passage.tokens)
        assert text.startswith("<s>Read this text and remember what it says.")
        assert one.references[0] in text  # wherever it stands in the prompt
        place = 0
        for passage in passages:
            place += passage.skipped
            assert passage.start == place
            place += len(passage.tokens)
        assert place == one.prompt_tokens
    half = [[len(layer) for layer in real.samples[0].kept_tokens or []]]
    heads, length = sum(half[0]), real.samples[0].prompt_tokens
    kept = replace(real.samples[0], kept_heads=[[heads, 3], [0, length - 4], [1, 1]])
    (task,) = examples([replace(real, samples=(kept,))])
    spans = task.shown[0].answers[0].spans
    assert [level for level, _ in spans[0]] == [LEVELS, 0]
    assert spans[0][0][1] == "".join(next(iter(shown.values()))[0].tokens[:3])
    assert spans[-1][-1][0] == 1  # kept by one head: marked, though weakly


def test_numbers_of_the_page_are_those_of_the_results_and_answers_are_text(folder: Path) -> None:
    text = html_report(load_results(folder), folder)
    results = text[text.index('id="results"') : text.index('id="figures"')]
    assert '<td class="cell" data-order="0.0">0.000 <small>(0.00-0.39)</small></td>' in results  # Wilson, 0 of 6
    assert re.search(r"claims\" data-order=\"-1.0\">-1.000\*? ?<small>\(-1\.00\.\.-0\.\d\d\)", results)
    assert "<script>window.broken" not in text
    assert text.count('src="data:image/svg+xml;base64,') == 2 * 4  # budget, bytes, needles, evidence
    own = text[text.index("<body>") : text.index('id="datatables"')]
    assert "http" not in own.replace("http://evil.test", "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to open")
    with sync_api.sync_playwright() as play:
        known = [path for path in (*map(shutil.which, BROWSERS), play.chromium.executable_path) if path]
        path = next((path for path in known if Path(path).exists()), None)
        if path is None:
            pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}, and playwright has downloaded none")
        opened = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-background-networking"])
        yield opened
        opened.close()


@pytest.mark.slow("opens a browser")
def test_in_a_browser_groups_stand_together_all_columns_fit_and_nothing_is_loaded(browser: Any, folder: Path) -> None:
    write_report(load_results(folder), folder, folder.parent / "report.html")
    view = browser.new_page(viewport={"width": 1400, "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    view.on("console", lambda message: complaints.append(message.text))
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    view.goto((folder.parent / "report.html").as_uri())
    view.wait_for_selector("html[data-ready]", timeout=60_000)
    rows = view.locator("#results tbody tr:not(.dtrg-group)")
    assert rows.count() == 5  # full, snapkv at two budgets, and two of the other task
    table = view.locator("#results .wide").first
    assert table.evaluate("node => node.scrollWidth <= node.clientWidth"), "no column is hidden at 1,400 pixels"
    first = view.locator("#results tr.dtrg-group").all_inner_texts()
    view.click("#results thead th:has-text('score')")
    view.wait_for_selector("#results thead th[aria-sort]:has-text('score')")
    assert view.locator("#results tr.dtrg-group").all_inner_texts() == first, "sorted within groups"
    example = view.locator("#examples details.example", has=view.locator("td", has_text="window.broken")).first
    example.locator("summary").first.click()
    assert HOSTILE in example.inner_text()
    assert example.locator("img, script").count() == 0
    assert view.evaluate("window.broken") is None
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
    view.set_viewport_size({"width": 500, "height": 900})
    assert view.evaluate("document.documentElement.scrollWidth") == 500  # tables scroll within themselves
    cell = view.locator("#results td.cell").first.bounding_box()
    assert cell["x"] + cell["width"] <= 500, "the score is visible at 500 pixels"
    view.close()
