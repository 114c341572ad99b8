"""Check every run of a folder against its samples: prompts, scores, budgets, bytes, metrics and digests.

Samples do not show whether the model really generated the answers: run the configuration again to see that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir
from typing import Any

import click

from kvbench.cache.budgets import Budgets
from kvbench.cache.families import layout_of
from kvbench.engine.answers import scored
from kvbench.engine.prompts import blank, prompts_for
from kvbench.errors import UsageError, counted
from kvbench.models.prompt import Prompt
from kvbench.policies.allocators.allocator import JointAllocator, StatisticAllocator
from kvbench.policies.policy import read_plan
from kvbench.results.files import read_json, read_yaml
from kvbench.results.loading import read_result, run_folders
from kvbench.results.metrics import FILE_NAME as METRICS
from kvbench.results.metrics import metrics
from kvbench.results.result import Result
from kvbench.results.samples import Sample
from kvbench.results.summary import read_summary
from kvbench.run.digests import digest_of
from kvbench.run.run import Run, build_run
from kvbench.run.run_config import set_field, typed
from kvbench.tasks.trust import check_parts, reading, trust_option
from kvbench.terminal.command import FAILED, PATH, Command, pairs, quiet, write_message

FROM_THE_TASK = ("sample", "prompt_hash", "prompt_tokens", "references", "metadata", "context_tokens", "max_new_tokens")
ROUNDING = 1e-9
POSITION = 4  # bytes of a token's position


class RefusedError(Exception):
    """The reason why a run is refused."""


@click.command("check", cls=Command)
@click.argument("folder", type=PATH)
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
@trust_option
def check(folder: Path, fields: Sequence[str]) -> int:
    """Check every run of a folder against its samples: prompts, scores, budgets, bytes, metrics and digests.

    FIELD=VALUE: fields with other values on this machine, such as task.data_dir=/data. The exit code is 1 if a run is
    refused.
    """
    folders, refused = run_folders(folder), 0
    quiet()
    for run in folders:
        try:
            check_run(run, pairs(fields, "task.data_dir=/data"))
        except Exception as error:  # whatever is wrong with one run, the others are checked
            known = isinstance(error, RefusedError | UsageError)
            write_message(f"{run.name}: {error if known else f'{type(error).__name__}: {error}'}")
            refused += 1
    sys.stdout.write(f"{folder}: the samples agree in {len(folders) - refused} of {counted(len(folders), 'run')}\n")
    return FAILED if refused else 0


@reading()
def check_run(folder: Path, fields: dict[str, Any] | None = None) -> None:
    """Raise RefusedError or UsageError if the files of a run are inconsistent. fields: replace local values."""
    result = read_result(folder, whole=True)
    run = _run(result, read_yaml(folder / "config.yaml")["config"], fields or {})
    prompts = prompts_for([replace(run, limit=len(result.samples))]).first(None)
    if len(prompts) != len(result.samples):
        raise RefusedError(
            f"it has {counted(len(result.samples), 'sample')}, but its task has {counted(len(prompts), 'example')}"
        )
    for sample, prompt in zip(result.samples, prompts, strict=True):
        if reason := _sample_refused(run, prompt, sample):
            raise RefusedError(f"example {sample.index}: {reason}")
    try:
        written = dict(read_json(folder / METRICS))
    except (OSError, ValueError, TypeError) as error:
        raise RefusedError(f"metrics.json cannot be read ({type(error).__name__})") from error
    found = json.loads(json.dumps(metrics(result.samples)))  # another version may know other metrics
    wrong = sorted(name for name in written.keys() & found.keys() if written[name] != found[name])
    if wrong or "n" not in written:
        raise RefusedError(f"metrics.json does not contain the metrics of its samples ({', '.join(wrong) or 'no n'})")
    short = read_summary(folder)
    if short is not None and (short.samples.outcomes, short.run["identity"]) != (result.outcomes, result.identity):
        raise RefusedError("summary.json does not contain the scores of its samples")


def _run(result: Result, config: dict[str, Any], fields: dict[str, Any]) -> Run:
    changing_no_result = {"out": gettempdir(), "device": "auto", "engine": {}, "logger": {}}
    here = deepcopy({**config, **changing_no_result})
    for key, value in fields.items():
        set_field(here, key, value)
    check_parts(here, fields)
    run = build_run(typed(here, {name: getattr(result.naming, name) for name in ("model", "policy", "task")}))
    ours = json.loads(json.dumps(run.identity))
    skipped = {"code", *(key.partition(".")[0] for key in fields)}
    for key in {*ours, *result.identity} - skipped:
        if ours.get(key) != result.identity.get(key):
            raise RefusedError(f"{key} of its identity does not fit its configuration")
    if not result.run_id.endswith(f"-{digest_of(result.identity)}"):
        raise RefusedError("its run id is not the digest of its identity")
    changed = {key for key in run.changed if key.startswith("policy.")}
    if changed != {key for key in result.naming.changed if key.startswith("policy.")}:
        raise RefusedError(f"it is named {result.naming.policy}, but has the configuration of another policy")
    return run


def _sample_refused(run: Run, prompt: Prompt, sample: Sample) -> str | None:
    if sample.error is not None:
        return f"it failed ({sample.error})"
    expected = vars(blank(prompt))
    for name in FROM_THE_TASK:
        if getattr(sample, name) != json.loads(json.dumps(expected[name], default=vars)):
            return f"its {name} is not that of the task"
    if run.task.divergence:
        return _divergence_refused(sample) or _tokens_refused(run, prompt, sample) or _bytes_refused(run, sample)
    if sample.likelihood is not None:
        return None  # given texts have no answer, and they are evicted between blocks
    if sample.output is None:
        return "it has no answer"
    found = json.loads(json.dumps(scored(run, sample.output, prompt)))
    if {name: getattr(sample, name) for name in found} != found:
        return f"its score is {sample.score}, but its answer scores {found['score']}"
    return _tokens_refused(run, prompt, sample) or _bytes_refused(run, sample)


def _divergence_refused(sample: Sample) -> str | None:
    """Why numbers of an answer that was fed to the policy cannot be its divergence from the full cache."""
    found = sample.divergence
    if found is None:
        return "it has no divergence from full"
    lengths = {len(one) for one in (found.kl, found.delta_logprob, found.delta_p, found.same_top, found.agrees)}
    if lengths != {(sample.decode_steps or 0) + 1}:
        return (
            f"its divergence has {sorted(lengths)} numbers, but {(sample.decode_steps or 0) + 1} tokens were compared"
        )
    if min((kl for kl in found.kl if kl is not None), default=0.0) < 0:
        return "its divergence has a KL below 0"
    if not {*found.same_top, *found.agrees} <= {0, 1} or any(abs(change) > 1 for change in found.delta_p):
        return "its divergence has a probability that changes by more than 1, or a flag that is neither 0 nor 1"
    return None


def _tokens_refused(run: Run, prompt: Prompt, sample: Sample) -> str | None:
    kept, policy = sample.kept_tokens or [], run.policy
    if [len(heads) for heads in kept] != [heads for heads, _ in _heads_and_numbers(run)]:
        return "its kept_tokens do not have the model's layers and KV heads"
    new, steps = (sample.generated_tokens or 0) + len(prompt.dictated), sample.decode_steps or 0
    if not 0 <= new <= prompt.most_new_tokens or not new - 1 <= steps <= new:
        return f"it has {new} new tokens in {steps} steps, but {prompt.most_new_tokens} were allowed"
    if sample.finish_reason == "length" and new < prompt.most_new_tokens:
        return f"its finish_reason is length, but it has {new} of {prompt.most_new_tokens} new tokens"
    least = 0.0 if policy.evicts or policy.generator is not None else 1.0 - ROUNDING
    most = 1.0 + ROUNDING if sample.pre_pass_tokens is None else float("inf")
    if sample.kv_footprint is not None and not least <= sample.kv_footprint <= most:
        return f"its kv_footprint is {sample.kv_footprint}, but {policy.name} has one from {least:g} to {most:g}"
    seen = len(prompt.ids) + steps
    if min(map(min, kept)) < 0 or max(map(max, kept)) > seen:
        return f"a KV head holds fewer than 0 or more than the {seen} tokens of prompt and answer"
    if reader := policy.reader:
        read = [max(heads) for layer, heads in enumerate(sample.read_tokens or []) if not reader.reads_all(layer)]
        if max(read, default=0) > read_plan(policy, prompt.length).tokens:
            return f"its last token read {max(read)} tokens per KV head, more than its budget"
    return _budget_refused(run, prompt, kept, seen) if policy.evicts else None


def _budget_refused(run: Run, prompt: Prompt, kept: list[list[int]], seen: int) -> str | None:
    policy, allocator = run.policy, run.policy.allocator
    promise = Budgets(policy, len(kept))
    promise.begin(0, prompt.length, prompt.length if prompt.question is None else prompt.question)
    budgets = [n + (not allocator.exact) for n in promise.promise(seen)]
    held = [fmean(heads) if allocator.per_head else max(heads) for heads in kept]
    by_statistics = isinstance(allocator, JointAllocator | StatisticAllocator)  # only their total is fixed
    for layer, (tokens, budget) in enumerate(zip(held, budgets, strict=True)):
        if not by_statistics and round(tokens, 6) > budget:
            return f"layer {layer} holds {tokens:g} tokens per KV head, but its budget is {budget}"
    total, exact = round(sum(map(fmean, kept)), 6), allocator.exact and policy.selection is None
    if round(sum(held), 6) > sum(budgets) or (exact and total != sum(budgets)):
        where = counted(len(kept), "layer")
        return f"it holds {total:g} tokens per KV head in {where}, but its budget is {sum(budgets)}"
    return None


def _bytes_refused(run: Run, sample: Sample) -> str | None:
    seen = sample.prompt_tokens + (sample.decode_steps or 0)
    full, positions = run.checkpoint.full_cache_bytes(seen), run.checkpoint.full_position_bytes(seen)
    if sample.full_cache_bytes != full or sample.full_position_bytes not in (0, positions):
        return f"its full cache has {sample.full_cache_bytes} bytes, but {counted(seen, 'token')} take {full}"
    width = run.checkpoint.dtype.itemsize if run.policy.store.exact else 0
    position = 0 if run.policy.generator is not None else POSITION
    layers = zip(sample.kept_tokens or [], _heads_and_numbers(run), strict=True)
    least = sum(sum(heads) * (width * numbers + position) for heads, (_, numbers) in layers)
    if (used := sample.cache_bytes or 0) < least or (sample.peak_bytes or 0) < used:
        return f"it has {used} bytes ({sample.peak_bytes} at its peak), but its tokens take at least {least}"
    return None


def _heads_and_numbers(run: Run) -> list[tuple[int, int]]:
    """For every attention layer: the number of heads that hold tokens, and the numbers each stores per token."""
    text = run.checkpoint.config.get_text_config(decoder=True)
    by_query = run.policy.granularity == "query_head"
    shapes = [run.checkpoint.shapes[index] for index in layout_of(text).attention]
    return [(text.num_attention_heads if by_query else heads, key + value) for heads, key, value in shapes]
