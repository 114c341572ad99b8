"""Judged claims for people (a table, Markdown) and for programs (CSV, JSON): every verdict with its numbers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvbench.analysis.statistics import FEWEST
from kvbench.papers.claims.claim import Claim
from kvbench.papers.claims.inference import Printed
from kvbench.papers.claims.measured import Comparison, Measured

FAMILY_NOTE = (
    "Published cells of a paper share models, prompts and the authors' choice of what to print: sign tests and "
    "intervals over them describe its tables. Runs: paired per example; Holm over all comparisons made here."
)


@dataclass(frozen=True)
class Judged:
    """A claim with both verdicts; measured: None where no runs were given."""

    claim: Claim
    printed: Printed
    measured: Measured | None


def table(judged: Sequence[Judged], most: int = 2) -> Table:
    """One row per claim; of the cells that contradict it, the `most` worst."""
    shown = Table(show_lines=True, caption=FAMILY_NOTE, caption_justify="left")
    names = ["claim", "in print", *["in our runs"] * any(one.measured is not None for one in judged)]
    for name in names:
        shown.add_column(name, min_width=20, overflow="fold")  # three of them fit into 80 letters
    for one in judged:
        cells = [_claim(one.claim), printed_text(one, most)]
        shown.add_row(*cells, *([measured_text(one.measured, most)] if one.measured else []))
    return shown


def _claim(claim: Claim) -> str:
    sentence = claim.sentence if claim.ours else f"“{claim.sentence}”"
    return f"{claim.paper}/{claim.name}\n{sentence} ({_section(claim)}; {claim.says})"


def _section(claim: Claim) -> str:
    if claim.ours:
        return f"ours, from {claim.section}"
    numbered = claim.section[0].isdigit() or len(claim.section.split(".")[0]) == 1
    return f"section {claim.section}" if numbered else claim.section


def printed_text(one: Judged, most: int | None = None) -> str:
    """Verdict and numbers in lines of text."""
    found, unit = one.printed, one.claim.source.unit
    if not found.evidence.cells:
        command = one.claim.trial.command if one.claim.trial else one.claim.elsewhere
        return f"no data: {found.evidence.missing}" + (f"\nwould give it: {command}" if command else "")
    n = len(found.evidence.cells)
    lines = [f"{found.verdict}: {found.supports} of {n} cells support, {len(found.against)} contradict"]
    lines[0] += f", {found.ties} tie" * bool(found.ties) + f", {found.evidence.lost} half printed" * bool(
        found.evidence.lost
    )
    interval = "" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
    lines.append(
        f"mean {found.mean:+.3g}{interval} {unit}"
        + ("" if found.p is None or n < FEWEST else f", sign test p = {found.p:.2g}")
    )
    if found.needed is not None:
        lines.append(f"about {found.needed} cells would tell")
    lines += [f"against: {cell}" for cell in found.against[:most]]
    if most is not None and len(found.against) > most:
        lines.append(f"and {len(found.against) - most} more against")
    return "\n".join(lines)


def measured_text(found: Measured, most: int | None = None) -> str:
    """Verdict and numbers in lines of text; with `most`, the comparisons that speak against the claim come first."""
    if not found.comparisons:
        return "no data" + (f": {found.missing}" if found.missing else "")
    sizes = sorted({one.difference.n for one in found.comparisons})
    n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    text = f"{found.verdict} with {n} examples" if found.verdict == "cannot be told" else found.verdict
    if found.needed is not None:
        text += f"; about {found.needed} a comparison would show a gain of {found.effect:+.3g}"
    ordered = sorted(found.comparisons, key=lambda one: one.sign)
    lines = [text, *(_comparison(one) for one in ordered[:most])]
    if most is not None and len(ordered) > most:
        lines.append(f"and {len(ordered) - most} more comparisons")
    return "\n".join(lines)


def _comparison(one: Comparison) -> str:
    d = one.difference
    need = f", claimed {one.least:+.3g}" if one.least else ""
    sure = f"n = {d.n}, p = {one.adjusted:.2g} after Holm"
    return f"{one.where}: {d.mean:+.4f} ({d.low:+.3f} to {d.high:+.3f}){need}, {sure}"


def markdown(judged: Sequence[Judged]) -> str:
    """Every claim in full."""
    lines = ["# Claims of the papers", "", FAMILY_NOTE, ""]
    for one in judged:
        claim = one.claim
        quoted = claim.sentence if claim.ours else f"“{claim.sentence}”"
        lines += [f"## {claim.paper}/{claim.name}", "", f"{quoted} ({_section(claim)}; {claim.says})", ""]
        lines += [f"- decided by: {claim.decided_by}", "- in print: " + printed_text(one).replace("\n", "\n  - ")]
        if one.measured:
            lines.append("- in our runs: " + measured_text(one.measured).replace("\n", "\n  - "))
        lines += [f"- note: {claim.note}"] * bool(claim.note) + [""]
    return "\n".join(lines)


def _row(one: Judged) -> dict[str, Any]:
    """A claim as one flat row."""
    claim, found, runs = one.claim, one.printed, one.measured or Measured("no data")
    return {
        "paper": claim.paper,
        "claim": claim.name,
        "sentence": claim.sentence,
        "quoted": not claim.ours,
        "section": claim.section,
        "says": claim.says,
        "decided_by": claim.decided_by,
        "printed_verdict": found.verdict,
        "printed_cells": len(found.evidence.cells),
        "printed_supports": found.supports,
        "printed_ties": found.ties,
        "printed_contradicts": len(found.against),
        "printed_half": found.evidence.lost,
        "printed_mean_gain": found.mean,
        "printed_low": found.low,
        "printed_high": found.high,
        "unit": claim.source.unit,
        "sign_test_p": found.p,
        "contradictions": list(found.against),
        "runs_verdict": runs.verdict,
        "runs_comparisons": [_comparison(comparison) for comparison in runs.comparisons],
        "runs_examples_needed": runs.needed,
        "missing": found.evidence.missing or runs.missing,
        "command": claim.trial.command if claim.trial else claim.elsewhere,
        "note": claim.note,
    }


def as_csv(judged: Sequence[Judged]) -> str:
    """The flat rows; lists are joined by " | "."""
    file = io.StringIO()
    flat = [{k: " | ".join(v) if isinstance(v, list) else v for k, v in _row(one).items()} for one in judged]
    writer = csv.DictWriter(file, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def as_json(judged: Sequence[Judged]) -> str:
    """The flat rows."""
    return json.dumps([_row(one) for one in judged], ensure_ascii=False, indent=1) + "\n"
