"""Running one cell: example after example, each on disk before the next, none of them computed twice."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kvbench.cache.kv_cache import BudgetError, KVCache
from kvbench.inference.generate import greedy
from kvbench.inference.rating import evicted, rated
from kvbench.models.loading import LoadedModel, load
from kvbench.models.prompts import Prompt, PromptMaker, answer, end_tokens, stop_test
from kvbench.runs import device_memory
from kvbench.runs.cell import Cell
from kvbench.runs.environment import environment, other_versions
from kvbench.runs.files import write_json, write_yaml
from kvbench.runs.labels import names
from kvbench.runs.likelihood import is_read, label, policy_for, rate, reads_whole
from kvbench.runs.metrics import metrics
from kvbench.runs.sample import Sample
from kvbench.runs.samples import FILE_NAME, SampleFile, open_samples, read_samples
from kvbench.runs.watch import Nobody, Watch
from kvbench.tasks.task import Example, PlainTokenizer
from kvbench.terminal.bars import meter, progress
from kvbench.terminal.errors import UsageError, refusing

log = logging.getLogger(__name__)


def run(cell: Cell, watch: Watch | None = None) -> Path:
    """Compute what is missing of a cell's examples and return the folder that holds its results.

    A run that is complete is left as it is, without loading the model. Raises UsageError where the configuration asks
    for what cannot be, RunBusyError where another process computes the same run, RunLostError where its file vanishes
    meanwhile, OSError where the disk is full.
    """
    watch = Nobody() if watch is None else watch
    prompts = make_prompts(cell)
    folder = cell.folder
    with refusing():
        done = read_samples(folder / FILE_NAME)
    _check_same_prompts(done, prompts, folder)
    if len(done) < len(prompts):
        loaded = load(cell.checkpoint, cell.device)
        folder.mkdir(exist_ok=True)
        with open_samples(folder / FILE_NAME) as file:
            _record_start(cell, loaded, prompts[0])
            watch.started(cell, tuple(file.samples))
            _compute(cell, loaded, prompts, file, watch)
            done = file.samples
            file.check()
    numbers = metrics(done)
    write_json(folder / "metrics.json", numbers)
    if cell.policy.evicts and numbers["evicted_share"] == 0:
        log.warning("%s: nothing was evicted from any cache, the budget is above every prompt", cell.run_id)
    return folder


def make_prompts(cell: Cell) -> list[Prompt]:
    """All prompts of a cell, and the check that each fits the model and the policy. Raises UsageError."""
    tokenizer = cell.checkpoint.tokenizer()
    spec = cell.checkpoint.spec
    maker = PromptMaker(tokenizer, cell.task, cell.checkpoint.max_positions, spec.max_prompt_tokens, cell.compress)
    with refusing(f"task={cell.task.name}: "):
        examples = cell.task.examples(PlainTokenizer(tokenizer), cell.seed, cell.limit)
        prompts = [maker.make(example) for example in progress(examples, "prompts", cell.limit)]
    if not prompts:
        raise UsageError(f"task={cell.task.name} has no examples")
    if cell.policy.evicts:
        layers = cell.checkpoint.config.get_text_config().num_hidden_layers
        with refusing(f"budget={cell.budget}: "):
            for length in {length for prompt in prompts for length in prompt.lengths}:
                cell.policy.layer_budgets(layers, length)
    for prompt in filter(is_read, prompts):
        with refusing(f"task={cell.task.name}: "):
            policy_for(cell.policy, prompt)
    return prompts


def _compute(cell: Cell, loaded: LoadedModel, prompts: Sequence[Prompt], file: SampleFile, watch: Watch) -> None:
    title = " ".join(str(word) for word in (cell.policy_name, cell.budget or "", cell.task.name))
    start = len(file.samples)
    if start:
        log.info("%s: continues with example %d", cell.run_id, start)
    units = [_units(prompt) for prompt in prompts]
    with meter(title, sum(units), sum(units[:start])) as advance:
        for prompt in islice(prompts, start, None):
            file.append(_finish(cell, loaded, prompt, advance))
            watch.finished(cell, file.samples[-1])


def _units(prompt: Prompt) -> int:
    """What an example counts on the bar: one, or the tokens of one that is read, which may take an hour."""
    return len(prompt.ids) + (0 if prompt.target is None else len(prompt.target)) if is_read(prompt) else 1


def _finish(cell: Cell, loaded: LoadedModel, prompt: Prompt, advance: Callable[[int], None]) -> Sample:
    """Generate or read, score and measure one example; one that broke its budget is recorded as failed."""
    example = prompt.example
    sample = Sample(
        index=example.index,
        prompt_hash=prompt.hash,
        prompt_tokens=len(prompt.ids),
        references=list(example.references),
        metadata=dict(example.metadata),
        context_tokens=prompt.context_tokens,
    )
    shown = 0

    def report(tokens: int) -> None:
        nonlocal shown
        advance(tokens - shown)
        shown = tokens

    device_memory.forget_peak(cell.device)
    try:
        if prompt.pairs:
            done = _rate(cell, loaded, prompt, sample)
        elif is_read(prompt):
            done = _read(cell, loaded, prompt, sample, report)
        else:
            done = _answer(cell, loaded, prompt, sample)
        done = replace(done, device_peak_bytes=device_memory.peak(cell.device))
    except BudgetError as error:
        log.error("%s: example %d broke its budget: %s", cell.run_id, example.index, error)
        done = replace(sample, error=f"BudgetError: {error}")
    report(_units(prompt))
    return done


def _answer(cell: Cell, loaded: LoadedModel, prompt: Prompt, sample: Sample) -> Sample:
    """The sample of an example whose answer is generated. Raises BudgetError."""
    tokenizer, example = cell.checkpoint.tokenizer(), prompt.example
    task = cell.task.asking(example)
    done = greedy(
        loaded.model,
        prompt.ids[None].to(cell.device, torch.long),
        cell.policy,
        max_new_tokens=example.max_new_tokens,
        min_new_tokens=task.min_new_tokens,
        eos_token_ids=end_tokens(loaded.model.generation_config, tokenizer, task.end_texts, task.stop),
        stop=stop_test(tokenizer, task.stop),
        cuda_graph=cell.cuda_graph,
        context_tokens=prompt.context_tokens,
    )
    output = answer(tokenizer, done.tokens[0], task.stop)
    return replace(
        sample,
        **_judged(cell, output, example),
        **_held(cell, done.cache, len(prompt.ids) + len(done.tokens[0])),
        generated_tokens=len(done.tokens[0]),
        decode_steps=done.decode_steps,
        prefill_seconds=round(done.prefill_seconds, 6),
        decode_seconds=round(done.decode_seconds, 6),
    )


def _rate(cell: Cell, loaded: LoadedModel, prompt: Prompt, sample: Sample) -> Sample:
    """The sample of an example whose continuations are rated, each on a cache of its own. Raises BudgetError."""
    answers, held, prefill_seconds, decode_seconds = [], [], 0.0, 0.0
    for pair in prompt.pairs:
        rating = rated(loaded.model, pair, cell.policy)
        answers.append([rating.logprob, rating.greedy])
        held.append(_held(cell, rating.cache, pair.tokens))
        prefill_seconds += rating.prefill_seconds
        decode_seconds += rating.decode_seconds
        del rating  # the next cache takes the place of this one
    longest = held[max(range(len(held)), key=lambda i: prompt.pairs[i].tokens)]
    all_of_them = {"peak_bytes": max(x["peak_bytes"] for x in held), "evicted": fmean(x["evicted"] for x in held)}
    return replace(
        sample,
        **_judged(cell, json.dumps(answers), prompt.example),
        **{**longest, **all_of_them},
        generated_tokens=0,
        prefill_seconds=round(prefill_seconds, 6),
        decode_seconds=round(decode_seconds, 6),
    )


def _judged(cell: Cell, output: str, example: Example) -> dict[str, Any]:
    """An output, its score, and what else its benchmark measures of it."""
    score, measures = cell.task.judge(output, example)
    return {"output": output, "score": None if score is None else float(score), "measures": dict(measures) or None}


def _read(cell: Cell, loaded: LoadedModel, prompt: Prompt, sample: Sample, report: Callable[[int], None]) -> Sample:
    """The sample of an example whose tokens are given and scored. Raises BudgetError."""
    done = rate(loaded.model, prompt, cell.policy, report=report)
    return replace(
        sample,
        **_held(cell, done.cache, done.fed),
        prefill_seconds=round(done.prefill_seconds, 6),
        decode_seconds=None if done.decode_seconds is None else round(done.decode_seconds, 6),
        likelihood=done.likelihood,
    )


def _held(cell: Cell, cache: KVCache, tokens: int) -> dict[str, Any]:
    """What a cache held at the end, and at its peak; tokens: how many a full cache would be filled with."""
    return {
        "kept_tokens": cache.kept_tokens()[:, 0].tolist(),
        "cache_bytes": cache.nbytes,
        "peak_bytes": cache.peak_nbytes,
        "spare_bytes": cache.spare_nbytes,
        "full_cache_bytes": cell.checkpoint.full_cache_bytes(tokens),
        "evicted": float(evicted(cache, tokens - 1)),
    }


def _check_same_prompts(done: Sequence[Sample], prompts: Sequence[Prompt], folder: Path) -> None:
    """Results on disk must be answers to these very prompts (a text folder may have changed behind their back)."""
    for sample, prompt in zip(done, prompts, strict=False):
        if sample.prompt_hash != prompt.hash:
            raise UsageError(
                f"{folder} holds answers to other prompts (example {sample.index} differs): the task's data changed "
                f"since; delete that folder or choose another out"
            )


def _record_start(cell: Cell, loaded: LoadedModel, first: Prompt) -> None:
    """Write config.yaml and environment.json before the first example."""
    naming = replace(cell.naming, reads=label(policy_for(cell.policy, first)) if reads_whole(first) else None)
    content = {
        "run_id": cell.run_id,
        "names": names(naming, cell.identity),
        "naming": {**asdict(naming), "changed": list(naming.changed)},
        "identity": cell.identity,
        "config": dict(cell.config),
    }
    write_yaml(cell.folder / "config.yaml", content)
    path = cell.folder / "environment.json"
    here: dict[str, Any] = {**environment(cell.device), "model": loaded.record}
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else here
    resumed = before.pop("resumed", [])
    if here not in (before, *resumed):
        changed = other_versions([before, *resumed], here)
        if changed and not cell.allow_mixed:
            raise UsageError(
                f"{cell.folder} was begun with other versions ({changed}), and a run that mixes them measures neither: "
                "go back to those, choose another out, or set allow_mixed=true, which tables will show"
            )
        log.warning("%s: continued with other versions or hardware, see environment.json", cell.run_id)
        resumed.append(here)
    write_json(path, {**before, **({"resumed": resumed} if resumed else {})})
