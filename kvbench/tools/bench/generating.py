"""Protocols whose every cell is a prompt and the tokens that follow: one method, one length, one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from kvbench.report.figures.curves import Curve
from kvbench.tools.bench import rivals
from kvbench.tools.bench.bench import Bench, BenchProtocol, Row
from kvbench.tools.bench.clock import Spread, spread
from kvbench.tools.bench.generation import Job, measure
from kvbench.tools.bench.journal import Cell, Record, why_not
from kvbench.tools.bench.providers import Provider, ours, recordable
from kvbench.tools.bench.report import curves
from kvbench.tools.bench.settings import scaled

LEAST_LENGTH, LEAST_BUDGET, LEAST_NEW = 96, 64, 4
LONG = 60_000  # prompt tokens from which one timed prefill has to do: it takes seconds
GRAPHED = " graphed"  # stands after a method whose steps are replays of a CUDA graph


@dataclass(frozen=True)
class Method:
    """A policy of a table. budget: tokens per KV head, "prompt" for as many as the prompt has, None for all."""

    slug: str
    budget: int | Literal["prompt"] | None = None
    bits: int | None = None

    def at(self, prompt: int, scale: int) -> int | None:
        """Tokens per KV head for a prompt of that (scaled) length."""
        if self.budget == "prompt":
            return prompt
        return None if self.budget is None else scaled(self.budget, scale, LEAST_BUDGET)


@dataclass(frozen=True)
class Sizes:
    """One line of a table: prompt length, new tokens, and batches, the smaller first."""

    prompt: int
    new: int
    batches: tuple[int, ...] = (1,)

    @property
    def total(self) -> str:
        """All tokens, as papers write them: 128k."""
        tokens = self.prompt + self.new
        return f"{tokens}" if tokens % 1024 else f"{tokens // 1024}k"


@dataclass(frozen=True)
class Point:
    """A cell with what it measured, ready for the rows of a table."""

    method: str
    budget: int | None
    bits: int | None
    sizes: Sizes
    batch: int
    timed: int
    record: Record

    @property
    def fits(self) -> bool:
        return "decode_ms" in self.record

    @property
    def peak(self) -> float | None:
        """Most bytes of the device's memory; None where it does not count them."""
        peaks = self.record["peak_prefill_bytes"], self.record["peak_decode_bytes"]
        return None if None in peaks else float(max(peaks))

    @property
    def prefill_seconds(self) -> float:
        return self.prefill.p50

    @property
    def prefill(self) -> Spread:
        """Seconds."""
        return spread([ms / 1e3 for ms in self.record["prefill_ms"]])

    @property
    def ms(self) -> float:
        """Milliseconds of a decoding step, all sequences together: the mean, which a total is made of."""
        steps = self.record["decode_ms"]
        return float(sum(steps) / len(steps))

    @property
    def seconds(self) -> float:
        """Of the whole answer, prefill included."""
        return self.prefill_seconds + self.sizes.new * self.ms / 1e3

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences over the seconds of the whole answer."""
        return self.batch * self.sizes.new / self.seconds


OfPoint = Callable[[Bench, "partial[Row]", Point], Iterator[Row]]
OfAll = Callable[[Bench, "partial[Row]", list[Point]], Iterator[Row]]


@dataclass(frozen=True)
class GeneratingProtocol(BenchProtocol):
    """A table of a paper, or of our own.

    task: names a point's rows, of prompt, new and total tokens; figure: the metric that a point without one lacks.
    of_point, of_all: the figures of each point, then those that several points have together: both call a function
    that makes a row of a point, a metric and a value. pictured: metrics and labels.
    """

    paper: str
    table: str
    methods: tuple[Method, ...]
    sizes: tuple[Sizes, ...]
    task: str
    figure: str
    of_point: OfPoint
    pictured: tuple[tuple[str, str], ...]
    of_all: OfAll | None = None
    shared: str = ""
    timed: int = 64
    repeats: int = 2
    middle: bool = False
    profiled: bool = False
    usual_rivals: tuple[str, ...] = ("transformers_sdpa", "transformers_flash2")
    rival_budget: int = 1024
    axis: Literal["prompt", "batch"] = "prompt"

    @property
    def series(self) -> str:
        return self.shared or self.name

    def remarks(self, bench: Bench) -> list[str]:
        sizes = self._sizes(bench)
        timed = ", ".join(dict.fromkeys(str(self._timed(bench, s)) for s in sizes))
        whole = ", ".join(dict.fromkeys(str(s.new) for s in sizes))
        where = "in the middle of the answer" if self.middle else "the first after the prompt"
        most = bench.built.model.config.get_text_config(decoder=True).max_position_embeddings
        beyond = any(size.prompt + size.new > most for size in sizes)
        return [
            "prompts of " + ", ".join(dict.fromkeys(str(s.prompt) for s in sizes)) + " tokens",
            f"{whole} new tokens, of which {timed} are timed, {where}",
            f"{self._repeats(bench, 0)} timed prefills (1 from {LONG} tokens on) after a warm-up; medians",
            *[f"the model was made for {most} positions: beyond them only time and memory mean something"] * beyond,
            *self._rivals(bench)[1],
        ]

    def identity(self, bench: Bench) -> dict[str, Any]:
        return {"middle": self.middle}

    # --- what is measured ------------------------------------------------------------------------------------------
    def _methods(self, bench: Bench) -> tuple[Method, ...]:
        slugs = bench.settings.policies
        if slugs is None:
            return self.methods
        known = {m.slug: m for m in self.methods}
        usual = next((m.budget for m in self.methods if m.budget is not None), 1024)
        chosen = (known.get(slug) or Method(slug, usual) for slug in slugs)
        return tuple(m if ours(m.slug, m.at(1024, 1)).budget else replace(m, budget=None) for m in chosen)

    def _sizes(self, bench: Bench) -> list[Sizes]:
        s = bench.settings
        every = self.sizes if s.lengths is None else tuple(replace(self._like(n), prompt=n) for n in s.lengths)
        found = []
        for size in every:
            batches = s.batches or dict.fromkeys(max(1, b // s.scale) for b in size.batches)
            new = scaled(s.new_tokens or size.new, s.scale, LEAST_NEW)
            found.append(Sizes(scaled(size.prompt, s.scale, LEAST_LENGTH), new, tuple(batches)))
        return list(dict.fromkeys(found))

    def _like(self, length: int) -> Sizes:
        """The line of the table whose prompt is nearest to a length."""
        return min(self.sizes, key=lambda size: abs(size.prompt - length))

    def _timed(self, bench: Bench, sizes: Sizes) -> int:
        return min(sizes.new, bench.settings.timed or scaled(self.timed, bench.scale, LEAST_NEW))

    def _repeats(self, bench: Bench, prompt: int) -> int:
        return bench.settings.repeats or (1 if prompt >= LONG else self.repeats)

    def _rivals(self, bench: Bench) -> tuple[list[str], list[str]]:
        return rivals.chosen(bench.settings.rivals, self.usual_rivals, bench.device.type == "cuda")

    def _planned(self, bench: Bench) -> Iterator[tuple[Cell, Point]]:
        """Every cell with the point it will be; rivals come last, because they change the process they run in."""
        for size in self._sizes(bench):
            for method in self._methods(bench):
                slug, budget = method.slug, method.at(size.prompt, bench.scale)
                make, own = partial(ours, slug, budget), replace(method, budget=budget)
                yield from self._of_method(bench, size, make, own)
                if recordable(slug, budget, bench.device):
                    graphed = replace(own, slug=slug + GRAPHED)
                    yield from self._of_method(bench, size, partial(make, graphed=True), graphed)
        for name in self._rivals(bench)[0]:
            for size in self._sizes(bench):
                rival = Method(name, self.rival_budget if name.startswith("kvpress") else None)
                budget = rival.at(size.prompt, bench.scale)
                make = partial(rivals.provider, name, budget, size.prompt)
                yield from self._of_method(bench, size, make, Method(name, budget), foreign=True)

    def _of_method(
        self, bench: Bench, size: Sizes, make: Callable[[], Provider], method: Method, foreign: bool = False
    ) -> Iterator[tuple[Cell, Point]]:
        """The cells of one method and length, from the smallest batch to the largest."""
        smaller, timed, repeats = None, self._timed(bench, size), self._repeats(bench, size.prompt)
        assert method.budget != "prompt"
        kept = "" if method.budget is None else f" budget {method.budget}"
        for batch in sorted(size.batches):
            job = Job(size.prompt, size.new, timed, batch, repeats, self.middle, self.profiled)
            key = f"{method.slug}{kept}, {size.prompt}+{size.new} tokens ({timed} timed), batch {batch}"
            cell = Cell(key, partial(_run, bench, make, job), foreign, smaller)
            yield cell, Point(method.slug, method.budget, method.bits, size, batch, timed, {})
            smaller = key

    def cells(self, bench: Bench) -> list[Cell]:
        return [cell for cell, _ in self._planned(bench)]

    # --- what it says ----------------------------------------------------------------------------------------------
    def rows(self, bench: Bench, found: Mapping[str, Record]) -> list[Row]:
        points = [replace(point, record=found[cell.key]) for cell, point in self._planned(bench) if cell.key in found]
        made, row = list[Row](), partial(self.row, bench)
        for point in points:
            if point.fits:
                made += self.of_point(bench, partial(row, point), point)
            else:
                made.append(row(point, self.figure.format(batch=point.batch), None, note=why_not(point.record)))
        return [*made, *(self.of_all(bench, row, points) if self.of_all is not None else ())]

    def row(self, bench: Bench, point: Point, metric: str, value: float | None, **more: Any) -> Row:  # noqa: ANN401
        """One figure of a point; `note` says what stands behind it, `task` what else than the protocol's it is of."""
        size, kind = point.sizes, "tokens_per_head" if point.budget is not None else "bits" if point.bits else ""
        budget = point.budget if point.budget is not None else point.bits
        task = more.pop("task", self.task).format(prompt=size.prompt, new=size.new, total=size.total)
        note = more.pop("note", f"{point.timed} of {size.new} new tokens timed")
        fields = (self.paper, self.table, bench.built.name, point.method, budget, kind, task, metric, value, note)
        return Row(*fields, prompt=size.prompt, new_tokens=size.new, batch=point.batch, **more)

    def picture(self, bench: Bench, rows: list[Row]) -> list[Curve]:
        """A panel for every pictured metric, and for every line of a table whose batches it goes over."""
        found = []
        for metric, label in self.pictured:
            shown = [row for row in rows if row.metric.removesuffix(f"_batch{row.batch}") == metric]
            if self.axis == "prompt":
                found += curves(shown, label, "prompt tokens", label, "prompt")
                continue
            tasks = {row.task: f": {row.prompt} prompt and {row.new_tokens} new tokens" for row in shown}
            for task, sizes in tasks.items():
                inside, by = [r for r in shown if r.task == task], f"sequences in a batch{sizes * (len(tasks) > 1)}"
                found += curves(inside, f"{label} {task}", by, label, "batch")
        return found


def _run(bench: Bench, make: Callable[[], Provider], job: Job) -> Record:
    return measure(bench.built.model, make(), job)
