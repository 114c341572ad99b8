"""The efficiency benchmark: every protocol end to end at a tiny scale, its arithmetic by hand, what it refuses."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_model import tiny_folder
from kv_models import prompt as tokens_of
from kv_models import tiny
from transformers import AutoModelForCausalLM, DynamicCache

from kvbench import make_policy
from kvbench.cache.hook import prepare
from kvbench.inference.generate import greedy
from kvbench.report.render import text
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench import build as building
from kvbench.tools.bench import generating, generation, kernels, rivals
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.build import PUBLISHED, build
from kvbench.tools.bench.cli import main, protocols
from kvbench.tools.bench.clock import paired_ratio, spread
from kvbench.tools.bench.generating import Point, Sizes
from kvbench.tools.bench.generation import Job, Run, measure
from kvbench.tools.bench.journal import Cell, Journal, attempt
from kvbench.tools.bench.kernels import relative_error
from kvbench.tools.bench.protocols import PROTOCOLS
from kvbench.tools.bench.providers import held_bytes, ours, tensors_in
from kvbench.tools.bench.report import grid
from kvbench.tools.bench.settings import parse, scaled
from kvbench.tools.bench.targets import targets

PAPER_TABLES = Path(__file__).parents[3] / "shared" / "paper_tables"
COPIED = {"copy_bytes_per_s": 1e9}
PAPER_COLUMNS = ["paper", "table", "model", "method", "budget", "budget_kind", "task", "metric", "value", "note"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny model and no weights."""
    return tiny_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _no_long_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a copy is measured on small buffers: these tests read no figure of it."""
    monkeypatch.setattr("kvbench.tools.bench.clock.COPIED", {"cpu": 2**20})


def prompt(length: int) -> torch.Tensor:
    return torch.tensor([tokens_of(length)])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- end to end ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "more", "metrics"),
    [
        ("cake_table13", ["lengths=7168"], {"prefill_seconds", "decode_ms_per_token", "total_seconds"}),
        ("cake_fig7", ["lengths=7168"], {"peak_memory_reduction_percent", "decode_speedup_x", "held_gib"}),
        ("d2o_table5", ["lengths=256", "batches=1,2"], {"max_batch_size", "tokens_per_s", "speedup_x_vs_full"}),
        ("d2o_table12", ["lengths=256"], {"seconds_per_token", "prefill_percent_of_total"}),
        ("ott_fig3", ["batches=1,2"], {"throughput_ratio_vs_full", "kv_compression_ratio", "held_gib_batch2"}),
        ("targets", ["policies=tova,snapkv,h2o,cake"], {"x a growing step", "x the full cache's speed"}),
    ],
)
def test_a_protocol_leaves_json_csv_and_a_picture_with_its_figures(
    name: str, more: list[str], metrics: set[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, f"model={folder}", "scale=512", f"out={tmp_path}", "device=cpu", *more]) == 0
    said = capsys.readouterr().out
    rows = rows_of(tmp_path / f"{name}.csv")
    assert list(rows[0])[:10] == PAPER_COLUMNS
    assert metrics <= {row["metric"] for row in rows}
    assert all(math.isfinite(float(row["value"])) for row in rows if row["value"])
    assert {row["scale"] for row in rows} == {"512"}
    assert "scale=512" in said
    assert "tiny, random weights, float32" in said
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["machine"]["packages"]["torch"] == torch.__version__
    assert all("load_1min" in cell["machine"] for cell in written["cells"])
    assert (tmp_path / f"{name}.svg").exists() == (name != "targets")
    assert {row["met"] for row in rows} == {""}  # no promise is judged on a CPU, nor at another scale


def test_figure_7_measures_nothing_that_table_13_has_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [f"model={folder}", "scale=512", f"out={tmp_path}", "device=cpu", "lengths=7168", "policies=full"]
    assert main(["cake_table13", *arguments]) == 0
    monkeypatch.setattr(generating, "measure", _refuse_to_measure)
    assert main(["cake_fig7", *arguments]) == 0


def _refuse_to_measure(*arguments: object) -> dict[str, object]:
    raise AssertionError("measured again")


def test_kernels_are_checked_before_they_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = tmp_path / "made_up_cases"
    cases.mkdir()
    (cases / "doubling.py").write_text(
        "import torch\n"
        "from types import SimpleNamespace\n"
        "def cases(scale):\n"
        "    n = 2000 // scale\n"
        "    yield SimpleNamespace(kernel='doubling', label=f'{n} numbers', bytes_moved=8 * n, flops=n,\n"
        "        setup=lambda device: {'x': torch.arange(float(n), device=device)}, tolerance=1e-3,\n"
        "        providers={'reference': lambda x: x * 2, 'sum': lambda x: x + x, 'wrong': lambda x: x * 2.1,\n"
        "                   'other': lambda x: x[:3], 'broken': lambda x: x.no_such_method()}, beside=('other',))\n"
    )
    assert main(["kernels", f"cases={cases}", f"out={tmp_path}", "device=cpu", "scale=2"]) == 0
    found = {row["method"]: row for row in rows_of(tmp_path / "kernels.csv")}
    assert float(found["sum"]["value"]) > 0
    assert found["sum"]["task"] == "doubling, 1000 numbers"
    assert float(found["other"]["value"]) > 0, "what computes something else is timed and not compared"
    assert found["wrong"]["value"] == ""
    assert "wrong: relative error 5.0e-02" in found["wrong"]["note"]  # 2.1 / 2 - 1
    assert "no_such_method" in found["broken"]["note"]
    assert "kernels:" in capsys.readouterr().out


def test_a_provider_that_loses_the_device_leaves_the_others_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    providers = {"triton": illegal, "torch": lambda x: x.sum()}
    case = SimpleNamespace(setup=lambda device: {"x": torch.ones(3)}, providers=providers, beside=(), tolerance=0.0)
    monkeypatch.setattr("kvbench.tools.bench.kernels.lost", lambda device: True)
    sentence = "triton: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert kernels._measure(case, CPU) == {"failed": sentence}


@pytest.mark.slow
def test_importing_the_benchmark_brings_no_package_that_gpu_machines_lack() -> None:
    heavy = "hydra, omegaconf, datasets, lm_eval, wandb, pandas"
    code = (
        "import sys, kvbench.tools.bench.cli as c; c.main([]); "
        f"print([m for m in '{heavy}'.split(', ') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in protocols())


# --- going on, and what does not fit ---------------------------------------------------------------------------------
def test_a_killed_benchmark_goes_on_with_the_cell_it_was_in(tmp_path: Path) -> None:
    ran: list[str] = []

    def cell(name: str, killed: bool = False) -> Cell:
        def run() -> dict[str, Any]:
            ran.append(name)
            if killed:
                raise KeyboardInterrupt
            return {"value": len(name)}

        return Cell(name, run)

    path = tmp_path / "cells.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Journal(path, {"scale": 1}).measure([cell("one"), cell("three", killed=True), cell("four")], CPU)
    path.write_text(path.read_text() + '{"cell": "four", "val')  # what a kill in the middle of a line leaves
    again = Journal(path, {"scale": 1})
    assert again.measure([cell("one"), cell("three"), cell("four")], CPU) == []
    assert ran == ["one", "three", "four", "three"], "what a process ended in comes last: it may be what ended it"
    assert [json.loads(line).get("value") for line in path.read_text().splitlines()] == [None, 3, 4, 5]
    assert not path.with_suffix(".begun").exists()


def test_a_cell_that_fails_takes_no_other_with_it_and_is_tried_again_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, Any]:
        raise IndexError("too many heads")

    path = tmp_path / "cells.jsonl"
    first = Journal(path, {})
    assert first.measure([Cell("broken", broken), Cell("good", dict)], CPU) == []
    assert first.mistakes == ["broken"]
    assert first.cells["broken"]["failed"] == "IndexError: too many heads"
    assert "in broken" in capsys.readouterr().err, "where it was raised"
    ran: list[str] = []
    mended = [Cell(name, lambda name=name: ran.append(name) or {"value": 1}) for name in ("broken", "good", "new")]
    again = Journal(path, {})
    assert again.measure(mended, CPU) == []
    assert ran == ["new", "broken"]
    assert again.cells["broken"]["value"] == 1
    assert Journal(path, {}).cells["broken"]["value"] == 1, "the last line of a cell counts"


def test_a_lost_device_ends_the_process_and_the_next_one_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["d2o_table12", f"model={folder}", "scale=512", "device=cpu", "policies=full,h2o", f"out={tmp_path}"]
    arguments += ["lengths=256", "rivals=none"]
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.tools.bench.journal.lost", lambda device: True)
        patch.setattr(generating, "measure", _refuse_to_measure)
        assert main(arguments) == 75
    said = capsys.readouterr().err
    assert "the device is lost to this process after 'full, 96+4 tokens" in said
    assert main(arguments) == 0
    assert {row["method"] for row in rows_of(tmp_path / "d2o_table12.csv") if row["value"]} == {"full", "h2o"}


def test_a_command_whose_cells_fail_or_are_left_says_so_in_its_exit_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["targets", f"model={folder}", "scale=512", "device=cpu", "policies=ada_snapkv", f"out={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr("kvbench.tools.bench.targets.ada_step", _refuse_to_measure)
        assert main(arguments) == 1
    assert "failed, and tried again by the same command: step_at_equal_bytes, ada_snapkv" in capsys.readouterr().out
    assert "failed: AssertionError: measured again" in rows_of(tmp_path / "targets.csv")[0]["note"]
    monkeypatch.setattr(Journal, "measure", lambda journal, cells, device, seconds: [cells[0].key])
    assert main(arguments) == 75


def test_cells_of_another_benchmark_are_not_mixed_in(tmp_path: Path) -> None:
    Journal(tmp_path / "cells.jsonl", {"scale": 1})
    with pytest.raises(UsageError, match="holds cells with scale=1, this benchmark has 64"):
        Journal(tmp_path / "cells.jsonl", {"scale": 64})


def test_no_cell_begins_once_the_seconds_are_over(tmp_path: Path) -> None:
    cells = [Cell(name, dict) for name in ("first", "second")]
    assert Journal(tmp_path / "cells.jsonl", {}).measure(cells, CPU, seconds=-1) == ["first", "second"]


def test_a_batch_that_does_not_fit_is_a_result_and_larger_ones_are_not_tried(folder: Path, tmp_path: Path) -> None:
    huge, larger = 2**40, 2**41  # 2**40 prompts of 96 numbers of 8 bytes: no machine has them
    arguments = [f"model={folder}", "scale=512", f"out={tmp_path}", "device=cpu", "rivals=none", "policies=full"]
    assert main(["ott_fig3", *arguments, f"batches=1,{huge},{larger}"]) == 0
    rows = {row["metric"]: row for row in rows_of(tmp_path / "ott_fig3.csv")}
    assert rows["max_batch_size"]["value"] == "1"
    assert rows[f"tokens_per_s_batch{huge}"]["value"] == ""
    assert rows[f"tokens_per_s_batch{huge}"]["note"].startswith("out of memory: ")
    assert "not tried" in rows[f"tokens_per_s_batch{larger}"]["note"]


def test_a_gpu_without_memory_is_a_result_but_our_own_mistakes_are_not() -> None:
    def no_memory() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore")

    def mistake() -> dict[str, Any]:
        raise ValueError("shapes differ")

    assert attempt(Cell("a", no_memory)) == {"out_of_memory": "CUDA out of memory. Tried to allocate 20.00 GiB"}
    assert attempt(Cell("a", mistake, foreign=True)) == {"failed": "ValueError: shapes differ"}
    with pytest.raises(ValueError, match="shapes differ"):
        attempt(Cell("a", mistake))


def test_what_compiles_a_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own hook is called as Triton calls it when it has loaded a kernel."""
    triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    loaded: list[int] = []

    def loads(run: Run) -> None:
        triton.knobs.runtime.kernel_load_end_hook(None, None, "_finish", None, "hash")
        loaded.append(run._seen if run._step else 0)

    run = Run(tiny(dtype=torch.float32), ours("full", None), prompt(50))
    assert len(run.decode(4) if run.prefill() else []) == 4
    step = run._step
    assert step is not None
    monkeypatch.setattr(run, "_step", lambda *of: (loads(run) if len(loaded) < 2 else None, step(*of))[1])
    assert len(run.decode(5)) == 3, "two of the steps loaded a kernel"
    prefills: list[int] = []

    def prefill(run: Run, own: Any = Run.prefill) -> float:
        prefills.append(1)
        if len(prefills) == 1:
            loads(run)
        return own(run) if len(prefills) == 2 else 0.0

    monkeypatch.setattr(Run, "prefill", prefill)
    assert generation._prefill_ms(run) > 0, "the first one loaded a kernel, so the second one counts"


# --- arithmetic ------------------------------------------------------------------------------------------------------
def test_seconds_and_tokens_per_second_follow_from_prefill_and_steps() -> None:
    record = {"prefill_ms": [100.0, 300.0, 200.0], "decode_ms": [10.0, 20.0, 60.0]}
    point = Point("full", None, None, Sizes(512, 100), batch=4, timed=3, record=record)
    assert point.prefill_seconds == pytest.approx(0.2)  # the median
    assert point.ms == pytest.approx(30.0)  # the mean: a total is made of it
    assert point.seconds == pytest.approx(0.2 + 100 * 0.030)
    assert point.tokens_per_s == pytest.approx(400 / 3.2)


def test_a_spread_is_median_and_percentiles_and_ratios_are_taken_round_by_round() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (found.p50, found.p20, found.p80, found.runs) == (3.5, 2.0, 5.0, 6)
    assert paired_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]).p50 == 2.0  # 2, 3 and 1: the busy round counts once
    with pytest.raises(ValueError, match="at least one figure"):
        spread([])


def test_the_share_of_the_limit_is_bytes_over_bandwidth_over_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(parse([f"model={folder}", "device=cpu"]), CPU, "unused")
    monkeypatch.setattr("kvbench.tools.bench.bench.bandwidth", lambda device: 1e6)
    table = 512 * 32
    attention, mlp, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 2 * 32
    read = 4 * (2 * (attention + mlp + norms) + 32 + table)  # layers, last norm, the head's table; no embeddings
    assert bench.built.bytes_read == read
    assert bench.built.weights_bytes == read + 4 * table
    assert bench.share_of_limit(ms=1000.0, cache_bytes=500_000) == pytest.approx((read + 5e5) / 1e6)
    busier = {"copy_bytes_per_s": 2e5}  # when another process measured that cell
    assert bench.share_of_limit(1000.0, 500_000, busier) == pytest.approx((read + 5e5) / 2e5)


def test_a_note_of_many_rows_stands_once_below_the_table() -> None:
    rows = [Row("", "", "", f"m{i}", None, "", "task", "ms", 1.0, "long" if i else "own") for i in range(4)]
    lines = text(grid(rows)).splitlines()
    assert [line.split()[-1] for line in lines[3:7]] == ["own", "[a]", "[a]", "[a]"]
    assert lines[-1] == "[a] long"
    of_all = text(grid(rows[1:])).splitlines()
    assert of_all[0].split() == ["method", "budget", "metric", "value"]
    assert of_all[-1] == "long"


def test_scale_divides_sizes_down_to_a_floor_it_does_not_raise() -> None:
    assert [scaled(n, 64, 96) for n in (130048, 7168, 64)] == [2032, 112, 64]
    assert scaled(1024, 1, 64) == 1024


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.name)
def test_at_scale_1_every_figure_of_the_papers_table_has_ours_beside_it(protocol: Any, folder: Path) -> None:
    """The rows of made-up records, joined with the table on everything but the model and the values."""
    if not PAPER_TABLES.exists():
        pytest.skip(f"{PAPER_TABLES} is not here")
    bench = Bench(parse([f"model={folder}", "device=cpu", "rivals=none"]), CPU, protocol.model)
    record = {
        "prefill_ms": [1.0],
        "decode_ms": [2.0],
        "held_bytes": 3,
        "peak_prefill_bytes": 5,
        "peak_decode_bytes": 4,
        **COPIED,
    }
    ours_ = [vars(row) for row in protocol.rows(bench, {cell.key: record for cell in protocol.cells(bench)})]
    on = ["paper", "table", "method", "budget", "budget_kind", "task", "metric"]
    mine = {tuple("" if row[key] is None else str(row[key]) for key in on) for row in ours_}
    theirs = {tuple(row[key] for key in on) for row in rows_of(PAPER_TABLES / protocol.paper / f"{protocol.table}.csv")}
    assert theirs - mine == set()
    known = PUBLISHED[protocol.model].paper_name
    assert {row["model"] for row in rows_of(PAPER_TABLES / protocol.paper / f"{protocol.table}.csv")} == {known}


def test_reduction_and_speed_up_are_the_full_caches_over_ours(folder: Path) -> None:
    protocol: Any = protocols()["cake_fig7"]
    bench = Bench(parse([f"model={folder}", "device=cpu", "lengths=130048", "policies=full,cake"]), CPU, protocol.model)
    record = {"prefill_ms": [1.0], "peak_prefill_bytes": 100, "peak_decode_bytes": 80, "held_bytes": 60, **COPIED}
    full, cake = protocol.cells(bench)[:2]
    found = {
        full.key: {**record, "decode_ms": [30.0]},
        cake.key: {**record, "peak_prefill_bytes": 70, "decode_ms": [3.0]},
    }
    values = {(row.method, row.metric): row.value for row in protocol.rows(bench, found)}
    assert values["cake", "peak_memory_reduction_percent"] == pytest.approx(20.0)  # 100 against the 80 of decoding
    assert values["cake", "decode_speedup_x"] == pytest.approx(10.0)


def test_lines_of_a_table_whose_batches_overlap_are_panels_of_their_own(folder: Path) -> None:
    protocol: Any = protocols()["d2o_table5"]
    bench = Bench(parse([f"model={folder}", "device=cpu", "rivals=none", "policies=full"]), CPU, protocol.model)
    record = {"prefill_ms": [1.0], "held_bytes": 3, "peak_prefill_bytes": 5, "peak_decode_bytes": 4, **COPIED}
    found = {cell.key: {**record, "decode_ms": [float(place)]} for place, cell in enumerate(protocol.cells(bench), 1)}
    curves = protocol.curves(bench, protocol.rows(bench, found))
    batches = {curve.x_label: curve.x for curve in curves if curve.y_label == "tokens/s of all sequences"}
    assert batches["sequences in a batch: 256 prompt and 1024 new tokens"] == [8, 32, 128, 256]
    assert batches["sequences in a batch: 2048 prompt and 8192 new tokens"] == [1, 4, 16, 32]
    assert len(curves) == 2 * 4, "two figures of each of the four lines"


def test_lengths_scaled_down_to_one_prompt_are_told_apart_by_their_answers(folder: Path) -> None:
    protocol: Any = protocols()["d2o_table12"]
    record = {"prefill_ms": [1.0], "held_bytes": 3, "decode_ms": [2.0], **COPIED}
    axes = {}
    for scale in (1, 64):
        asked = [f"model={folder}", "device=cpu", "rivals=none", "policies=full", f"scale={scale}"]
        bench = Bench(parse(asked), CPU, protocol.model)
        (curve,) = protocol.curves(bench, protocol.rows(bench, {cell.key: record for cell in protocol.cells(bench)}))
        axes[scale] = (curve.x_label, curve.x)
    assert axes == {1: ("prompt tokens", [256, 512, 1024, 2048]), 64: ("new tokens", [8, 16, 32, 64])}


def test_a_target_is_met_on_its_own_side_of_the_bound() -> None:
    found = {target.key: target for target in targets()}
    faster, evicting = found["decode_after_128k, cake"], found["evicting_step, h2o"]
    assert (faster.met(10.0), faster.met(9.9)) == (True, False)
    assert (evicting.met(1.05), evicting.met(1.06)) == (True, False)


def test_a_relative_error_covers_the_whole_output() -> None:
    expected = [torch.tensor([3.0, 4.0])]
    assert relative_error([torch.tensor([3.0, 3.0])], expected) == pytest.approx(0.2)  # 1 of 5
    assert relative_error([torch.tensor([3.0, torch.nan])], expected) > 1
    assert relative_error([torch.zeros(3)], expected) > 1
    assert relative_error([torch.tensor([1, 2, 3, 5])], [torch.tensor([1, 2, 3, 4])]) == 0.25
    assert relative_error([torch.tensor([-torch.inf, 2.0])], [torch.tensor([-torch.inf, 2.0])]) == 0


# --- providers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("slug", ["full", "snapkv", "h2o", "d2o", "kivi"])
def test_timed_steps_write_the_tokens_that_generation_writes(slug: str) -> None:
    model, ids = tiny(), prompt(100)
    budget = None if slug in ("full", "kivi") else 64
    expected = greedy(prepare(model), ids, make_policy(slug, budget), max_new_tokens=6).tokens[0]
    run = Run(model, ours(slug, budget), ids)
    run.prefill()
    got = [int(run.token)]
    for _ in range(5):
        run.decode(1)
        got.append(int(run.token))
    assert got == expected


def test_transformers_own_cache_writes_what_the_full_cache_writes_and_holds_keys_and_values_only() -> None:
    model, ids = tiny(), prompt(50)
    found = []
    for provider in (rivals.provider("transformers_sdpa", None, 50), ours("full", None)):
        run = Run(model, provider, ids)
        run.prefill()
        run.decode(4)
        found.append(int(run.token))
        if provider.name == "transformers_sdpa":
            assert run.held_bytes == 2 * 2 * 54 * 2 * 8 * 8  # keys and values, layers, tokens, heads, dim, float64
    assert found[0] == found[1]


def test_a_prompt_taken_in_parts_is_taken_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.tools.bench.generation.AT_ONCE", 60)
    monkeypatch.setattr("kvbench.tools.bench.generation.SCORES", 4 * 7 * 100)  # query heads x 7 tokens x 100 slots
    model, ids = tiny(), prompt(100)
    tokens = []
    for in_parts in (True, False):
        run = Run(model, ours("full", None), ids)
        run.prefill(in_parts)
        run.decode(3)
        tokens.append(int(run.token))
    assert tokens[0] == tokens[1]
    assert max(s.stop - s.start for s in run._calls(in_parts=True)) == 7
    assert [s.start for s in run._calls(in_parts=True)[1:]] == [s.stop for s in run._calls(in_parts=True)[:-1]]


def test_a_cache_that_grows_is_decoded_in_the_middle_of_its_answer() -> None:
    model = tiny(dtype=torch.float32)
    job = Job(prompt=64, new=40, timed=4, middle=True)
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dim, float32
    full = measure(model, rivals.provider("transformers_sdpa", None, 64), job)
    assert full["held_bytes"] == per_token * (64 + 18 + 4)
    assert full["held_bytes_after_prompt"] == per_token * 64
    evicting = measure(model, ours("h2o", 64), job)
    assert evicting["context"] == 64


def test_bytes_are_those_of_the_tensors_inside_wrappers_containers_and_shared_storages() -> None:
    codes, scale = torch.zeros(10, dtype=torch.uint8), torch.zeros(3)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), 0)
    vars(cache.layers[0])["extra"] = (codes, {"scale": scale, "bits": 2}, codes[:5])
    assert held_bytes(cache) == 2 * 2 * 5 * 4 * 4 + 10 + 12
    assert len(list(tensors_in([codes, {"a": (scale, None)}]))) == 2


def test_quanto_holds_its_codes_and_not_what_they_pose_as() -> None:
    pytest.importorskip("optimum.quanto", reason="the rival quanto is not installed")
    model = tiny(dtype=torch.float32)
    run = Run(model, rivals.provider("quanto_int2", None, 128), prompt(128))
    run.prefill()
    assert run.held_bytes < 2 * 2 * 2 * 128 * 8 * 4 / 3  # scales and minima of groups of 64 beside 2 of 32 bits


def test_presses_that_mask_hold_everything_and_those_that_cut_hold_their_budget() -> None:
    pytest.importorskip("kvpress", reason="the rival kvpress is not installed")
    model = tiny(dtype=torch.float32)
    per_token = 2 * 2 * 2 * 8 * 4
    held = {}
    for name in ("kvpress_snapkv", "kvpress_ada_snapkv"):
        run = Run(model, rivals.provider(name, 64, 128), prompt(128))
        run.prefill()
        held[name] = run.held_bytes
        run.decode(2)
    assert held == {"kvpress_snapkv": per_token * 64, "kvpress_ada_snapkv": per_token * 128}
    ours_ = Run(model, ours("snapkv", 64), prompt(128))  # kvpress changes attention functions: ours still runs
    ours_.prefill()


def test_a_rival_that_is_not_installed_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        rivals.RIVALS, "hqq_int4", rivals.Rival("no_such_package", "hqq", rivals.RIVALS["hqq_int4"].make)
    )
    assert rivals.chosen(None, ("transformers_sdpa", "hqq_int4")) == (
        ["transformers_sdpa"],
        ["hqq_int4 is left out, no_such_package is not installed: pip install hqq"],
    )


# --- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2_7b_chat", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama31_8b_instruct", 8_030_261_248),
        ("llama32_3b_instruct", 3_212_749_824),
        ("mistral_7b_instruct_v03", 7_248_023_552),
        ("qwen25_7b_instruct", 7_615_616_512),
    ],
)
def test_published_shapes_have_the_parameters_their_model_cards_say(name: str, parameters: int) -> None:
    config, _ = building._configuration(name, None)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters


def test_layers_cut_a_random_model_and_its_name_says_so(folder: Path) -> None:
    built = build(str(folder), None, 1, "bfloat16", CPU)
    assert built.model.config.num_hidden_layers == 1
    assert built.description == "tiny, random weights, bfloat16, 1 of 2 layers"
    assert built.model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such"], "protocol 'no_such' does not exist (allowed: cake_table13"),
        (["cake_table13", "scale=0"], "scale=0 must be a whole number of at least 1"),
        (["cake_table13", "batches=1,x"], "batches=x must be a whole number of at least 1"),
        (["cake_table13", "colour=red"], "colour=red is not one of model="),
        (["cake_table13", "lengths"], "lengths cannot be read: write key=value, such as model="),
        (["cake_table13", "model="], "model= needs a value"),
        (["cake_table13", "model=no_such"], "model=no_such is neither a folder with a config.json nor one of pocket"),
        (["cake_table13", "weights=none", "model=pocket"], "weights=none is not allowed, choose random or real"),
        (["cake_table13", "dtype=int8", "model=pocket"], "dtype=int8 is not allowed"),
        (["cake_table13", "device=tpu"], "device=tpu is not available here"),
        (["cake_table13", "policies=snapvk", "model=pocket"], "policy 'snapvk' does not exist; did you mean snapkv"),
        (["cake_table13", "policies=sirllm", "model=pocket"], "policies=sirllm cannot be timed here"),
        (["cake_table13", "rivals=vllm", "model=pocket"], "rivals=vllm is not known, choose from transformers_sdpa"),
        (["targets", "policies=no_such", "model=pocket"], "policies=no_such is in no target"),
        (["kernels", "cases=/no/such"], "cases=/no/such holds no kernel cases"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, f"out={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_model_larger_than_memory_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building, "free_bytes", lambda device: 2**30)
    assert main(["cake_table13", f"out={tmp_path}", "dtype=bfloat16", "device=cpu"]) == 2
    assert "needs 13.5 GiB for its weights and cpu has 1.0 GiB free" in capsys.readouterr().err
