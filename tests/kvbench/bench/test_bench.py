"""The efficiency benchmark: every protocol end to end at a tiny scale, the models it builds, what it refuses."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from bench_model import CPU, rows_of
from op_tape import Tape, record
from transformers import AutoModelForCausalLM

from kvbench.tools.bench import build as building
from kvbench.tools.bench import generating, kernels
from kvbench.tools.bench.cli import main
from kvbench.tools.bench.clock import spread
from kvbench.tools.bench.kernels import KernelCase

PAPER_COLUMNS = ["paper", "table", "model", "method", "budget", "budget_kind", "task", "metric", "value", "note"]


# --- end to end -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "more", "metrics"),
    [
        ("cake_table13", ["lengths=7168"], {"prefill_seconds", "decode_ms_per_token", "total_seconds"}),
        ("d2o_table5", ["lengths=256", "batches=1,2"], {"max_batch_size", "tokens_per_s", "speedup_x_vs_full"}),
        ("d2o_table12", ["lengths=256"], {"seconds_per_token", "prefill_percent_of_total"}),
        ("ott_fig3", ["batches=1,2"], {"throughput_ratio_vs_full", "kv_compression_ratio", "held_gib_batch2"}),
        (
            "targets",
            ["policies=tova,snapkv,h2o,cake,ott_g128_r32,decode_attention,rows"],
            {"x a growing step", "share of the rest of it", "of its bytes' bound", "x full attention", "x lone runs"},
        ),
    ],
)
def test_a_protocol_leaves_json_csv_and_a_picture_with_its_figures(
    name: str, more: list[str], metrics: set[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, f"model={folder}", "scale=512", f"out={tmp_path}", "device=cpu", *more]) == 0
    said = capsys.readouterr().out
    rows = rows_of(tmp_path / f"{name}.csv")
    assert list(rows[0])[:10] == PAPER_COLUMNS
    assert metrics <= {row["metric"] for row in rows if row["value"]}
    assert all(math.isfinite(float(row["value"])) for row in rows if row["value"])
    assert {row["scale"] for row in rows} == {"512"}
    assert "scale=512" in said
    assert "tiny, random weights, float32" in said
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["machine"]["packages"]["torch"] == version("torch")
    assert all("load_1min" in cell["machine"] for cell in written["cells"])
    assert (tmp_path / f"{name}.svg").exists()
    assert {row["met"] for row in rows} == {""}  # no promise is judged on a CPU, nor at another scale


def test_what_can_be_recorded_is_timed_eager_and_graphed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[Tape] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(Tape, "replay", lambda tape, replay=Tape.replay: (replays.append(tape), replay(tape)))
    monkeypatch.setattr("kvbench.policies.ranking.at_hand", lambda x: False)
    monkeypatch.setattr(generating, "recordable", lambda slug, budget, device: slug != "full")
    arguments = [f"model={folder}", "scale=64", f"out={tmp_path}", "device=cpu", "rivals=none", "timed=3"]
    assert main(["steps", *arguments, "policies=full,tova"]) == 0
    steps = {row["method"]: row for row in rows_of(tmp_path / "steps.csv")}
    assert list(steps) == ["full", "tova", "tova graphed"]
    assert float(steps["tova graphed"]["value"]) > 0
    assert steps["tova graphed"]["budget"] == "64"
    assert len(replays) >= 3, "the three timed steps are replays"


def test_kernels_are_checked_before_they_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = tmp_path / "made_up_cases"
    cases.mkdir()
    (cases / "doubling.py").write_text(
        "import torch\n"
        "from kvbench.tools.bench.kernels import KernelCase\n"
        "def cases(scale):\n"
        "  for n in (2000 // scale, 6000 // scale):\n"
        "    yield KernelCase('doubling', f'{n} numbers', bytes_moved=8 * n, flops=n,\n"
        "        setup=lambda device: {'x': torch.arange(float(n), device=device)}, tolerance=1e-3,\n"
        "        providers={'reference': lambda x: x * 2, 'sum': lambda x: x + x, 'wrong': lambda x: x * 2.1,\n"
        "                   'other': lambda x: x[:3], 'broken': lambda x: x.no_such_method()}, beside=('other',))\n"
    )
    monkeypatch.setattr(kernels, "MORE", ("torch", "no_such_package", "nor_this"))
    asked = [f"cases={cases}", f"out={tmp_path}", "device=cpu", "scale=2"]
    assert main(["kernels", *asked, "only=tripling"]) == 2
    assert "only=tripling is in the name of no case, such as doubling, 1000 numbers" in capsys.readouterr().err
    assert main(["kernels", *asked, "only=tripling,1000"]) == 0
    rows = rows_of(tmp_path / "kernels.csv")
    assert {row["task"] for row in rows} == {"doubling, 1000 numbers"}
    found = {row["method"]: row for row in rows}
    assert float(found["sum"]["value"]) > 0
    floor = 1e3 * 8000 / (1e9 * float(found["sum"]["copy_gb_per_s"]))  # ms in which a copy moves 8,000 bytes
    assert float(found["sum"]["note"].split()[1]) == pytest.approx(floor, rel=0.05)
    assert float(found["other"]["value"]) > 0, "what computes something else is timed and not compared"
    assert found["wrong"]["value"] == ""
    assert "wrong: relative error 5.0e-02" in found["wrong"]["note"]  # 2.1 / 2 - 1
    assert "no_such_method" in found["broken"]["note"]
    said = capsys.readouterr().out
    assert "kernels:" in said
    assert "without no_such_package and nor_this: not installed" in said
    assert (tmp_path / "kernels.svg").exists()


def test_every_kernel_case_runs_at_a_small_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every provider that is not a GPU's answers as the first one does."""
    monkeypatch.setattr(kernels, "time_calls", lambda calls, device: spread([1.0]))
    assert main(["kernels", f"out={tmp_path}", "device=cpu", "scale=1024"]) == 0
    rows = rows_of(tmp_path / "kernels.csv")
    without = {(row["method"], row["note"].partition(":")[0]) for row in rows if not row["value"]}
    assert {method for method, _ in without} <= {"triton", "positions", "alone"}, without
    assert any("2 bits of 32" in row["task"] for row in rows if row["task"].startswith("quantise,"))
    assert any("2 bits of 32" in row["task"] for row in rows if row["task"].startswith("quantised_attention"))


def test_a_wrong_kernel_of_ours_fails_its_case_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doubled(*providers: str) -> KernelCase:
        calls = {
            name: lambda x, name=name: x * (3 if name in providers else 2) for name in ("pytorch", "triton", "topk")
        }
        return KernelCase("double", "3", lambda device: {"x": torch.ones(3)}, calls, bytes_moved=24)

    monkeypatch.setattr(kernels, "runs_ours", lambda device: True)
    codes = []
    for case in (doubled("triton", "topk"), doubled("topk"), doubled()):
        monkeypatch.setattr(kernels, "found_cases", lambda bench, case=case: iter([case]))
        codes.append(main(["kernels", f"out={tmp_path}", "device=cpu"]))
    assert codes == [1, 0, 0]
    assert "tried again by the same command: double, 3" in capsys.readouterr().out
    found = {row["method"]: row for row in rows_of(tmp_path / "kernels.csv")}
    assert float(found["triton"]["value"]) > 0
    assert "wrong: relative error 5.0e-01" in found["topk"]["note"], "a rival may be wrong: its case is done"


def test_a_provider_that_loses_the_device_leaves_the_others_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    providers = {"triton": illegal, "torch": lambda x: x.sum()}
    case = KernelCase("sum", "3", lambda device: {"x": torch.ones(3)}, providers, bytes_moved=12)
    monkeypatch.setattr("kvbench.tools.bench.kernels.lost", lambda device: True)
    sentence = "triton: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert kernels._measure(case, CPU) == {"failed": sentence}


# --- models -----------------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such"], "protocol 'no_such' does not exist (allowed: cake_table13"),
        (["cake_table13", "scale=0"], "scale=0 must be a whole number of at least 1"),
        (["cake_table13", "colour=red"], "colour=red is not one of model="),
        (["cake_table13", "weights=none", "model=pocket"], "weights=none is not allowed, choose random or real"),
        (["cake_table13", "rivals=vllm", "model=pocket"], "rivals=vllm is not known, choose from transformers_sdpa"),
        (["targets", "decode=grow"], "decode= has no effect on targets: it is for sweep"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, f"out={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
