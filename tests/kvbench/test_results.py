"""From samples on disk to metrics, the tidy table and the table for people: numbers worked by hand."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from plotted_runs import described, failed, write_run
from plotted_runs import sample as plotted_sample

from kvbench.errors import UsageError
from kvbench.report.table import print_table
from kvbench.results.__main__ import main
from kvbench.results.columns import COLUMNS, frame, read_table
from kvbench.results.loading import load_results, read_result
from kvbench.results.metrics import metrics
from kvbench.results.result import Result, Results
from kvbench.results.samples import Sample

MIB = 2**20


def sample(index: int, score: float | None, **fields: Any) -> Sample:
    held = {"kept_tokens": [[10, 20], [30, 40]], "peak_bytes": 3 * MIB, "full_cache_bytes": 4 * MIB, "decode_steps": 5}
    metadata = {"task": "niah", "length": 1024 if index % 2 == 0 else 2048}
    return replace(plotted_sample(index, 0.0), score=score, **{"metadata": metadata, **held, **fields})


def tidy(run: Result) -> dict[str, Any]:
    return {column.name: column.value(run) for column in COLUMNS}


def test_metrics_by_hand() -> None:
    got = metrics(
        [sample(0, 1.0), sample(1, 0.0, cache_bytes=3 * MIB, kept_tokens=[[5, 5], [5, 5]], prompt_tokens=200)]
    )
    assert (got["n"], got["n_failed"], got["score"]) == (2, 0, 0.5)
    assert (got["prompt_tokens"], got["kept_tokens"], got["peak_bytes"]) == (150, (25 + 5) / 2, 3 * MIB)
    assert got["cache_share"] == (1 + 3) / (4 + 4)
    assert (got["prefill_seconds"], got["decode_seconds"]) == (0.5, 0.25)
    assert got["interval"] == "95% wilson"


def test_scores_are_grouped_by_length_and_by_metadata_that_varies() -> None:
    got = metrics([sample(i, float(i % 2)) for i in range(6)])["groups"]
    assert {name: (group["n"], group["score"]) for name, group in got.items()} == {
        "length=1024": (3, 0.0),
        "length=2048": (3, 1.0),
    }
    said = [{"language": "en" if i < 4 else "zh", "groups": ["language"]} for i in range(6)]
    got = metrics([sample(i, float(i in (0, 1, 4, 5)), metadata=about) for i, about in enumerate(said)])["groups"]
    assert {name: (group["n"], group["score"]) for name, group in got.items()} == {
        "language=en": (4, 0.5),
        "language=zh": (2, 1.0),
    }


def test_one_failed_example_leaves_no_score_but_its_own_group_alone_is_spoilt() -> None:
    got = metrics([sample(0, 1.0), failed(sample(1, None)), sample(2, 1.0)])
    assert (got["n"], got["n_failed"], got["score"], got["score_low"]) == (3, 1, None, None)
    assert got["cache_bytes"] == MIB
    assert got["groups"]["length=1024"]["score"] == 1.0
    assert got["groups"]["length=2048"]["score"] is None


def test_official_aggregates_stand_beside_the_mean_and_all_is_plain_json() -> None:
    meta = {"benchmark": "ruler", "task": "vt"}
    ruler = [sample(i, score, metadata=meta) for i, score in enumerate((1.0, 0.5, 0.5))]
    assert metrics(ruler)["score"] == pytest.approx(2 / 3)
    assert 66.67 in metrics(ruler)["official"].values()  # RULER rounds percents to two decimals
    for samples in (ruler, [failed(sample(0, None))]):
        assert json.loads(json.dumps(metrics(samples), allow_nan=False)) == metrics(samples)


TIDY = """
run_id model weights dtype policy schedule decode policy_fields budget budget_kind compress task task_fields subset
seed n_seeds seed_sd n n_failed n_shared score score_low score_high interval score_vs_full score_vs_full_low
score_vs_full_high score_vs_full_p lost lost_low lost_high gained gained_low gained_high lost_of_right
lost_of_right_low lost_of_right_high flips length_change length_change_low length_change_high length_ratio cut_vs_full
cut_vs_full_low cut_vs_full_high looping_vs_full looping_vs_full_low looping_vs_full_high rep_4_vs_full
rep_4_vs_full_low rep_4_vs_full_high nll nll_low nll_high perplexity nll_vs_full nll_vs_full_low nll_vs_full_high
nll_vs_full_p perplexity_gap scored_tokens block max_kept_tokens nll_curve official watched
official_intervals kl kl_low kl_high
kl_over_tokens kl_after_first kl_median kl_p90 kl_p99 kl_p999 kl_max kl_infinite same_top diverged_share
diverged_share_low diverged_share_high first_divergence delta_logprob rms_delta_p compared_tokens left_out
kept_evidence kept_evidence_low kept_evidence_high kept_evidence_end kept_distractors kept_prompt evidence_lift
evidence_lift_low evidence_lift_high heads_whole heads_whole_low heads_whole_high evidence_right evidence_missed
evidence_evicted evidence_right_minus_wrong evidence_right_minus_wrong_low evidence_right_minus_wrong_high
prompt_tokens generated_tokens cut_share cut_share_low cut_share_high looping_share looping_share_low
looping_share_high looping_cut_share loop_start rep_4 in_thought clipped pass_at_k kept_tokens cache_bytes
spare_bytes state_bytes peak_bytes device_peak_bytes full_cache_bytes full_position_bytes cache_share bits_per_number
ratio_to_16_bit kv_footprint kv_footprint_low kv_footprint_high evicted_share read_tokens read_bytes unmasked_tokens
pre_pass_tokens pre_pass_steps recomputed_tokens prefill_seconds decode_seconds decode_ms_per_token code device
kvbench_revision mixed state
"""


def test_every_declared_column_reads_its_own_field(tmp_path: Path) -> None:
    """Each sample field and name differs, so that a column that reads its neighbour's value is seen."""
    given = {"prompt_tokens": 3, "generated_tokens": 5, "cache_bytes": 11, "peak_bytes": 13, "full_cache_bytes": 17}
    given |= {"full_position_bytes": 6, "device_peak_bytes": 29, "prefill_seconds": 19.0, "decode_seconds": 23.0}
    folder = write_run(tmp_path, "h2o", [sample(0, 0.5, kept_tokens=[[7]], **given)], dtype="float16", seed=4)
    run = read_result(folder)
    row = tidy(run)
    assert list(row) == TIDY.split()
    told = {"kept_tokens": 7, "run_id": folder.name, "model": "pocket", "task": "niah", "dtype": "float16", "seed": 4}
    told |= {"device": "a processor", "kvbench_revision": "cafe", "weights": "abc", "policy": "h2o"}
    told |= {"budget": 64, "budget_kind": "tokens_per_head", "state": "finished", "schedule": "prompt"}
    assert {name: row[name] for name in (*given, *told)} == {**given, **told}
    assert row["cache_share"] == 11 / (17 + 6), "positions, if the cache stores them"
    assert row["bits_per_number"] is row["ratio_to_16_bit"] is None  # nothing is quantised
    coded = tidy(replace(run, identity={**run.identity, "policy": {"store": {"bits": 2}}}))
    assert coded["bits_per_number"] == pytest.approx(16 * 11 / 17)  # the full cache is in float16
    assert coded["ratio_to_16_bit"] == pytest.approx(17 / 11)
    fp8 = {"class": "kvbench.policies.stores.per_token.Fp8"}
    coded = tidy(replace(run, identity={**run.identity, "policy": {"store": fp8}}))
    assert coded["bits_per_number"] == pytest.approx(16 * 11 / 17), "a store whose format has the bits in its name"


def test_rows_by_length_are_about_the_examples_of_that_length_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    write_run(out, "tova", [sample(i, float(i % 2), cache_bytes=100 + i) for i in range(6)])
    assert main(["collect", str(out), "-o", str(tmp_path / "t.csv"), "--by", "length", "task"]) == 0
    table = pd.read_csv(tmp_path / "t.csv")
    assert table[["subset", "n", "score", "cache_bytes"]].to_numpy().tolist() == [
        ["all", 6, 0.5, 102.5],
        ["length=1024", 3, 0.0, 102.0],
        ["length=2048", 3, 1.0, 103.0],
        ["task=niah", 6, 0.5, 102.5],
    ]
    assert main(["collect", str(out), "-o", str(tmp_path / "t.csv"), "--by", "depth"]) == 2
    assert "--by depth is not a metadata key of any example (allowed: length, task)" in capsys.readouterr().err


# --- what cannot be read ----------------------------------------------------------------------------------------------


def lost(folder: Path) -> None:
    (folder / "samples.jsonl").unlink()
    (folder / "samples.jsonl").symlink_to("nowhere.jsonl")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: (folder / "config.yaml").write_text("run_id: ["), "is not a readable run (config.yaml: "),
        (lambda folder: (folder / "environment.json").write_text("{}"), "'hardware' is missing"),
        (lost, "(samples.jsonl: is missing or has no example)"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_and_does_not_stop_the_others(
    harm: Any, sentence: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path, "full", [sample(0, 1.0)], None)
    harm(folder)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        load_results(tmp_path)
    caplog.clear()
    write_run(tmp_path, "snapkv", [sample(0, 1.0)], 64)
    with caplog.at_level(logging.WARNING):
        assert [run.policy for run in load_results(tmp_path)] == ["snapkv"]
    (said,) = caplog.messages
    assert said.startswith(f"{folder} is skipped: ")
    assert sentence in said
    assert "\n" not in said


# --- for people -------------------------------------------------------------------------------------------------------
def test_the_table_shows_sizes_and_compares_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = {"prefill_seconds": None, "decode_seconds": None, "shared_prefill": 2}
    write_run(tmp_path, "full", [sample(i, 1.0, cache_bytes=4 * MIB, **shared) for i in range(20)], None)
    spared = {"spare_bytes": MIB // 2, **shared}
    write_run(tmp_path, "tova", [sample(i, float(i >= 10), **spared) for i in range(20)])
    runs = load_results(tmp_path)
    print_table([*runs, runs[0]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model pocket, task niah, 20 examples"
    assert max(map(len, lines)) <= 100
    first, second = (line.split() for line in lines if line.split()[:1] in (["full"], ["tova"]))
    assert first[:3] == ["full", "-", "1.000"]
    assert first[-5:] == ["25.0", "4.000", "100%", "-", "3.000"]
    assert second[:3] == ["tova", "64", "0.500"]
    assert second[4] == "-0.500"
    assert second[5].endswith(")*")  # ten of twenty lost: the interval leaves out zero
    assert second[-5:] == ["25.0", "1.000", "25.0%", "0.500", "3.000"], "spare bytes are not among those in use"


def test_runs_of_different_examples_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "full", [sample(0, 1.0)], None)
    write_run(tmp_path, "tova", [sample(0, 0.0)], seed=1)
    print_table(load_results(tmp_path))
    assert "vs full" not in capsys.readouterr().out


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Full, and two policies at budgets whose order as words is another; h2o loses ten of twenty at 64."""
    out = tmp_path / "runs"
    write_run(out, "full", [sample(i, 1.0) for i in range(20)], None)
    for budget in (1024, 64, 128):
        write_run(out, "h2o", [sample(i, float(i >= 10 or budget > 64)) for i in range(20)], budget)
    write_run(out, "tova", [sample(i, 0.0) for i in range(20)], 0.25)
    return out


def cells_of(table: str) -> list[list[str]]:
    """The cells of a Markdown table, line by line."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def written(folder: Path, name: str, *arguments: str) -> str:
    path = folder.parent / name
    assert main(["collect", str(folder), "-o", str(path), *arguments]) == 0
    return path.read_text(encoding="utf-8")


def test_the_difference_to_full_is_plain_numbers_and_rows_stand_by_budget_as_a_number(several: Path) -> None:
    written(several, "table.csv", "--by", "length")
    table = pd.read_csv(several.parent / "table.csv")
    whole = table[table["subset"] == "all"]
    assert whole["policy"].tolist() == ["full", "tova", "h2o", "h2o", "h2o"]
    assert whole["budget"].tolist()[1:] == [0.25, 64, 128, 1024]
    lost = whole.iloc[2]
    assert lost["score_vs_full"] == -0.5
    assert lost["score_vs_full_p"] == pytest.approx(2 * 0.5**10)  # McNemar: ten of ten discordant pairs to one side
    assert -0.8 < lost["score_vs_full_low"] < -0.5 < lost["score_vs_full_high"] < -0.2
    assert whole.loc[0, ["score_vs_full", "score_vs_full_p"]].isna().all()
    halves = table[(table["policy"] == "h2o") & (table["budget"] == 64) & (table["subset"] != "all")]
    assert halves["score_vs_full"].tolist() == [-0.5, -0.5]  # five of the ten of each length are lost
    assert halves["score_vs_full_p"].tolist() == pytest.approx([2 * 0.5**5] * 2)


def test_columns_are_in_the_given_order(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = written(several, "table.md", "--columns", "score, policy,budget")
    assert cells_of(chosen)[0] == ["score", "policy", "budget"]
    assert ["0.5", "h2o", "64"] in cells_of(chosen)
    assert written(several, "few.csv", "--columns", "policy,score").splitlines()[1] == "full,1.0"
    assert main(["collect", str(several), "-o", "t.md", "--columns", "scor"]) == 2
    assert "--columns scor is not a column: did you mean score or score_low?" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".md", ".txt", ".tex"])
def test_a_pivot_has_policies_down_and_budgets_across_as_numbers(several: Path, suffix: str) -> None:
    said = written(several, f"table{suffix}", "--pivot", "budget")
    places = [said.index(word) for word in ("no budget", "0.25", "64", "128", "1024")]
    assert places == sorted(places)
    assert "niah, 20 examples" in said
    if suffix == ".md":
        assert cells_of(said)[3:] == [
            ["tova", "-", r"0.000 (0.00-0.16)\*", "-", "-", "-"],
            ["h2o", "-", "-", r"0.500 (0.30-0.70)\*", "1.000 (0.84-1.00)", "1.000 (0.84-1.00)"],
        ]


def test_policies_by_tasks_have_scores_times_100_and_an_average_where_every_task_has_one(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    for policy, budget, rights in (("full", None, (4, 3)), ("h2o_x", 64, (1, 2)), ("tova", 64, (0,))):
        for task, right in zip(("niah", "qa"), rights, strict=False):
            write_run(out, policy, [sample(i, float(i < right)) for i in range(4)], budget, task)
    said = written(out, "table.tex", "--pivot", "task").splitlines()
    assert r"\caption{score x 100 by task: model pocket, 4 examples}" in said
    assert [line for line in said if line.endswith(r"\\") and "&" in line] == [
        r"policy & budget & niah & qa & average \\",
        r"full & - & 100.0 & 75.0 & 87.5 \\",
        r"h2o\_x & 64 & 25.0 & 50.0 & 37.5 \\",
        r"tova & 64 & 0.0 & - & - \\",
    ]


# --- which runs are compared, and how many examples that takes -------------------------------------------------------
@pytest.mark.parametrize("size", [None, 128])
def test_the_baseline_is_the_full_run_with_most_examples_in_common(tmp_path: Path, size: int | None) -> None:
    """Whatever its schedule: the full cache evicts nothing."""
    write_run(tmp_path, "full", [sample(i, 1.0) for i in range(6)], None, parts=described(None, size=size))
    whole = write_run(tmp_path, "full", [sample(i, 1.0) for i in range(10)], None, parts=described(None, decode="grow"))
    write_run(tmp_path, "full", [sample(i, 0.0, prompt_hash=f"o{i}") for i in range(20)], None, seed=0, version=3)
    write_run(tmp_path, "tova", [sample(i, float(i >= 6)) for i in range(10)])
    write_run(tmp_path, "tova", [sample(i, 1.0) for i in range(10)], dtype="bfloat16")
    *full, other, tova = load_results(tmp_path)
    assert [row.baseline for row in (*full, other)] == [None] * 4, "no full cache of its dtype"
    assert tova.baseline.folder == whole
    assert (tova.vs_full.mean, tova.vs_full.n) == (-0.6, 10)


@pytest.mark.parametrize(("n", "compared"), [(4, False), (5, True)])
def test_below_five_examples_nothing_is_compared(
    tmp_path: Path, n: int, compared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "full", [sample(i, 1.0) for i in range(n)], None)
    write_run(tmp_path, "tova", [sample(i, 0.0) for i in range(n)])
    print_table(load_results(tmp_path))
    said = capsys.readouterr().out
    assert ("-1.000 (" in said, "vs full needs at least 5 shared examples" in said) == (compared, not compared)
    assert ("vs full: on the same examples" in said) == compared, "the footer explains no column that is not there"
    assert frame(load_results(tmp_path))["score_vs_full"].notna().tolist() == [False, compared]


# --- names, unfinished runs, slices -----------------------------------------------------------------------------------
def test_names_are_plain_whatever_stands_beside_them_and_what_differs_has_columns(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for window in (16, 32):
        write_run(runs, "snapkv", [sample(0, 1.0)], parts=described("SnapKV", decode="grow", window=window))
    for lengths in ([512], [1024]):
        write_run(runs, "caote_snapkv", [sample(0, 1.0)], task_fields={"lengths": lengths})
    write_run(runs, "tova", [sample(0, 1.0)], generation={"decoding": "sampled"}, seed=3)
    found = load_results(runs)
    table = frame(found)
    assert table.groupby("policy")["n"].sum().to_dict() == {"snapkv": 2, "caote_snapkv": 2, "tova": 1}
    assert (set(table["model"]), set(table["task"])) == ({"pocket"}, {"niah"})
    assert table[table["policy"] == "snapkv"]["policy.scorer.window"].tolist() == [16, 32]
    assert table[table["policy"] == "caote_snapkv"]["task.lengths"].tolist() == ["[512]", "[1024]"]
    assert table[table["policy"] == "tova"]["generation.decoding"].tolist() == ["sampled"]
    assert {row.line for row in found if row.policy == "snapkv"} == {
        f"snapkv(scorer.window={n}) seed=0 (grow)" for n in (16, 32)
    }, "titles and legends combine them"
    assert [row.task_label for row in found if row.task_label != "niah"] == [
        "niah(lengths=[512])",
        "niah(lengths=[1024])",
    ]
    for name in ("table.csv", "table.parquet"):
        assert main(["collect", str(runs), "-o", str(tmp_path / name)]) == 0
        assert {row.line for row in Results(read_table(tmp_path / name))} >= {
            f"snapkv(scorer.window={n}) seed=0 (grow)" for n in (16, 32)
        }


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.csv", b"", "cannot be read (EmptyDataError"),
        ("empty.parquet", b"", "cannot be read (ArrowInvalid"),
        ("bytes.csv", b"\xff\xfe\x00", "cannot be read (UnicodeDecodeError"),
        (
            "scores.csv",
            b"task,policy,score\nniah,full,1.0\n",
            "has no column model, run_id, weights, policy_fields",
        ),
        ("header.csv", None, "has no row with subset=all"),
        ("texts.csv", None, "column score has a value that is not a number"),
        ("fields.csv", None, "policy_fields and task_fields must be JSON objects"),
        ("infinite.csv", None, "cannot be read (OverflowError"),
    ],
)
def test_a_table_of_another_kind_is_refused_with_the_command_that_writes_one(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    if content is None:
        table = pd.read_csv(Path(__file__).parents[2] / "results/pocket/ruler_1024.csv")[:2]
        changes = {"texts.csv": {"score": "high"}, "fields.csv": {"policy_fields": "[1]"}}
        table = table.assign(**changes.get(name, {}), **({"budget": float("inf")} if name == "infinite.csv" else {}))
        table[: 0 if name == "header.csv" else 2].to_csv(tmp_path / name, index=False)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        read_table(tmp_path / name)
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path / name} is not a table of runs: ")
    assert reason in message
    assert message.endswith("; `kvbench results collect FOLDER -o runs.csv` writes one")


def test_names_in_a_table_of_an_older_version_are_plain() -> None:
    table = Path(__file__).parents[2] / "results" / "pocket" / "ruler_1024.csv"
    found = {row.policy for row in read_table(table)}
    assert found >= {"full", "snapkv", "caote_snapkv", "cake"}
    assert not [name for name in found if "(" in name]
