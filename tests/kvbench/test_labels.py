"""Rows are named by what ran: the fields that are not the preset's, those that differ, and what keeps everything."""

import copy
from pathlib import Path
from typing import Any

import pytest

from kvbench.analysis.load import load_results
from kvbench.cli import main
from kvbench.identity.labels import Naming, columns, differing, keeps_all, names
from kvbench.report.table import print_table

PARTS = "kvbench.policies"
IDENTITY: dict[str, Any] = {
    "version": 2,
    "model": {"sha256": "abc"},
    "dtype": "float32",
    "policy": {
        "class": f"{PARTS}.policy.Policy",
        "scorer": {"class": f"{PARTS}.scorers.snapkv.SnapKV", "window": 32, "kernel": 7},
        "value": None,
        "filter": None,
        "store": {"class": f"{PARTS}.stores.dense.Dense"},
        "schedule": {"class": f"{PARTS}.schedule.Prompt", "decode": "grow", "late": False},
    },
    "budget": 64,
    "task": {"class": "kvbench.tasks.niah.Niah", "name": "niah", "lengths": [2048]},
    "seed": 0,
    "generation": {"decoding": "greedy", "max_prompt_tokens": None},
    "code": "c0de",
}


def ran(**fields: object) -> dict[str, Any]:
    """The identity with fields set by their dotted names, written with __ for the dot."""
    identity = copy.deepcopy(IDENTITY)
    for name, value in fields.items():
        *above, last = name.split("__")
        part = identity
        for key in above:
            part = part[key]
        part[last] = value
    return identity


def naming(*changed: str, policy: str = "snapkv", reads: str | None = None) -> Naming:
    return Naming(policy, "pocket", "niah", changed, reads)


def labels(*rows: tuple[Naming, dict[str, Any]]) -> list[dict[str, str]]:
    """All that a table says of its rows."""
    keys = differing(rows)
    return [{**names(n, i, k), **columns(i, k)} for (n, i), k in zip(rows, keys, strict=True)]


def test_a_preset_as_it_is_has_its_own_name_and_says_whether_decoding_grows() -> None:
    assert names(naming(), ran()) == {"policy": "snapkv (grow)", "model": "pocket", "task": "niah"}
    assert names(naming(reads="m=4"), ran())["policy"] == "snapkv (m=4)"


def test_every_field_that_is_not_the_presets_stands_behind_its_name() -> None:
    got = names(naming("policy.scorer.window", "task.lengths"), ran(policy__scorer__window=16, task__lengths=[512]))
    assert got == {"policy": "snapkv(scorer.window=16) (grow)", "model": "pocket", "task": "niah(lengths=[512])"}
    no_value = names(naming("policy.value", policy="caote_snapkv"), ran())
    assert no_value["policy"] == "caote_snapkv(value=null) (grow)"
    own = names(naming("policy.scorer"), ran(policy__scorer={"class": "mine.SnapKV"}))
    assert own["policy"] == "snapkv(scorer=mine.SnapKV) (grow)", "another module's class is not taken for ours"


def test_a_schedule_is_told_in_words_and_a_cut_prompt_behind_the_model() -> None:
    blocks = {"class": f"{PARTS}.schedule.Blocks", "size": 128, "decode": "evict", "order": "evict_then_attend"}
    changed = ("policy.schedule", "policy.schedule.size", "policy.schedule.decode", "policy.schedule.order")
    got = names(naming(*changed), ran(policy__schedule=blocks))
    assert got["policy"] == "snapkv(schedule.order=evict_then_attend) (blocks of 128, evict)"
    cut = names(naming("generation.max_prompt_tokens"), ran(generation__max_prompt_tokens=512))
    assert cut["model"] == "pocket(max_prompt_tokens=512)"


def test_what_rewrites_its_prompt_keeps_not_all_of_it_under_the_fields_older_name_too() -> None:
    gemfilter = {"class": "GemFilter"}
    assert not keeps_all(ran(policy__scorer=None, policy__pre_pass=gemfilter))
    assert not keeps_all(ran(policy__scorer=None, policy__filter=gemfilter))


def test_rows_that_differ_in_a_field_all_show_it_the_presets_value_too() -> None:
    narrow = naming("policy.scorer.window"), ran(policy__scorer__window=16)
    tova = naming(policy="tova"), ran(policy__scorer={"class": "TOVA"})
    got = labels((naming(), ran()), narrow, tova)
    assert [row["policy"] for row in got] == [
        *("snapkv(scorer.window=32) (grow)", "snapkv(scorer.window=16) (grow)", "tova (grow)")
    ]


def test_where_schedules_differ_every_row_that_evicts_shows_its_own() -> None:
    blocks = {"class": f"{PARTS}.schedule.Blocks", "size": 128, "decode": "evict"}
    caote = naming(policy="caote_snapkv"), ran(policy__schedule=blocks)
    full = naming(policy="full"), ran(policy__scorer=None, budget=None)
    got = labels(full, (naming(), ran()), caote)
    assert [row["policy"] for row in got] == ["full", "snapkv (prompt, grow)", "caote_snapkv (blocks of 128, evict)"]
    assert labels(full, caote)[1]["policy"] == "caote_snapkv (evict)"


def test_the_command_line_collect_and_baselines_say_what_ran(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        f"model={tiny_model}",
        "task.lengths=[300]",
        "task.depths=[0.5]",
        "task.repeats=1",
        "out=runs",
        "budget=40",
    ]
    for arguments in (
        ["policy=snapkv", "policy.scorer=null"],
        ["policy=caote_snapkv", "policy.value=null"],
        ["-m", "policy=snapkv", "policy.scorer.window=16,32"],
    ):
        assert main([*arguments, *small]) == 0
    printed = capsys.readouterr().out
    windows = (f"snapkv(scorer.window={n})" for n in (16, 32))
    for label in ("snapkv(scorer=null) = full", "caote_snapkv(value=null)", *windows):
        assert f"\n{label} " in printed
    assert "schedules differ" not in printed
    runs = load_results(tmp_path / "runs")
    shown = {"snapkv(scorer=null) = full", "caote_snapkv(value=null) (blocks of 128, evict)"}
    assert shown < {run.policy for run in runs}
    assert {run.slug for run in runs} == {"snapkv", "caote_snapkv"}
    assert all(run.task.startswith("niah(lengths=[300]") for run in runs)
    print_table(runs)
    mixed = capsys.readouterr().out
    notes = " ".join(mixed.split())
    assert "schedules differ (blocks of 128, prompt): what evicts at the end of the prompt has seen" in notes
    assert "decoding differs (evict, grow)" in notes
    assert [run.cache_share for run in runs if keeps_all(run.identity)] == [1.0], "full is 100% of full"
    assert sum(run.baseline is not None for run in runs) == 3, "the full cache is known by what it kept"
