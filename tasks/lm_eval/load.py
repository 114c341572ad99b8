"""lm-eval's own task objects, set up as its `simple_evaluate` does it."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2.exceptions import TemplateError

from kvbench.errors import ConfigError
from kvbench.tasks.lm_eval import squad
from kvbench.tasks.lm_eval.chat import sampling_of
from kvbench.tasks.lm_eval.data import rows_from
from kvbench.tasks.lm_eval.find import manager

CODE_REFUSED = (
    "scoring runs code that the model wrote: allow_code_execution=true permits it. lm-eval runs it on this machine, "
    "without a sandbox: use a container"
)
GENERATES, RATES = ("generate_until",), ("loglikelihood", "multiple_choice")
LmTask = Any  # lm_eval.api.task.ConfigurableTask: importing it takes seconds, which other tasks need not wait for


@dataclass(frozen=True)
class Loaded:
    """lm-eval's tasks by name; of a group also its name, and by metric whether its tasks weigh by their size."""

    tasks: dict[str, LmTask]
    group: str | None
    by_size: dict[str, bool]

    def aggregates(self, name: str) -> dict[str, Any]:
        """What is needed to sum up the results of a task without its object: whatever is not a plain mean."""
        functions = {metric: aggregation(self.tasks[name], metric) for metric in self.tasks[name].aggregation()}
        others = {metric: how for metric, how in functions.items() if how != "mean"}
        group = {"name": self.group, "weight_by_size": self.by_size} if self.group else None
        return {**({"aggregation": others} if others else {}), **({"group": group} if group else {})}


@lru_cache(maxsize=4)
def load(key: str) -> Loaded:
    """What a name of lm-eval means; key: JSON of all that decides it. Raises ValueError with one sentence."""
    wanted = json.loads(key)
    with _quietly(), _seeded():
        known = manager(wanted["task"], wanted["include_path"])
        squad.provide()
        if (known.task_index[wanted["task"]].cfg or {}).get("unsafe_code") and not wanted["allow_code_execution"]:
            raise ValueError(f"{wanted['task']}: {CODE_REFUSED}")
        if wanted["allow_code_execution"]:
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # which the metric `code_eval` of Hugging Face asks for
        with rows_from(wanted["data_dir"]):
            found = _built(known, wanted["task"], wanted["data_dir"])
    tasks, group = found["tasks"], found.get("groups", {}).get(wanted["task"])
    for name, task in tasks.items():
        _check(name, task, wanted["allow_code_execution"])
        if task.OUTPUT_TYPE in GENERATES and wanted["gen_kwargs"]:
            task.set_config(key="generation_kwargs", value=wanted["gen_kwargs"], update=True)
        generation(task)
        _check_metric(name, task, wanted["metric"])
    _set_fewshot(tasks, wanted["num_fewshot"], wanted["fewshot_split"])
    by_size = {one.metric: one.weight_by_size for one in (group.aggregate_metric_list or [])} if group else {}
    return Loaded(tasks, group.name if group else None, by_size)


def _built(known: Any, name: str, data_dir: str | None) -> dict[str, Any]:  # noqa: ANN401 - lm-eval's TaskManager
    """What lm-eval builds of a name, which reads a row. Raises ValueError where a package or a field is missing."""
    try:
        built: dict[str, Any] = known.load([name])
        return built
    except ImportError as error:
        raise ValueError(f"{name} needs a package that is not installed: {error}") from error
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        if data_dir is None:
            raise
        raise ConfigError(
            "data_dir",
            data_dir,
            why=f": its rows are not those {name} reads ({type(error).__name__}: {error}), they must "
            f"have the fields of the data set on the hub",
        ) from error


def generation(task: LmTask) -> dict[str, Any]:
    """A task's generation settings in lm-eval's normal form; {} where nothing is generated. Raises ValueError."""
    from lm_eval.models.utils import normalize_gen_kwargs

    if task.OUTPUT_TYPE not in GENERATES:
        return {}
    kwargs = dict(normalize_gen_kwargs(task.config.generation_kwargs))
    try:
        kwargs["sampling"] = sampling_of(kwargs)
    except ValueError as error:
        raise ValueError(f"{task.config.task}: {error}") from error
    if kwargs["sampling"] and task.config.repeats > 1:
        raise ValueError(
            f"{task.config.task} joins {task.config.repeats} sampled answers of a document in its filters (repeats), "
            f"which `python -m kvbench.lm_eval` does: run it there"
        )
    return kwargs


def aggregation(task: LmTask, metric: str) -> str:
    """The function that makes a task's result of its documents' values: lm-eval's name, or `module:function`."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    function = task.aggregation().get(metric)
    if function is None:
        return "mean"  # as lm-eval does it
    names = [name for name in AGGREGATION_REGISTRY if AGGREGATION_REGISTRY[name] is function]
    return names[0] if names else f"{function.__module__}:{getattr(function, '__qualname__', function)}"


def _check(name: str, task: LmTask, allow_code: bool) -> None:
    """ValueError for a task that asks for what is not done here."""
    if getattr(task, "UNSAFE_CODE", False) and not allow_code:
        raise ValueError(f"{name}: {CODE_REFUSED}")
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"{name} shows pictures or sounds, and only text is read here")
    if not hasattr(task, "task_docs"):
        raise ValueError(f"{name} is a task in lm-eval's old form, without a configuration, which is not run here")
    if task.OUTPUT_TYPE not in (*GENERATES, *RATES):
        raise ValueError(
            f"{name} rates whole texts ({task.OUTPUT_TYPE}): use task=perplexity, or `python -m kvbench.lm_eval`"
        )


def _check_metric(name: str, task: LmTask, metric: str | None) -> None:
    """ValueError for a metric the task does not have; those that run code name their values themselves (pass@1)."""
    known = [f"{one},{pipeline.name}" for one in task.aggregation() for pipeline in task._filters]
    if metric is not None and metric not in known and not getattr(task, "UNSAFE_CODE", False):
        raise ConfigError("metric", metric, why=f"is not one of {name}: {', '.join(known)}")


def _set_fewshot(tasks: Mapping[str, LmTask], count: int | None, split: str | None) -> None:
    """Few-shot settings by lm-eval's rule: a task that says 0 itself keeps it, one that says nothing gets 0.

    ConfigError where the settings cannot be had.
    """
    if count and all(task.config.num_fewshot == 0 for task in tasks.values()):
        raise ConfigError("num_fewshot", count, why=f"changes nothing: lm-eval fixes the prompts of {', '.join(tasks)}")
    for name, task in tasks.items():
        asked = task.config.test_split or task.config.validation_split
        if split is not None:
            if split == task.config.validation_split and task.config.test_split is None:
                raise ConfigError("fewshot_split", split, why=f"is what {name} asks: prompts could hold its answers")
            task.fewshot_cfg.split = split
            task.sampler.replace_df(list(task.fewshot_docs()))
        if task.config.num_fewshot != 0 and (count is not None or task.config.num_fewshot is None):
            task.set_config(key="num_fewshot", value=count or 0)
        needed, home = task.config.num_fewshot or 0, task.fewshot_cfg.split
        there = len(task.sampler.fewshot_docs()) - (home is not None and home == asked) if needed else 0
        if needed > there:
            raise ConfigError(
                "num_fewshot",
                needed,
                why=f"of {name} needs as many examples to draw from, and {max(there, 0)} are there: add the split "
                f"{home} to data_dir, set a smaller num_fewshot, or draw from what is asked "
                f"(task.fewshot_split={asked})",
            )


@contextmanager
def _seeded() -> Iterator[None]:
    """Python's and numpy's global draws as `simple_evaluate` seeds them; afterwards they are where they were."""
    import numpy as np
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


@contextmanager
def _quietly() -> Iterator[None]:
    """Remarks of lm-eval on its own configuration, and of the hub on every try, held back: errors are told once."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    showing = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if showing:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
