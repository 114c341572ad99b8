"""The engine beside lone runs: one prompt read once for many policies and budgets, all of which decode as one batch.

Three kinds of cells. A round takes every variant of one prompt both ways, half of the lone runs before the rows and
half after, so that a machine which grows slower or faster favours neither. A step is timed against the rows in it:
variants of one example, and examples of one variant. Where kvpress is installed, rounds of the variants it has too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request
from kvbench.policies.policy import Policy
from kvbench.report.figures.curves import Curve
from kvbench.tools.bench import pressed
from kvbench.tools.bench.about import ABOUT
from kvbench.tools.bench.bench import Bench, Row
from kvbench.tools.bench.clock import Clock, paired_ratio, spread
from kvbench.tools.bench.cost import alone, together
from kvbench.tools.bench.generating import LEAST_BUDGET, LEAST_LENGTH, LEAST_NEW
from kvbench.tools.bench.journal import Cell, Record, why_not
from kvbench.tools.bench.providers import ours, random_ids
from kvbench.tools.bench.settings import scaled

POLICIES = ("streamingllm", "snapkv", "tova", "h2o", "caote_snapkv", "cake")
BUDGETS = (64, 128, 256, 512, 1024, 2048)
LENGTHS, NEW, ROUNDS = (4096,), 64, 3
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128)
SETTLING, TIMED = 4, 8  # steps of a cell: until rows of one shape have joined, and those that are timed
WARM_UP = 256  # prompt tokens of the untimed run on a CPU; a GPU takes a whole prompt, which compiles what it needs
SIDES = ("lone_runs", "rows")
THEIRS = ("kvpress_runs", "rows")
KINDS = ("variants of one example", "examples of one variant")


def one_round(bench: Bench, policies: Sequence[Policy], length: int, new: int) -> Record:
    """Every variant of one prompt both ways, after both have warmed up."""
    model = _model(bench)
    ids = random_ids(model, 1, length)
    short = Request(ids[:, : _warm_up(bench, length)], LEAST_NEW)
    whole, half = Request(ids, new), len(policies) // 2
    alone(model, short, policies)
    together(model, short, policies)
    before = alone(model, whole, policies[:half])
    rows = together(model, whole, policies)
    lone = before + alone(model, whole, policies[half:])
    return {
        **{side: cost.figures() for side, cost in zip(SIDES, (lone, rows), strict=True)},
        "variants": len(policies),
        "equal_answers": lone.equal_answers(rows),
    }


def _kvpress_round(bench: Bench, pairs: Sequence[pressed.Pressed], length: int, new: int) -> Record:
    return pressed.one_round(bench.built.model, pairs, length, new, _warm_up(bench, length))


def steps(bench: Bench, policies: Sequence[Policy], kind: str, rows: int, length: int) -> Record:
    """Milliseconds of some decoding steps with so many rows in flight."""
    model = _model(bench)
    flight, new = DecodeBatch(model), SETTLING + TIMED + 1
    if kind == KINDS[0]:
        several = [policies[index % len(policies)] for index in range(rows)]
        flight.admit(Request(random_ids(model, 1, length), new), several)
    else:
        for index in range(rows):
            flight.admit(Request(random_ids(model, 1, length + index), new), policies[:1])
    for _ in range(SETTLING):
        flight.step()
    clock = Clock(bench.device)
    clock.mark()
    for _ in range(TIMED):
        flight.step()
        clock.mark()
    return {"step_ms": clock.laps(), "held_bytes": flight.nbytes}


def _warm_up(bench: Bench, length: int) -> int:
    """Prompt tokens of the untimed runs."""
    return length if bench.device.type == "cuda" else min(WARM_UP, length)


def _model(bench: Bench) -> PreTrainedModel:
    bench.built.model.set_attn_implementation("kvbench")
    return bench.built.model


@dataclass(frozen=True)
class SweepProtocol:
    """Cells are rounds of a sweep, and steps with so many rows."""

    name: str = "sweep"
    about: str = ABOUT["sweep"]
    series: str = "sweep"
    model: str = "llama31_8b_instruct"

    def remarks(self, bench: Bench) -> list[str]:
        variants = self._policies(bench)
        sizes = ", ".join(f"{length}" for length in self._lengths(bench))
        how = f", decode={bench.settings.decode}" if bench.settings.decode else ""
        return [
            f"{len(variants)} variants ({', '.join(self._slugs(bench))} at budgets {self._budgets(bench)}) of one "
            f"prompt of {sizes} tokens, {self._new(bench)} new ones each{how}; {self._rounds(bench)} rounds, medians",
            "lone runs: greedy generation, one after the other; rows: one prefill for all, then one batch; half of the "
            "lone runs stand before the rows of their round, half after",
            f"steps: prompts of about {self._short(bench)} tokens; examples of one variant are those of "
            f"{variants[0].name} at its smallest budget",
            *self._about_kvpress(bench),
        ]

    def _about_kvpress(self, bench: Bench) -> Iterator[str]:
        names, absent = self._rivals(bench)
        if names:
            both = ", ".join(name.removeprefix("kvpress_") for name in names)
            yield f"kvpress: {both} at the same budgets, which grow after the prompt; the rows beside them are these"
        elif absent:
            yield f"kvpress is left out: {absent}"

    def identity(self, bench: Bench) -> dict[str, Any]:
        names = list(self._slugs(bench))
        return {"policies": names, "budgets": self._budgets(bench), "decode": bench.settings.decode}

    # --- what is measured ------------------------------------------------------------------------------------------
    def _slugs(self, bench: Bench) -> Sequence[str]:
        return POLICIES if bench.settings.policies is None else bench.settings.policies

    def _budgets(self, bench: Bench) -> list[int]:
        return list(dict.fromkeys(scaled(budget, bench.scale, LEAST_BUDGET) for budget in BUDGETS))

    def _policies(self, bench: Bench) -> list[Policy]:
        """Every policy at every budget, the smallest budgets first; one that keeps everything once."""
        found = []
        for index, budget in enumerate(self._budgets(bench)):
            for slug in self._slugs(bench):
                policy = ours(slug, budget, schedule="prompt", decode=bench.settings.decode).policy
                assert policy is not None
                if policy.evicts or index == 0:
                    found.append(policy)
        return found

    def _lengths(self, bench: Bench) -> list[int]:
        lengths = bench.settings.lengths or LENGTHS
        return list(dict.fromkeys(scaled(length, bench.scale, LEAST_LENGTH) for length in lengths))

    def _short(self, bench: Bench) -> int:
        return scaled(1024, bench.scale, LEAST_LENGTH)

    def _new(self, bench: Bench) -> int:
        return scaled(bench.settings.new_tokens or NEW, bench.scale, LEAST_NEW)

    def _rounds(self, bench: Bench) -> int:
        return bench.settings.repeats or ROUNDS

    def _in_flight(self, bench: Bench) -> list[int]:
        counts = bench.settings.batches or [max(1, rows // bench.scale) for rows in IN_FLIGHT]
        return sorted(dict.fromkeys(counts))

    def _rivals(self, bench: Bench) -> tuple[list[str], str]:
        return pressed.chosen(bench.settings.rivals, bench.settings.policies)

    def cells(self, bench: Bench) -> list[Cell]:
        """kvpress comes last: it changes the process it is imported into."""
        return [*self._round_cells(bench), *self._step_cells(bench), *self._kvpress_cells(bench)]

    def _round_cells(self, bench: Bench) -> Iterator[Cell]:
        policies, new = self._policies(bench), self._new(bench)
        for length in self._lengths(bench):
            for number in range(self._rounds(bench)):
                yield Cell(_round_key(length, new, number), partial(one_round, bench, policies, length, new))

    def _step_cells(self, bench: Bench) -> Iterator[Cell]:
        few = [policy for policy in self._policies(bench) if (policy.budget or 0) <= 512]
        for kind in KINDS:
            smaller = None
            for rows in self._in_flight(bench):
                key = _step_key(kind, rows, self._short(bench))
                yield Cell(key, partial(steps, bench, few, kind, rows, self._short(bench)), bigger_than=smaller)
                smaller = key

    def _kvpress_cells(self, bench: Bench) -> Iterator[Cell]:
        pairs, new = pressed.variants(self._rivals(bench)[0], self._budgets(bench)), self._new(bench)
        for length in self._lengths(bench) if pairs else ():
            for number in range(self._rounds(bench)):
                run = partial(_kvpress_round, bench, pairs, length, new)
                yield Cell(f"kvpress, {_round_key(length, new, number)}", run, foreign=True)

    # --- what it says ----------------------------------------------------------------------------------------------
    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        lengths = self._lengths(bench)
        rounds = [row for length in lengths for row in self._of_length(bench, length, found)]
        kvpress = [row for length in lengths for row in self._of_kvpress(bench, length, found)]
        return [*rounds, *kvpress, *self._of_steps(bench, found)]

    def _of_length(self, bench: Bench, length: int, found: Mapping[str, Record]) -> Iterator[Row]:
        keys = [_round_key(length, self._new(bench), number) for number in range(self._rounds(bench))]
        yield from self._of_rounds(bench, length, [found[key] for key in keys if key in found], SIDES, "sweep")

    def _of_kvpress(self, bench: Bench, length: int, found: Mapping[str, Record]) -> Iterator[Row]:
        """The same figures of the variants that kvpress has too, or why there are none."""
        names, absent = self._rivals(bench)
        if not names and absent:
            task = f"kvpress_{length}_{self._new(bench)}"
            yield _row(bench, "kvpress_runs", task, "total_seconds", None, length, note=absent)
        keys = [f"kvpress, {_round_key(length, self._new(bench), number)}" for number in range(self._rounds(bench))]
        yield from self._of_rounds(bench, length, [found[key] for key in keys if key in found], THEIRS, "kvpress")

    def _of_rounds(
        self, bench: Bench, length: int, rounds: Sequence[Record], sides: tuple[str, str], kind: str
    ) -> Iterator[Row]:
        """sides: runs one after the other, then the rows of the same variants."""
        new, (lone, _) = self._new(bench), sides
        task = f"{kind}_{length}_{new}"
        done = [record for record in rounds if "rows" in record]
        if not done:
            if rounds:
                yield _row(bench, "rows", task, "total_seconds", None, length, note=why_not(rounds[0]))
            return
        totals = {side: [r[side]["prefill_ms"] + r[side]["decode_ms"] for r in done] for side in sides}
        variants = done[0]["variants"]
        for side in sides:
            calls = (new - 1) * (variants if side == lone else 1)
            held = done[0][side]["held_bytes"] / (variants if side == lone else 1)
            decode = spread([r[side]["decode_ms"] for r in done]).p50
            share = bench.share_of_limit(decode / calls, held, done[0])
            yield _timed(bench, side, task, "prefill_seconds", [r[side]["prefill_ms"] for r in done], length)
            yield _timed(bench, side, task, "decode_seconds", [r[side]["decode_ms"] for r in done], length, share)
            yield _timed(bench, side, task, "total_seconds", totals[side], length)
            yield _row(bench, side, task, "held_gib", done[0][side]["held_bytes"] / 2**30, length)
        ratio = paired_ratio(totals["rows"], totals[lone])
        more: dict[str, Any] = ratio.as_dict()
        yield _row(bench, "rows", task, f"ratio_to_{lone}", ratio.p50, length, note=f"{variants} variants", **more)
        equal = min(r["equal_answers"] for r in done)
        note = f"{equal} of {variants}, in the round with the fewest; sums in another order may round otherwise"
        yield _row(bench, "rows", task, "share_of_equal_answers", equal / variants, length, note=note)

    def _of_steps(self, bench: Bench, found: Mapping[str, Record]) -> Iterator[Row]:
        short = self._short(bench)
        for kind in KINDS:
            for rows in self._in_flight(bench):
                record = found.get(_step_key(kind, rows, short))
                if record is None:
                    continue
                what = kind, f"step_{short}_rows{rows}", "ms_per_row"
                if "step_ms" not in record:
                    yield _row(bench, *what, None, short, rows, note=why_not(record))
                    continue
                s = spread([ms / rows for ms in record["step_ms"]])
                more: dict[str, Any] = {
                    "share_of_limit": bench.share_of_limit(s.p50 * rows, record["held_bytes"], record),
                    **s.as_dict(),
                }
                yield _row(bench, *what, s.p50, short, rows, **more)

    def picture(self, bench: Bench, rows: list[Row]) -> list[Curve]:
        found, label = [], "ms of a decoding step, per row"
        for kind in KINDS:
            drawn = [row for row in rows if row.method == kind and row.value is not None]
            if drawn:
                x, y = [float(row.batch or 1) for row in drawn], [row.value or 0.0 for row in drawn]
                low, high = [row.p20 for row in drawn], [row.p80 for row in drawn]
                found.append(Curve(label, "rows in flight", label, kind, x, y, low, high))
        return found


def _round_key(length: int, new: int, number: int) -> str:
    return f"round {number + 1}, {length}+{new} tokens"


def _step_key(kind: str, rows: int, length: int) -> str:
    return f"step, {rows} {kind}, {length} tokens"


def _timed(
    bench: Bench, side: str, task: str, metric: str, ms: Sequence[float], length: int, share: float | None = None
) -> Row:
    s = spread([number / 1e3 for number in ms])
    more: dict[str, Any] = {"share_of_limit": share, **s.as_dict()}
    return _row(bench, side, task, metric, s.p50, length, **more)


def _row(
    bench: Bench,
    method: str,
    task: str,
    metric: str,
    value: float | None,
    prompt: int,
    batch: int | None = None,
    note: str = "",
    **more: Any,  # noqa: ANN401 - spreads and shares, by the names of a row
) -> Row:
    fields = ("kvbench", "sweep", bench.model_name, method, None, "", task, metric, value, note)
    return Row(*fields, prompt=prompt, batch=batch, **more)
