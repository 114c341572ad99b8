"""The engine beside lone runs: one prompt read once for many policies and budgets, all of which decode as one batch.

Three kinds of cells. A round takes every variant of one prompt both ways, half of the lone runs before the rows and
half after, so that a machine which grows slower or faster favours neither. A step is timed against the rows in it:
variants of one example, and examples of one variant. Where kvpress is installed, rounds beside its runs: only policies
that both have, brought to the same sets (kvpress's pooling and its one set per layer for TOVA), at the same budgets,
after the whole prompt, growing afterwards. Equal answers show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from kvbench.engine.batch import DecodeBatch
from kvbench.engine.sequence import Request
from kvbench.inference.cuda_graph import can_record
from kvbench.inference.generate import generate_tokens
from kvbench.inference.generation import now
from kvbench.policies.policy import Policy
from kvbench.report.figures.curves import Curve
from kvbench.terminal.errors import UsageError
from kvbench.tools.bench import rivals
from kvbench.tools.bench.bench import Bench, BenchProtocol, Row
from kvbench.tools.bench.clock import Clock, paired_ratio, spread
from kvbench.tools.bench.generating import LEAST_BUDGET, LEAST_LENGTH, LEAST_NEW
from kvbench.tools.bench.generation import Run
from kvbench.tools.bench.journal import Cell, Record, why_not
from kvbench.tools.bench.providers import ours, random_ids
from kvbench.tools.bench.report import curves
from kvbench.tools.bench.settings import scaled

POLICIES = ("streamingllm", "snapkv", "tova", "h2o", "caote_snapkv", "cake")
BUDGETS = (64, 128, 256, 512, 1024, 2048)
LENGTHS, NEW, ROUNDS = (4096,), 64, 3
IN_FLIGHT = (1, 2, 4, 8, 16, 32, 64, 128)
SETTLING, TIMED = 8, 8  # steps of a cell: until rows of one shape have joined and are recorded, and those timed
WARM_UP = 256  # prompt tokens of the untimed run on a CPU; a GPU takes a whole prompt, which compiles what it needs
KINDS = ("variants of one example", "examples of one variant")
LIKE: Mapping[str, Mapping[str, Any]] = {
    "streamingllm": {},
    "snapkv": {"pool": "avg"},
    "tova": {"granularity": "layer"},
    "knorm": {},
    "ada_snapkv": {"pool": "avg"},
}
"""Policies kvpress has too, and the fields with which ours keep what its presses keep (TOVA's keeps the last token)."""
PRESS = "kvpress_"


@dataclass(frozen=True)
class Variant:
    """A policy at its budget, and the rival that does the same where it is not run by ourselves."""

    policy: Policy
    rival: str = ""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of prefilling and of decoding, bytes of all caches at the end, and the new tokens of every run."""

    prefill_ms: float
    decode_ms: float
    held_bytes: int
    tokens: list[list[int]]

    def figures(self) -> Record:
        return {name: getattr(self, name) for name in FIGURES}

    def equal_answers(self, other: Cost) -> int:
        """How many runs gave the same tokens both ways."""
        return sum(a == b for a, b in zip(self.tokens, other.tokens, strict=True))


FIGURES = ("prefill_ms", "decode_ms", "held_bytes")


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether steps are replayed from CUDA graphs where they can be, as with engine.cuda_graph=auto."""
    return model.device.type == "cuda"


def one_by_one(model: PreTrainedModel, request: Request, variants: Sequence[Variant]) -> Cost:
    """One run after the other: ours, or a rival's."""
    costs = [(_rival if variant.rival else _alone)(model, request, variant) for variant in variants]
    prefill, decode, held = (sum(getattr(cost, name) for cost in costs) for name in FIGURES)
    return Cost(prefill, decode, held, [tokens for cost in costs for tokens in cost.tokens])


def _alone(model: PreTrainedModel, request: Request, variant: Variant) -> Cost:
    graph = on_gpu(model) and can_record(variant.policy)
    done = generate_tokens(
        model, request.input_ids, variant.policy, max_new_tokens=request.max_new_tokens, cuda_graph=graph
    )
    return Cost(1e3 * done.prefill_seconds, 1e3 * done.decode_seconds, done.cache.nbytes, done.tokens)


def _rival(model: PreTrainedModel, request: Request, variant: Variant) -> Cost:
    length, budget = request.input_ids.shape[1], variant.policy.budget
    assert isinstance(budget, int)
    run = Run(model, rivals.provider(variant.rival, min(budget, length - 1), length), request.input_ids)
    prefill, decode, tokens = run.prefill(), 0.0, [int(run.token)]
    for _ in range(request.max_new_tokens - 1):
        decode += sum(run.decode(1))
        tokens.append(int(run.token))
    return Cost(prefill, decode, run.held_bytes, [tokens])


def together(model: PreTrainedModel, request: Request, variants: Sequence[Variant]) -> Cost:
    """All as rows; an error of one ends all."""
    model.set_attn_implementation("kvbench")
    flight, began = DecodeBatch(model, on_gpu(model)), now(model)
    rows = flight.admit(request, [variant.policy for variant in variants])
    prefilled = now(model)
    while flight.in_flight:
        flight.step()
    ended = now(model)
    for row in rows:
        if row.error is not None:
            raise row.error
    held = sum(row.cache.nbytes for row in rows if row.cache is not None)
    return Cost(1e3 * (prefilled - began), 1e3 * (ended - prefilled), held, [row.tokens for row in rows])


def one_round(bench: Bench, variants: Sequence[Variant], length: int, new: int) -> Record:
    """Every variant of one prompt both ways, after both have warmed up."""
    model, half = bench.built.model, len(variants) // 2
    model.set_attn_implementation("kvbench")
    ids = random_ids(model, 1, length)
    whole, short = Request(ids, new), Request(ids[:, : _warm_up(bench, length)], LEAST_NEW)
    one_by_one(model, short, variants)
    together(model, short, variants)
    first = one_by_one(model, whole, variants[:half])
    rows = together(model, whole, variants)
    second = one_by_one(model, whole, variants[half:])
    lone = {name: getattr(first, name) + getattr(second, name) for name in (*FIGURES, "tokens")}
    return {
        lone_side(variants): Cost(**lone).figures(),
        "rows": rows.figures(),
        "variants": len(variants),
        "equal_answers": rows.equal_answers(Cost(**lone)),
    }


def lone_side(variants: Sequence[Variant]) -> str:
    """What the runs beside the rows are called."""
    return "kvpress_runs" if any(variant.rival for variant in variants) else "lone_runs"


def seconds_of(side: Record) -> float:
    return float(side["prefill_ms"] + side["decode_ms"]) / 1e3


def steps(bench: Bench, variants: Sequence[Variant], kind: str, rows: int, length: int) -> Record:
    """Milliseconds of some decoding steps with so many rows in flight."""
    model, new = bench.built.model, SETTLING + TIMED + 1
    model.set_attn_implementation("kvbench")
    flight = DecodeBatch(model, on_gpu(model))
    if kind == KINDS[0]:
        several = [variants[index % len(variants)].policy for index in range(rows)]
        flight.admit(Request(random_ids(model, 1, length), new), several)
    else:
        for index in range(rows):
            flight.admit(Request(random_ids(model, 1, length + index), new), [variants[0].policy])
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


# --- which variants --------------------------------------------------------------------------------------------------
def variants_of(bench: Bench) -> list[Variant]:
    """Every policy at every budget, the smallest budgets first; one that keeps everything once."""
    found = []
    for index, budget in enumerate(budgets_of(bench)):
        for slug in slugs_of(bench):
            policy = ours(slug, budget, schedule="prompt", decode=bench.settings.decode).policy
            assert policy is not None
            if policy.evicts or index == 0:
                found.append(Variant(policy))
    return found


def slugs_of(bench: Bench) -> Sequence[str]:
    return POLICIES if bench.settings.policies is None else bench.settings.policies


def budgets_of(bench: Bench) -> list[int]:
    return list(dict.fromkeys(scaled(budget, bench.scale, LEAST_BUDGET) for budget in BUDGETS))


def pressed_variants(bench: Bench) -> list[Variant]:
    """Every rival that runs at every budget, beside our policy that keeps the same."""
    found = []
    for budget in budgets_of(bench):
        for name in pressed(bench)[0]:
            slug = name.removeprefix(PRESS)
            policy = ours(slug, budget, schedule="prompt", decode="grow", **LIKE[slug]).policy
            assert policy is not None
            found.append(Variant(policy, name))
    return found


def pressed(bench: Bench) -> tuple[list[str], list[str]]:
    """The presses to run, of the policies asked for if any are, and a line for each that is not installed."""
    asked, policies = bench.settings.rivals, bench.settings.policies
    known = [f"{PRESS}{slug}" for slug in LIKE if policies is None or slug in policies]
    for name in asked or ():
        if name not in known:
            raise UsageError(f"rivals={name} is not one of this sweep's, choose from {', '.join(known)} or rivals=none")
    return rivals.chosen(asked, known)


# --- the protocol ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SweepProtocol(BenchProtocol):
    """Cells are rounds of a sweep, and steps with so many rows."""

    name: str = "sweep"
    model: str = "llama31_8b_instruct"

    def remarks(self, bench: Bench) -> list[str]:
        variants, (names, absent) = variants_of(bench), pressed(bench)
        sizes = ", ".join(f"{length}" for length in self._lengths(bench))
        how = f", decode={bench.settings.decode}" if bench.settings.decode else ""
        return [
            f"{len(variants)} variants ({', '.join(slugs_of(bench))} at budgets {budgets_of(bench)}) of one "
            f"prompt of {sizes} tokens, {self._new(bench)} new ones each{how}; {self._rounds(bench)} rounds, medians",
            "lone runs: greedy generation, one after the other; rows: one prefill for all, then one batch; half of the "
            "lone runs stand before the rows of their round, half after",
            f"steps: prompts of about {self._short(bench)} tokens; examples of one variant are those of "
            f"{variants[0].policy.name} at its smallest budget",
            *([f"{', '.join(names)}: growing after the prompt; the rows beside them are these"] if names else []),
            *absent,
        ]

    def identity(self, bench: Bench) -> dict[str, Any]:
        return {"policies": list(slugs_of(bench)), "budgets": budgets_of(bench), "decode": bench.settings.decode}

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

    def cells(self, bench: Bench) -> list[Cell]:
        """kvpress comes last: it changes the process it is imported into."""
        rounds = self._round_cells(bench, variants_of(bench))
        return [*rounds, *self._step_cells(bench), *self._round_cells(bench, pressed_variants(bench), "kvpress, ")]

    def _round_cells(self, bench: Bench, variants: Sequence[Variant], whose: str = "") -> Iterator[Cell]:
        for length in self._lengths(bench) if variants else ():
            run = partial(one_round, bench, variants, length, self._new(bench))
            for key in self._round_keys(bench, length, whose):
                yield Cell(key, run, foreign=bool(whose))

    def _round_keys(self, bench: Bench, length: int, whose: str) -> list[str]:
        numbers = range(1, self._rounds(bench) + 1)
        return [f"{whose}round {number}, {length}+{self._new(bench)} tokens" for number in numbers]

    def _step_cells(self, bench: Bench) -> Iterator[Cell]:
        few = [variant for variant in variants_of(bench) if (variant.policy.budget or 0) <= 512]
        for kind in KINDS:
            smaller = None
            for rows in self._in_flight(bench):
                key = _step_key(kind, rows, self._short(bench))
                yield Cell(key, partial(steps, bench, few, kind, rows, self._short(bench)), bigger_than=smaller)
                smaller = key

    # --- what it says ----------------------------------------------------------------------------------------------
    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        lengths = self._lengths(bench)
        rounds = [row for length in lengths for row in self._of_rounds(bench, length, found, "", "sweep")]
        kvpress = [row for length in lengths for row in self._of_rounds(bench, length, found, "kvpress, ", "kvpress")]
        return [*rounds, *kvpress, *self._of_steps(bench, found)]

    def _of_rounds(
        self, bench: Bench, length: int, found: Mapping[str, Record], whose: str, kind: str
    ) -> Iterator[Row]:
        """Runs one after the other, then the rows of the same variants; or why there are none."""
        lone, new = "kvpress_runs" if whose else "lone_runs", self._new(bench)
        row = partial(_row, bench, length, f"{kind}_{length}_{new}")
        rounds = [found[key] for key in self._round_keys(bench, length, whose) if key in found]
        done = [record for record in rounds if "rows" in record]
        if not done:
            if rounds:
                yield row("rows", "total_seconds", None, note=why_not(rounds[0]))
            return
        variants = done[0]["variants"]
        for side in (lone, "rows"):
            times, runs = [record[side] for record in done], variants if side == lone else 1
            decode = spread([time["decode_ms"] / 1e3 for time in times])
            a_step = 1e3 * decode.p50 / ((new - 1) * runs)
            share = bench.share_of_limit(a_step, times[0]["held_bytes"] / runs, done[0])
            prefill = spread([time["prefill_ms"] / 1e3 for time in times])
            total = spread([seconds_of(time) for time in times])
            yield row(side, "prefill_seconds", prefill.p50, **prefill.as_dict())
            yield row(side, "decode_seconds", decode.p50, share_of_limit=share, **decode.as_dict())
            yield row(side, "total_seconds", total.p50, **total.as_dict())
            yield row(side, "held_gib", times[0]["held_bytes"] / 2**30)
        ratio = paired_ratio(*([seconds_of(record[side]) for record in done] for side in ("rows", lone)))
        yield row("rows", f"ratio_to_{lone}", ratio.p50, note=f"{variants} variants", **ratio.as_dict())
        equal = min(record["equal_answers"] for record in done)
        note = f"{equal} of {variants}, in the round with the fewest; sums in another order may round otherwise"
        yield row("rows", "share_of_equal_answers", equal / variants, note=note)

    def _of_steps(self, bench: Bench, found: Mapping[str, Record]) -> Iterator[Row]:
        short = self._short(bench)
        for kind in KINDS:
            for rows in self._in_flight(bench):
                record = found.get(_step_key(kind, rows, short))
                if record is None:
                    continue
                row = partial(_row, bench, short, f"step_{short}_rows{rows}", kind, "ms_per_row", batch=rows)
                if "step_ms" not in record:
                    yield row(None, note=why_not(record))
                    continue
                s = spread([ms / rows for ms in record["step_ms"]])
                share = bench.share_of_limit(s.p50 * rows, record["held_bytes"], record)
                yield row(s.p50, share_of_limit=share, **s.as_dict())

    def picture(self, bench: Bench, rows: list[Row]) -> list[Curve]:
        label = "ms of a decoding step, per row"
        return curves([row for row in rows if row.method in KINDS], label, "rows in flight", label, "batch")


def _step_key(kind: str, rows: int, length: int) -> str:
    return f"step, {rows} {kind}, {length} tokens"


def _row(bench: Bench, prompt: int, task: str, method: str, metric: str, value: float | None, **more: Any) -> Row:  # noqa: ANN401
    return Row("kvbench", "sweep", bench.model_name, method, None, "", task, metric, value, prompt=prompt, **more)
