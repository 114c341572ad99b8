# ruff: noqa: E501, T201 - the text of a mutant stands in one line, and this is a command
"""Forty one-token mutants of policies/, kvbench/cache and kvbench/engine: which of them do the fast tests detect?

    python tests/mutants.py [--only N,N,...] [--near] [--locate]

Run it in a clean checkout. It changes one file at a time, runs the tests until the first failure and restores the file:
first the tests whose file or parameter is named like the changed module, then all of tests/policies and tests/kvbench.
A mutant survives if every test passes. With --near, only the first step runs: minutes instead of hours.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("policies", "kvbench/cache", "kvbench/engine")
FAST = [ROOT / "tests" / "policies", ROOT / "tests" / "kvbench"]


class Mutant(NamedTuple):
    """What it breaks, the text it replaces (unique in the folders), and its replacement."""

    law: str
    old: str
    new: str


# fmt: off
MUTANTS = (
    Mutant("h2o: recent is half the budget", "newest=budget // 2 if", "newest=budget // 3 if"),
    Mutant("h2o by_age: divide by age",
           "age = observation.seen[:, None, None] - observation.positions\n        return total",
           "age = observation.seen[:, None, None] + observation.positions\n        return total"),
    Mutant("tova: newest query only", "Needs(window=1, window_decoding=0, newest_row=True", "Needs(window=2, window_decoding=1, newest_row=True"),
    Mutant("snapkv: default window", "window: int = 32\n    kernel: int = 7\n    pool: Pool", "window: int = 31\n    kernel: int = 7\n    pool: Pool"),
    Mutant("pooling: window tokens keep their scores", "candidates = scores.shape[-1] - window\n", "candidates = scores.shape[-1] - window - 1\n"),
    Mutant("pooling: padding of average", "wide = scores.shape[-1], F.pad(scores, (kernel // 2, kernel // 2))", "wide = scores.shape[-1], F.pad(scores, (kernel // 2 + 1, kernel // 2 - 1))"),
    Mutant("streaming: sinks",
           "Protected(first=self.sinks)\n\n    def score(self, observation: Observation, state: State) -> Tensor:\n        return observation.once(self, observation.positions.float)",
           "Protected(first=self.sinks + 1)\n\n    def score(self, observation: Observation, state: State) -> Tensor:\n        return observation.once(self, observation.positions.float)"),
    Mutant("keydiff: sign", "return -(keys * anchor).sum(-1)", "return (keys * anchor).sum(-1)"),
    Mutant("keydiff: empty slots stay out of the anchor", "stored = keys if observation.slots.packed else keys", "stored = keys if True else keys"),
    Mutant("expected attention: scale of the covariance", "/ (2 * keys.shape[-1])", "/ (1 * keys.shape[-1])"),
    Mutant("expected attention: sinks are not averaged", "counted = observation.query_positions >= self.sinks", "counted = observation.query_positions > self.sinks"),
    Mutant("lagkv: default lag", "lag: int = 128\n    sinks: int = 4", "lag: int = 64\n    sinks: int = 4"),
    Mutant("lagkv: reference is the next partition", "reference = parts[:, :, 1:]", "reference = parts[:, :, :-1]"),
    Mutant("rkv: default lambda", "window: int = 8\n    kernel: int = 7\n    lam", "window: int = 9\n    kernel: int = 7\n    lam"),
    Mutant("roco: share while decoding", "(self.block_share, self.sinks) if prompt", "(self.block_share, self.sinks) if not prompt"),
    Mutant("roco: tokens since entering",
           "return observation.seen[:, None, None] - observation.positions\n\n    def spares",
           "return observation.seen[:, None, None] - observation.positions + 1\n\n    def spares"),
    Mutant("kvec: coverage counts this layer", "(1 - covered / (observation.layer + 1))", "(1 - covered / (observation.layer + 2))"),
    Mutant("kvec: preserved share", "int(self.beta * budget), budget - self.window", "int(self.beta * budget) + 1, budget - self.window"),
    Mutant("kvec: least focused heads", "order = focus.argsort(dim=-1, stable=True)[:, : self.delta]", "order = focus.argsort(dim=-1, stable=True, descending=True)[:, : self.delta]"),
    Mutant("compactor: refused in blocks", "statistics=NonCausal.needs.statistics,\n            whole_prompt=True,", "statistics=NonCausal.needs.statistics,\n            whole_prompt=False,"),
    Mutant("pre-pass: rating of a call's first token", "new = observation.occupied & (entered >= 0)", "new = observation.occupied & (entered > 0)"),
    Mutant("cake: entropy temperature", "entropy ** (1 / tau1)", "entropy ** (1 * tau1)"),
    Mutant("cake: window outside the shares", "slots, room = total - floor * layers, cap - floor", "slots, room = total - floor * layers, cap"),
    Mutant("webster: quotients",
           "heapreplace(queue, (1.0 if full else -weights[layer] / (2 * budgets[layer] + 1), layer))",
           "heapreplace(queue, (1.0 if full else -weights[layer] / (2 * budgets[layer] + 2), layer))"),
    Mutant("pyramid: last layer's share", "low = mean / self.beta if self.exact", "low = mean * self.beta if self.exact"),
    Mutant("ada: even part", "targets = won * (1 - self.alpha) + self.alpha * base", "targets = won * (1 - self.alpha) + self.alpha + base"),
    Mutant("d2o allocator: unbiased variance", "(spread / (count - 1).clamp(min=1))", "(spread / (count - 0).clamp(min=1))"),
    Mutant("d2o allocator: filling", "left = total - math.fsum(targets[layer]", "left = total + math.fsum(targets[layer]"),
    Mutant("caote: error", "mul_(alpha / (1 - alpha).clamp_(min=self.eps))", "mul_(alpha * (1 - alpha).clamp_(min=self.eps))"),
    Mutant("fastcaote: mean over stored tokens", "counted.sum(-1, keepdim=True).clamp(min=1)\n        mean", "counted.sum(-1, keepdim=True).clamp(min=2) + 1\n        mean"),
    Mutant("caote: which rows minmax_sum takes", "scores = torch.where(lowest < 0, shifted, scores)", "scores = torch.where(lowest <= 0, shifted, scores)"),
    Mutant("selection: ties go to the lower position", "return self.positions.masked_fill(stays, -1).argmax(-1, keepdim=True)", "return self.positions.masked_fill(stays, 2**30).argmin(-1, keepdim=True)"),
    Mutant("ranking: newest protected", "stays |= positions >= (seen -", "stays |= positions > (seen -"),
    Mutant("latents: window rows of K-VEC", "return self.window_mean(window)[:, 0]", "return self.window_sums(window)[:, 0]"),
    Mutant("audit: a layer over its promise", "over = (most > promised).nonzero()", "over = (most > promised + 1).nonzero()"),
    Mutant("audit: positions seen", "(positions >= seen).any()", "(positions > seen).any()"),
    Mutant("budgets: growth in decoding", "if n + tokens < b + every else", "if n + tokens <= b + every else"),
    Mutant("budgets: short prompts", "max(min(budget, old + new), whole)", "max(max(budget, old + new), whole)"),
    Mutant("eviction: excess of one", "return self._excess > 0", "return self._excess > 1"),
    Mutant("tables: one slot beyond the budget", "    return most - (store.used", "    return most + 1 - (store.used"),
    Mutant("tables: evictions of several tokens leave late", "return member.steps >= member.due", "return member.steps > member.due"),
    Mutant("tables: only full rows evict", "self._full = self._counts == limit", "self._full = self._counts >= 0"),
    Mutant("planner: memory kept free", "room = (1 - MARGIN) * free(", "room = (1 + MARGIN) * free("),
)
# fmt: on


def located(mutant: Mutant) -> Path:
    """The one file that contains the mutant's text. SystemExit if there is none or several."""
    found = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if mutant.old in path.read_text(encoding="utf-8")
    ]
    if len(found) != 1 or found[0].read_text(encoding="utf-8").count(mutant.old) != 1:
        raise SystemExit(f"{mutant.law}: its text is found in {[str(p) for p in found]}, and must be unique")
    return found[0]


def killed(mutant: Mutant, near: bool) -> str:
    """The step in which a fast test fails while the mutant is in place: "near", "all", or "" for a survivor."""
    path = located(mutant)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if _fails([*sorted((ROOT / "tests").rglob(f"test_*{path.stem}*.py"))]) or _fails(FAST, "-k", path.stem):
            return "near"
        return "all" if not near and _fails(FAST) else ""
    finally:
        path.write_text(text, encoding="utf-8")


def _fails(tests: list[Path], *arguments: str) -> bool:
    if not tests:
        return False
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow and not gpu", *arguments, *map(str, tests)]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode not in (0, 5)  # 5: no test was selected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="numbers of mutants, from 0; default: all")
    parser.add_argument("--near", action="store_true", help="run only the tests named like the changed module")
    parser.add_argument("--locate", action="store_true", help="only check that every mutant's text is found")
    given = parser.parse_args()
    chosen = [int(n) for n in given.only.split(",") if n] or range(len(MUTANTS))
    count = 0
    for number in chosen:
        if given.locate:
            print(f"{number:2d} {located(MUTANTS[number]).relative_to(ROOT)}: {MUTANTS[number].law}")
            continue
        step = killed(MUTANTS[number], given.near)
        count += bool(step)
        print(f"{number:2d} {f'killed ({step})' if step else 'survived':13} {MUTANTS[number].law}", flush=True)
    if not given.locate:
        print(f"{count} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
