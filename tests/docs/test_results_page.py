"""The page of all results: every row of every table, in the table of its track, with its command and examples."""

import csv
import re
from pathlib import Path

import pytest
import results_page
import yaml
from command_lines import composed
from parameters import few_fast
from results_page import TRACKS, Row

from kvbench.config.presets import make_policy

RESULTS = Path(__file__).parents[2] / "results"


def row(policy: str, score: float, budget: float | None = 64, **numbers: float) -> Row:
    return Row("known", "pocket", "float32", "needles", "niah", policy, budget, "", "", {"score": score, **numbers})


def test_every_row_of_every_table_is_on_the_page_once_and_full_in_every_track_of_its_table() -> None:
    keys = [(one.track, one.table, one.model, one.task, one.policy, one.budget) for one in results_page.rows()]
    assert len(set(keys)) == len(keys)
    shown = {key[2:] for key in keys}
    for file in sorted(RESULTS.glob("*/pack.yaml")):
        pack = yaml.safe_load(file.read_text(encoding="utf-8"))
        for table in {*pack["tables"]} - {"ablation", "control"}:
            prompts = pack["tables"][table].get("prompts")  # other ones than those of other tables of the task
            for line in csv.DictReader((file.parent / f"{table}.csv").read_text(encoding="utf-8").splitlines()):
                budget = float(line["budget"]) if line["budget"] else None
                task = line["task"] + (f", {prompts}" if prompts else "")
                assert (pack["model"], task, line["policy"], budget) in shown
    assert {one.track for one in results_page.rows() if one.policy == "full"} == {*TRACKS}


def test_tracks_never_mix() -> None:
    for one in results_page.rows():
        if one.policy != "full":
            assert (one.budget is None) == (one.track == "quantized"), one
            assert not (one.table.endswith("_context") and one.track == "known"), one


def test_official_variants_have_a_row_of_their_own_beside_those_of_kvbench() -> None:
    official = {(one.model, one.task, one.policy) for one in results_page.rows() if one.policy.endswith(" (official)")}
    own = {(one.model, one.task, one.policy) for one in results_page.rows()}
    assert len(official) > 10
    assert {(model, task, policy.removesuffix(" (official)")) for model, task, policy in official} <= own


def test_equal_scores_share_a_rank_and_floors_and_ceilings_have_none() -> None:
    some = [row(policy, score) for policy, score in (("a", 0.9), ("b", 0.5), ("c", 0.5), ("d", 0.1), ("random", 0.95))]
    assert [*results_page.ranks([*some, row("oracle_topk", 1.0)]).values()] == [
        "1",
        "2=",
        "2=",
        "4",
        "floor",
        "ceiling",
    ]


def test_a_policy_is_safe_from_the_last_size_that_loses_less_than_a_point() -> None:
    sizes = [(8.0, -0.001, -0.004), (4.0, 0.0, -0.009), (2.0, -0.01, -0.03)]
    some = [
        row("a", 1.0, mib, cache_mib=mib, vs_full=mean, vs_full_low=low, vs_full_high=0.01, n=500)
        for mib, mean, low in sizes
    ]
    assert [*results_page.safe_sizes(some).values()] == [4.0]


def test_the_number_of_safe_policies_is_that_of_the_tables() -> None:
    assert re.fullmatch(r"\d+ of \d+ policies on a task have one\.", results_page.counts())
    table = "".join(map(results_page.track_table, TRACKS))
    assert table.count("<tr data-model") == len(results_page.rows())
    assert table.count("<details>") == len(results_page.rows())


def commands() -> list[str]:
    """A command of each table, and of each remark behind a policy's name."""
    found = {(one.table, one.model, one.policy.partition(" (")[2]): one.command for one in results_page.rows()}
    return sorted(found.values())


@pytest.mark.parametrize("command", few_fast(commands(), commands()[::8], pytest.mark.slow("composes every command")))
def test_the_command_of_a_row_asks_for_its_policy(command: str) -> None:
    words = command.removeprefix("kvbench ").split()
    fields = dict(word.removeprefix("+").split("=", 1) for word in words)
    run = composed(*words)
    assert run.names["policy"] == fields["policy"]
    assert run.names["task"] == fields["task"]
    for name, value in fields.items():
        if name.startswith("policy."):
            make_policy(fields["policy"], 512, **{name.removeprefix("policy."): yaml.safe_load(value)})


def test_examples_of_a_run_have_scores_and_hashes_of_prompts() -> None:
    found = results_page.samples()
    linked = {one.run_id for one in results_page.rows() if one.run_id in found}
    assert len(linked) > 500
    for run in sorted(linked)[::100]:
        lines = list(csv.DictReader(found[run].splitlines()))
        assert all(re.fullmatch(r"[0-9a-f]{64}", line["prompt_hash"]) for line in lines), run
        assert all(line.get("score") or line.get("nll") for line in lines), run
