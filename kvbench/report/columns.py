"""The columns of the tidy table: name, meaning, type, and where a run has each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.analysis.statistics import Difference
from kvbench.identity.labels import compressed, moments
from kvbench.report.records import Gap, RunRecord

Kind = Literal["words", "integer", "number", "json"]


@dataclass(frozen=True)
class Column:
    """One column of the tidy table: its name, what it says, where a run has it, and the type of all its values."""

    name: str
    meaning: str
    value: Callable[[RunRecord], Any]
    kind: Kind = "words"


def quantises(run: RunRecord) -> bool:
    """Whether the run's store holds numbers as codes."""
    return "bits" in (run.identity["policy"].get("store") or {})


def bits_per_number(run: RunRecord) -> float | None:
    """Bits really used for each number of the keys and values of prompt and answer; None where none is quantised."""
    held, full = run.metrics["cache_bytes"], run.metrics["full_cache_bytes"]
    if not quantises(run) or held is None or not full:
        return None
    width = float("".join(filter(str.isdigit, run.identity["dtype"])))
    return width * float(held / full)


def ratio_to_16_bit(run: RunRecord) -> float | None:
    """How many times the bytes held a cache of all keys and values in 16 bits would take."""
    bits = bits_per_number(run)
    return None if bits is None else 16 / bits


def slug(run: RunRecord) -> str:
    """The policy's preset, without anything else."""
    return run.names["policy"].partition(" (")[0].partition("(")[0] if run.naming is None else run.naming.policy


def _metric(name: str, meaning: str, kind: Kind = "number") -> Column:
    return Column(name, meaning, lambda run: run.metrics[name], kind)


def _likelihood(name: str, meaning: str, kind: Kind = "number") -> Column:
    return Column(name, meaning, lambda run: (run.metrics["likelihood"] or {}).get(name), kind)


def _score_gap(name: str, meaning: str, value: Callable[[Difference], float]) -> Column:
    return Column(name, meaning, lambda run: None if run.vs_full is None else value(run.vs_full), "number")


def _nll_gap(name: str, meaning: str, value: Callable[[Gap], float | None]) -> Column:
    return Column(name, meaning, lambda run: None if run.gap is None else value(run.gap), "number")


def _json(name: str, meaning: str, value: Callable[[RunRecord], Any]) -> Column:
    return Column(name, meaning, lambda run: None if (found := value(run)) is None else json.dumps(found), "json")


def _of_texts(name: str) -> Callable[[RunRecord], Any]:
    return lambda run: (run.metrics["likelihood"] or {}).get(name)


def _budget_kind(run: RunRecord) -> str:
    budget = run.identity["budget"]
    if budget is None:
        return "none"
    return "tokens_per_head" if isinstance(budget, int) else "share"


def _device(run: RunRecord) -> str:
    hardware = run.environment["hardware"]
    return str(hardware["device_name"] or hardware["processor"])


COLUMNS = (
    Column("run_id", "folder of the run", lambda run: run.run_id),
    Column("model", "name of the model configuration or folder", lambda run: run.names["model"]),
    Column(
        "weights", "hub id and commit, or sha256 of the files", lambda run: "@".join(run.identity["model"].values())
    ),
    Column("dtype", "numbers the model computes and stores in", lambda run: run.identity["dtype"]),
    Column(
        "policy",
        "preset, the fields that are not the preset's or differ between rows, and whether decoding evicts or grows",
        lambda run: run.names["policy"],
    ),
    Column("slug", "preset alone, as policy= takes it", slug),
    Column("schedule", "prompt or blocks of m: when the prompt is evicted from", lambda run: moments(run.identity)[0]),
    Column("decode", "evict or grow: what decoding does", lambda run: moments(run.identity)[1]),
    _json("policy_fields", "every field of the policy, as JSON", lambda run: run.identity["policy"]),
    Column(
        "budget", "tokens per KV head per layer, or share of the prompt", lambda run: run.identity["budget"], "number"
    ),
    Column("budget_kind", "tokens_per_head, share or none", _budget_kind),
    Column("compress", "prompt, or context: what stands before the question", lambda run: compressed(run.identity)),
    Column("task", "task, and the fields that are not the preset's or differ", lambda run: run.names["task"]),
    _json("task_fields", "every field of the task, as JSON", lambda run: run.identity["task"]),
    Column("subset", "all examples, or those of one task, length or depth (--by)", lambda run: run.subset),
    Column("seed", "seed of the examples", lambda run: run.identity["seed"], "integer"),
    _metric("n", "examples", "integer"),
    _metric("n_failed", "examples that broke their budget, or came to nothing; with any, there is no score", "integer"),
    _metric("n_shared", "examples that shared prefill or decoding; with any, there are no seconds", "integer"),
    _metric("score", "mean over the examples, 0 to 1"),
    _metric("score_low", "lower end of the score's 95% interval"),
    _metric("score_high", "upper end of the score's 95% interval"),
    _metric("interval", "how the interval was found", "words"),
    _score_gap("score_vs_full", "score less that of full on the same examples", lambda found: found.mean),
    _score_gap("score_vs_full_low", "lower end of its 95% interval (Tango, or bootstrap)", lambda found: found.low),
    _score_gap("score_vs_full_high", "upper end of its 95% interval", lambda found: found.high),
    _score_gap("score_vs_full_p", "its two-sided p (McNemar, or bootstrap), of this row alone", lambda found: found.p),
    _likelihood("nll", "-log p in nats per token of given tokens, mean over all scored tokens; lower is better"),
    _likelihood("nll_low", "lower end of the NLL's 95% interval over texts"),
    _likelihood("nll_high", "upper end of the NLL's 95% interval over texts"),
    _likelihood("perplexity", "exp of the NLL, lower is better"),
    _nll_gap("nll_vs_full", "NLL less that of full on the same texts, above 0: worse", lambda found: found.nll),
    _nll_gap("nll_vs_full_low", "lower end of its 95% interval (paired bootstrap)", lambda found: found.low),
    _nll_gap("nll_vs_full_high", "upper end of its 95% interval", lambda found: found.high),
    _nll_gap("nll_vs_full_p", "its two-sided p (paired bootstrap), of this row alone", lambda found: found.p),
    _nll_gap("perplexity_gap", "perplexity less that of full on the same texts", lambda found: found.perplexity),
    _likelihood("scored_tokens", "given tokens that were scored, all texts together", "integer"),
    _likelihood("block", "m: tokens scored between two evictions", "integer"),
    _json(
        "max_kept_tokens",
        "[layer][KV head] most held while tokens were scored, the block itself included, as JSON",
        _of_texts("max_kept_tokens"),
    ),
    _json("nll_curve", "cumulative mean NLL by context length, as JSON (picture: curve)", _of_texts("curve")),
    _json("official", "aggregates as the benchmark prints them, as JSON", lambda run: run.metrics["official"]),
    _json(
        "official_intervals",
        "95% intervals of those that are means over subsets, as JSON",
        lambda run: run.metrics["official_intervals"],
    ),
    _metric("prompt_tokens", "mean per example"),
    _metric("generated_tokens", "mean per example"),
    _metric("kept_tokens", "held at the end, mean over examples, layers and KV heads"),
    _metric("cache_bytes", "held at the end: keys, values, positions, statistics, no spare bytes; mean per example"),
    _metric("spare_bytes", "reserved at the end but unused, beside cache_bytes; mean per example"),
    _metric("peak_bytes", "most ever held and spare together, mean per example"),
    _metric("device_peak_bytes", "most memory allocated on the CUDA devices, weights included, mean per example"),
    _metric("full_cache_bytes", "keys and values of prompt and answer, mean per example"),
    _metric("full_position_bytes", "positions of prompt and answer, which every cache here stores; mean per example"),
    _metric("cache_share", "cache_bytes over full_cache_bytes and full_position_bytes together"),
    Column("bits_per_number", "of quantised stores: bits for each number of the full cache", bits_per_number, "number"),
    Column("ratio_to_16_bit", "of quantised stores: full cache in 16 bits over bytes used", ratio_to_16_bit, "number"),
    _metric("evicted_share", "share of the requests in which anything was evicted"),
    _metric("prefill_seconds", "mean per example"),
    _metric("decode_seconds", "mean per example"),
    _metric("decode_ms_per_token", "milliseconds for each step after the prefill, mean per example"),
    Column("code", "digest of the code that computed it", lambda run: run.identity.get("code")),
    Column("device", "where it was computed", _device),
    Column("kvbench_revision", "git commit, if known", lambda run: run.environment["kvbench_revision"]),
    Column("mixed", "versions that differ within the run (allow_mixed=true); empty: none", lambda run: run.mixed),
    Column("state", "finished; of a sweep's cells also: failed and why, not finished, not begun", lambda _: "finished"),
)
