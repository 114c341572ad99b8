"""Many cells at once: what a sweep writes is what each of its runs writes alone, in step, whatever happens to one."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_cells import cells_of, lines, results
from torch import Tensor

from kvbench.engine import batch as rows
from kvbench.engine.compute import compute_runs, grouped
from kvbench.engine.run_writer import RunCallback
from kvbench.models import devices as device_memory
from kvbench.policies.allocators.uniform import Uniform
from kvbench.policies.observation import Observation, State
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.knorm import KNorm
from kvbench.report.table import results_table
from kvbench.results.loading import read_result
from kvbench.results.samples import Sample
from kvbench.run.run import Run
from kvbench.tools.diagnose import runs_of

Build = Callable[..., list[Run]]


@pytest.fixture
def cells(tiny_model: Path, tmp_path: Path) -> Build:
    """Cells of some policies on the tiny model, in a folder of their own."""

    def build(policies: str, *fields: str, out: str = "runs", limit: int = 4, **how: Any) -> list[Run]:
        return cells_of(tiny_model, tmp_path / out, policies, f"limit={limit}", *fields, **how)

    return build


def completed(errors: Sequence[Exception | None]) -> None:
    assert not any(errors), errors


@dataclass(frozen=True)
class Generous(Uniform):
    """Gives every KV head a token more than the layer has, of a prompt longer than `after`."""

    after: int = 0

    def heads(self, layer: int, ranking: Ranking, budgets: Sequence[int]) -> Tensor | None:
        if int(ranking.seen.max()) <= self.after:
            return None
        return (ranking.seen.new_tensor(budgets) + 1)[:, None].expand(-1, ranking.scores.shape[1])


@dataclass(frozen=True)
class Hungry(KNorm):
    """Needs more memory than there is, for a prompt longer than `after`."""

    after: int = 0

    def score(self, observation: Observation, state: State) -> Tensor:
        if int(observation.seen.max()) > self.after:
            torch.empty(1 << 50, dtype=torch.uint8)  # a thousand TiB
        return super().score(observation, state)


def with_part(cell: Run, **part: Any) -> Run:
    return replace(cell, policy=replace(cell.policy, **part), policy_name="own")


def test_every_run_of_a_sweep_writes_equal_samples_alone(cells: Build) -> None:
    """Whole prompts, blocks, pre-passes, a quantised store: whatever shares and what cannot."""
    policies = "full,snapkv,h2o,kivi_g8_r8,gemfilter,sirllm,kvzip"
    fields = ("policy.pre_pass.layer=1",)
    some = [p for p in policies.split(",") if p != "gemfilter"]
    both = [
        cells(",".join(some), rows=rows, out=out, limit=2) + cells("gemfilter", *fields, rows=rows, out=out, limit=2)
        for rows, out in ((None, "shared"), (1, "alone"))
    ]
    for these in both:
        completed(compute_runs(these))
    for shared, alone in zip(*both, strict=True):
        assert results(shared) == results(alone), shared.policy_name
        assert shared.folder.name == alone.folder.name
    assert all(line["rows_in_flight"] == 2 * len(both[0]) for cell in both[0] for line in lines(cell)[:1])


def test_samples_say_how_they_ran_and_give_seconds_only_where_they_are_theirs(cells: Build) -> None:
    shared, alone = cells("full,snapkv", limit=3), cells("full,snapkv", limit=3, rows=1, out="alone")
    completed(compute_runs([*shared, *alone]))
    for line in lines(shared[1]):
        assert (line["shared_prefill"], line["rows_in_flight"]) == (2, 6)
        assert line["prefill_seconds"] is line["decode_seconds"] is line["device_peak_bytes"] is None
    for line in lines(alone[1]):
        assert (line["shared_prefill"], line["rows_in_flight"]) == (1, 1)
        assert line["prefill_seconds"] > 0
    runs = [read_result(cell.folder) for cell in (shared[1], alone[1])]
    assert [run.n_shared for run in runs] == [3, 0]
    assert runs[0].prefill_seconds is runs[0].decode_ms_per_token is None
    assert [*results_table(runs).frame["prefill s"]] == ["shared", f"{runs[1].prefill_seconds:.3f}"]
    assert any(
        note == "Times are not shown for batched runs. Use engine.rows=1 to time each run alone."
        for note in results_table(runs).notes
    )
    assert not any("engine.rows=1" in note for note in results_table(runs[1:]).notes)
    (session,) = json.loads((shared[1].folder / "engine.json").read_text())["sessions"]
    assert session["runs"] == [cell.folder.name for cell in shared]
    # one prefill an example, two runs each; a token of every row is the prefill's, the others are decoded
    assert (session["prefills"], session["rows"], session["most_rows"]) == (3, 6, 6)
    assert session["decoded_tokens"] == sum(line["decode_steps"] for cell in shared for line in lines(cell))
    assert not (alone[1].folder / "engine.json").exists()


def test_runs_that_differ_in_more_than_their_policy_share_nothing_but_the_model(cells: Build) -> None:
    some = [*cells("full,tova"), *cells("full", "seed=1"), *cells("tova", "task.max_new_tokens=7")]
    assert [[run.run_id for run in group] for group in grouped(some, RunCallback())] == [
        [some[0].run_id, some[1].run_id],
        [some[2].run_id],
        [some[3].run_id],
    ]


def test_runs_that_are_ahead_wait_for_the_others_and_keep_what_they_have(cells: Build) -> None:
    some = cells("full,snapkv,tova", rows=3)
    completed(compute_runs([replace(some[1], limit=2), replace(some[2], limit=1)]))
    before = [(cell.folder / "samples.jsonl").read_bytes() for cell in some[1:]]
    completed(compute_runs(some))
    for cell, kept in zip(some[1:], before, strict=True):
        assert (cell.folder / "samples.jsonl").read_bytes().startswith(kept)
    assert [line["shared_prefill"] for line in lines(some[0])] == [1, 2, 3, 3]
    alone = cells("full,snapkv,tova", rows=1, out="alone")
    compute_runs(alone)
    assert [results(cell) for cell in some] == [results(cell) for cell in alone]


def uneven(cells: Build, policies: str, **how: Any) -> list[Run]:
    """Cells of three examples, the second of which alone has a prompt of more than 450 tokens."""
    return cells(policies, "task.lengths=[300,600,400]", "task.depths=[0.5]", "task.repeats=1", limit=3, **how)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"allocator": Generous(after=450)}, "BudgetError: "),
        ({"scorer": Hungry(after=450)}, "tried to allocate 1125899906842624 bytes"),
    ],
    ids=("budget", "memory"),
)
def test_a_run_that_fails_in_one_example_has_the_others(cells: Build, part: dict[str, Any], said: str) -> None:
    """It breaks its budget, or finds no memory even alone."""
    knorm, tova = uneven(cells, "knorm,tova")
    broken = with_part(knorm, **part)
    completed(compute_runs([broken, tova, knorm]))
    first, failed, last = results(broken)
    assert said in failed["error"]
    assert "\n" not in failed["error"]
    assert (failed["score"], failed["output"], failed["kept_tokens"]) == (None, None, None)
    assert [line["error"] for line in lines(tova)] == [None] * 3
    alone = [results(knorm)[i] for i in (0, 2)]
    assert [{**line, "peak_bytes": 0} for line in (first, last)] == [{**line, "peak_bytes": 0} for line in alone]


def test_an_exception_in_one_run_does_not_stop_the_others(
    cells: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only sirllm asks the head of the model, which lacks something."""

    def lacking(*_: object) -> Tensor:
        raise AttributeError("the output has no router_logits")

    monkeypatch.setattr("kvbench.engine.logits.head_logits", lacking)
    knorm, sirllm, tova = cells("knorm,sirllm,tova", limit=2)
    first, second, third = compute_runs([knorm, sirllm, tova])
    assert isinstance(second, AttributeError)
    completed([first, third])
    assert "a batch failed" not in caplog.text
    assert {line["rows_in_flight"] for line in lines(knorm)} == {4}


def test_a_run_that_fails_only_in_a_batch_is_completed_alone(cells: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several rows break one of the runs; alone it has all of its examples."""
    some = cells("full,knorm,tova", limit=4)
    step = rows.DecodeBatch.step

    def breaking(flight: rows.DecodeBatch) -> list[Any]:
        crowded = flight.in_flight > 3
        ended = step(flight)
        broken = [row for row in flight.sequences if crowded and row.policy is some[1].policy]
        for row in broken:
            row.error = RuntimeError("not beside others")
        flight.drop(broken)
        return [*ended, *broken]

    monkeypatch.setattr(rows.DecodeBatch, "step", breaking)
    completed(compute_runs(some))
    assert len(lines(some[1])) == 4
    assert {line["rows_in_flight"] for line in lines(some[1])} == {1}


def test_a_batch_out_of_memory_is_retried_with_fewer_sequences(
    cells: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device of 3 rows: calls of the model with more fail as PyTorch says it."""
    call = rows.next_logits

    def small(model: Any, ids: Tensor, *given: Any) -> Tensor:
        if len(ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(model, ids, *given)

    monkeypatch.setattr(rows, "next_logits", small)
    some = cells("full,snapkv,tova", limit=4)
    completed(compute_runs(some))
    assert "memory ran out with 6 sequences in flight, now at most 3" in caplog.text
    assert "a batch failed" not in caplog.text
    (session,) = json.loads((some[0].folder / "engine.json").read_text())["sessions"]
    assert session["rows"] > 12, "some entered again"
    alone = cells("full,snapkv,tova", limit=4, rows=1, out="alone")
    compute_runs(alone)
    assert [results(cell) for cell in some] == [results(cell) for cell in alone]


def test_a_context_is_read_once_for_all_runs_and_all_that_is_asked_about_it(tiny_model: Path, tmp_path: Path) -> None:
    first, second = "The mill by the weir is red. " * 6, "The barn on the hill is green. " * 5
    asked = [(first, "What is red?"), (first, "Where?"), (first, "What colour is the mill?"), (second, "Where?")]
    rows = [{"context": c, "question": q, "answers": ["red"], "max_new_tokens": 3} for c, q in asked]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = (f"task.data_dir={tmp_path}/asked.jsonl", "compress=context")
    given = [f"model={tiny_model}", "policy=full,snapkv,tova", "task=context_question", *task, "budget=40"]
    shared, few, alone = (
        runs_of([*given, "limit=4", "device=cpu", f"out={tmp_path / out}", f"engine.rows={rows}"])
        for out, rows in (("shared", "null"), ("few", "7"), ("alone", "1"))
    )
    completed(compute_runs([*shared, *few, *alone]))
    assert [results(cell) for cell in shared] == [results(cell) for cell in few] == [results(cell) for cell in alone]
    assert [line["shared_prefill"] for line in lines(shared[0])] == [9, 9, 9, 3]
    assert [line["shared_prefill"] for line in lines(few[0])] == [6, 6, 3, 3]  # no more than 7 rows: two questions
    (session,) = json.loads((shared[0].folder / "engine.json").read_text())["sessions"]
    assert (session["prefills"], session["rows"]) == (2, 12)


class Told(RunCallback):
    """Notes what it is told; interrupts when told of a certain number of examples."""

    def __init__(self, after: int | None = None) -> None:
        self.heard: list[tuple[str, int | str]] = []
        self._after = after

    def finished(self, cell: Run, sample: Sample) -> None:
        """Note it."""
        self.heard.append((cell.policy_name, sample.index))
        if len(self.heard) == self._after:
            raise KeyboardInterrupt

    def ended(self, cell: Run, error: Exception | None) -> None:
        """Note it."""
        self.heard.append((cell.policy_name, "ended"))


def test_an_interrupt_leaves_whole_files_with_all_that_was_computed(cells: Build) -> None:
    some = cells("full,tova", limit=4)
    with pytest.raises(KeyboardInterrupt):
        compute_runs(some, Told(after=3))
    assert sum(len(lines(cell)) for cell in some) == 3
    assert not any((cell.folder / "metrics.json").exists() for cell in some)
    completed(compute_runs(some))


class Killing(RunCallback):
    """Kills the process, as nothing can be caught, once five examples were told."""

    def __init__(self) -> None:
        self._finished = 0

    def finished(self, cell: Run, sample: Sample) -> None:
        self._finished += 1
        if self._finished == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_sweep_has_all_variants_for_the_same_examples_and_continues(cells: Build) -> None:
    """One of them reads each prompt twice (kvzip)."""
    killed = cells("full,snapkv,tova,kvzip", out="killed", rows=6)
    child = os.fork()
    if child == 0:
        compute_runs(killed, Killing())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    kept = [(cell.folder / "samples.jsonl").read_bytes() for cell in killed]
    counts = [text.count(b"\n") for text in kept]
    assert (min(counts), max(counts)) == (1, 2)
    completed(compute_runs(killed))
    whole = cells("full,snapkv,tova,kvzip", out="whole")
    completed(compute_runs(whole))
    for one, other, before in zip(killed, whole, kept, strict=True):
        assert (one.folder / "samples.jsonl").read_bytes().startswith(before)
        assert results(one) == results(other)


def test_free_memory_is_no_more_than_the_container_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    monkeypatch.setattr(device_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    assert device_memory.free(torch.device("cpu")) == 2048 * 1024
    for name, text in (("max", "1000000"), ("current", "900000"), ("stat", "anon 5\ninactive_file 300000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert device_memory.free(torch.device("cpu")) == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory.free(torch.device("cpu")) == 2048 * 1024
