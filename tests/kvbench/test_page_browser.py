"""The report as a reader has it: real runs of a tiny model, opened in a browser without a network."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import answered, reported_run

from kvbench.cli import main as run
from kvbench.page.command import write
from kvbench.page.prompts import prompts_of
from kvbench.report.records import RunRecord, find_runs

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SMALL = ("task.lengths=[600]", "task.depths=[0.0,0.5]", "task.repeats=1", "task.max_new_tokens=4")
HOSTILE = '</script><script>window.broken = 1</script><img src="http://evil.test/x.png" onerror="window.broken = 1">'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Real runs of two policies; a made-up one whose answers are hostile, and know what was kept."""
    out = tmp_path_factory.mktemp("page") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        patch.setattr(sys, "argv", ["kvbench"])
        patch.setenv("HYDRA_FULL_ERROR", "1")
        policies = ("-m", f"model={tiny_model}", "policy=full,snapkv", "budget=64,128")
        assert run([*policies, "task=niah", f"out={out}", *SMALL]) == 0
    hostile = replace(answered(1, 0.0, HOSTILE), kept_heads=[[4, 500], [0, 500]])
    reported_run(out, "full", [answered(0, 1.0, "fine"), answered(1, 1.0, "fine")], None, task="hostile")
    reported_run(out, "h2o", [answered(0, 0.0, "fine"), hostile], task="hostile")
    return out


@pytest.fixture(scope="module")
def real(folder: Path) -> RunRecord:
    return next(run for run in find_runs(folder) if run.names["policy"].startswith("snapkv"))


def test_prompts_are_made_again_token_by_token(real: RunRecord) -> None:
    shown = prompts_of(real, 2).shown
    assert list(shown) == [sample.prompt_hash for sample in real.samples]
    for sample, prompt in zip(real.samples, shown.values(), strict=True):
        text = "".join(token for passage in prompt.passages for token in passage.tokens)
        assert text.startswith("<s>Read this text and remember what it says.")
        assert sample.references[0] in text  # wherever it stands
        assert prompt.length == sample.prompt_tokens
        last = prompt.passages[-1]
        assert last.start + len(last.tokens) == prompt.length


def test_a_prompt_that_is_another_one_now_is_not_shown(real: RunRecord) -> None:
    other = replace(real, samples=(replace(real.samples[0], prompt_hash="0" * 64),))
    found = prompts_of(other, 1)
    assert found.shown == {}
    assert "example 0 is another one now" in found.reason


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to open")
    with sync_api.sync_playwright() as play:
        known = [path for path in (*map(shutil.which, BROWSERS), play.chromium.executable_path) if path]
        path = next((path for path in known if Path(path).exists()), None)
        if path is None:
            pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}, and playwright has downloaded none")
        opened = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_a_reader_filters_and_browses_and_the_browser_has_nothing_to_complain_of(
    browser: Any, folder: Path, tmp_path: Path
) -> None:
    write(folder, tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    complaints, asked = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    rows = page.locator("#ranking tbody tr")
    assert rows.count() == 5  # full, snapkv at two budgets, and two hostile ones

    page.select_option("#filters select[name=budget]", "128")
    assert rows.count() == 3  # of which full is two: it has no budget
    page.select_option("#filters select[name=task]", "hostile")
    assert ["hostile" in words for words in rows.all_inner_texts()] == [True]
    page.click("#filters button[type=reset]")
    page.locator("#ranking tbody tr").nth(4).wait_for()

    page.locator("#curves").scroll_into_view_if_needed()
    page.locator("#curves .js-plotly-plot").first.wait_for(timeout=60_000)
    page.click(".legend button[data-line^=snapkv]")
    assert page.get_attribute(".legend button[data-line^=snapkv]", "aria-pressed") == "false"

    title = next(words for words in page.locator("#group option").all_inner_texts() if "hostile" in words)
    page.select_option("#group", label=title)
    page.click("#next")
    assert page.inner_text("#at") == "example 1 (2 of 2)"
    assert HOSTILE in page.inner_text("#answers .answer >> nth=1")  # as words
    assert page.locator("#answers img, #answers script").count() == 0
    assert page.locator("#answers canvas.kept").count() == 1
    page.check("#differing")
    assert page.inner_text("#at") == "example 1 (1 of 1)"

    assert page.evaluate("window.broken") is None
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
    page.set_viewport_size({"width": 500, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 500  # tables scroll within themselves
    page.close()
