"""Loads lm-eval's task objects by name, with rows from the Hub or from a local copy."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from jinja2.exceptions import TemplateError

from kvbench.errors import ConfigError, counted
from kvbench.tasks.instructions.rules import LETTERS, any_character
from kvbench.tasks.instructions.verify import check_nltk, seed_language_detection
from kvbench.tasks.longbench.metrics import plain
from kvbench.tasks.scores import bag_f1

CODE_REFUSED = (
    "scoring runs code that the model wrote: allow_code_execution=true permits it. lm-eval runs it on this machine, "
    "without a sandbox: use a container"
)
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
GENERATES, RATES = "generate_until", ("loglikelihood", "multiple_choice")
HONOURED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
SQUAD = "transformers.data.metrics"
LmTask = Any  # lm_eval.api.task.ConfigurableTask; its import takes seconds, so it is only imported when it is needed


@dataclass(frozen=True)
class Loaded:
    """lm-eval's tasks by name. For a group: its name, and for each metric whether tasks are weighted by their size."""

    tasks: dict[str, LmTask]
    group: str | None
    by_size: dict[str, bool]

    def aggregates(self, name: str) -> dict[str, Any]:
        """Metadata from which `summary` aggregates a task without loading it: the group, and metrics without a mean."""
        functions = {metric: aggregation(self.tasks[name], metric) for metric in self.tasks[name].aggregation()}
        others = {metric: function for metric, function in functions.items() if function != "mean"}
        group = {"name": self.group, "weight_by_size": self.by_size} if self.group else None
        return {**({"aggregation": others} if others else {}), **({"group": group} if group else {})}


@lru_cache(maxsize=4)
def load(key: str) -> Loaded:
    """Load a task, group or tag of lm-eval; key: JSON of the fields of `LmEval` that matter.

    Raises ValueError with a one-line message for unknown names, missing data and settings that are not supported.
    """
    import datasets
    import numpy as np
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    settings = json.loads(key)
    name, data_dir, allow_code = settings["task"], settings["data_dir"], settings["allow_code_execution"]
    for logger in ("lm_eval", "datasets", "huggingface_hub"):  # errors are raised below
        logging.getLogger(logger).setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    random.seed(DEFAULT_RANDOM_SEED)  # as in lm-eval's `simple_evaluate`; some tasks shuffle their rows
    np.random.seed(DEFAULT_OTHER_SEED)
    known = manager(name, settings["include_path"])
    provide_squad_metrics()
    if (known.task_index[name].cfg or {}).get("unsafe_code") and not allow_code:
        raise ValueError(f"{name}: {CODE_REFUSED}")
    if allow_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # read by Hugging Face's metric `code_eval`
    try:
        config = known.task_index[name].cfg or {}
        with rows_from(data_dir, config.get("test_split") or config.get("validation_split") or "test"):
            found = known.load([name])
    except ImportError as error:
        raise ValueError(f"{name} needs a package that is not installed: {error}") from error
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        if data_dir is None:
            raise
        reason = f": its rows must have the fields of the data set on the Hub ({type(error).__name__}: {error})"
        raise ConfigError("data_dir", data_dir, why=reason) from error
    tasks, group = found["tasks"], found.get("groups", {}).get(name)
    for one, task in tasks.items():
        _check_verifiers(one, task)
        _check(one, task, allow_code, settings["metric"])
        if task.OUTPUT_TYPE == GENERATES and settings["gen_kwargs"]:
            task.set_config(key="generation_kwargs", value=settings["gen_kwargs"], update=True)
        generation(task)
    _set_fewshot(tasks, settings["num_fewshot"])
    by_size = {one.metric: one.weight_by_size for one in (group.aggregate_metric_list or [])} if group else {}
    return Loaded(tasks, group.name if group else None, by_size)


def manager(name: str, include_path: str | None = None) -> Any:  # noqa: ANN401 - lm-eval's TaskManager
    """lm-eval's TaskManager, limited to the folder that defines `name` if it has all its parts.

    The complete index of 14,000 files takes 15 seconds. include_path: a folder with your own task files. Raises
    ValueError, with similar names, for an unknown name.
    """
    from lm_eval.tasks import TaskManager

    def complete(index: Mapping[str, Any], name: str) -> bool:
        config = index[name].cfg if name in index else None
        members = config.get("task") if config else None
        names = [member for member in members if isinstance(member, str)] if isinstance(members, list) else []
        return bool(config) and all(complete(index, member) for member in names)

    own: list[str | Path] = [] if include_path is None else [str(Path(include_path).expanduser())]
    folder, words = _folders(), dict[str, Any]()
    for folders in (own, [*own, *([folder[name]] if name in folder else [])]):
        if folders:
            known = TaskManager(include_path=folders, include_defaults=False)
            if complete(known.task_index, name):
                return known
            words |= known.task_index
    if name in words or _mentioned(name):
        known = TaskManager(include_path=own or None)
        if name in known.task_index:
            return known
    close = get_close_matches(name, [*words, *folder], n=3)
    hint = f", did you mean {' or '.join(close)}?" if close else ", `lm-eval ls tasks` lists all tasks"
    nor = "" if include_path is None else f", nor has include_path={include_path}"
    raise ValueError(f"lm-eval has no task {name}{nor}{hint}")


def _texts() -> Iterator[tuple[Path, str]]:
    """The path and the text of each of lm-eval's task files, and of those they include, which have no suffix."""
    for path in sorted(Path(str(files("lm_eval"))).joinpath("tasks").rglob("*")):
        if path.suffix in ("", ".yaml") and path.is_file():
            yield path, path.read_text(encoding="utf-8")


def task_names() -> list[str]:
    """The sorted names of lm-eval's tasks and groups; none if it is not installed."""
    return sorted(_folders()) if find_spec("lm_eval") else []


@lru_cache(maxsize=1)
def _folders() -> dict[str, str]:
    """The folder of lm-eval with the file that defines each task or group, by name."""
    line = re.compile(r"^[\"']?(?:task|group)[\"']?:[ \t]*[\"']?([^\s\"'#]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)
    found = [(name, str(path.parent)) for path, text in _texts() if path.suffix for name in line.findall(text)]
    return dict(reversed(found))  # the first file of several


def _mentioned(name: str) -> bool:
    """Whether a task file of lm-eval has this word, as the name of a task, group or tag in any notation."""
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return any(name in text and word.search(text) for _, text in _texts())


@contextmanager
def rows_from(data_dir: str | None, split: str = "test") -> Iterator[None]:
    """In this context lm-eval reads rows from `data_dir` (None: the Hub). Raises ValueError if it cannot.

    split: that of a file whose name has none.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    load_dataset = datasets.load_dataset

    def loader(path: str, name: str | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            if data_dir is None or path in FORMATS.values():
                return load_dataset(path, name, **kwargs)
            return _Splits(_local(load_dataset, Path(data_dir).expanduser(), path, name, split))
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # no network, unknown or damaged data
            reason = " ".join(str(error).split())[:160]
            what = f"{path} ({name})" if name else path
            raise ValueError(
                f"{what} cannot be loaded ({type(error).__name__}: {reason}): `hf download {path} --repo-type dataset "
                "--local-dir DIR` downloads it, then task.data_dir=DIR reads that copy"
            ) from error

    with patch.object(datasets, "load_dataset", loader):  # lm-eval has no argument for a local copy
        yield


def _local(load_dataset: Callable[..., Any], where: Path, path: str, name: str | None, split: str) -> Any:  # noqa: ANN401
    """The splits of a local copy: a folder with the Hub's files or with one folder per configuration, or one file."""
    if where.is_file():
        kind = FORMATS.get(Path(where.name.removesuffix(".gz")).suffix)
        if kind is None:
            raise ConfigError("data_dir", str(where), why=f"must end in one of {', '.join(FORMATS)}, or be a folder")
        split = next((one for one in ("train", "validation", "test") if one in where.name.lower()), split)
        return load_dataset(kind, data_files={split: str(where)})
    if not where.is_dir():
        raise ConfigError("data_dir", str(where), why="does not exist")
    base = next(one for one in (where / path.split("/")[-1], where) if one.is_dir())
    if name and (base / name).is_dir():
        return load_dataset(str(base / name))
    return load_dataset(str(base), name) if name and (base / "README.md").is_file() else load_dataset(str(base))


class _Splits(dict[str, Any]):
    """Splits by name; a missing one is empty, because few-shot examples are often not needed."""

    def __missing__(self, split: str) -> Any:  # noqa: ANN401 - a Dataset
        return next(iter(self.values())).select([])


def generation(task: LmTask) -> dict[str, Any]:
    """A task's generation settings in lm-eval's normal form, and `sampling`: temperature, top_p, top_k or None.

    {} for tasks that generate nothing. Raises ValueError for settings that are not supported.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    if task.OUTPUT_TYPE != GENERATES:
        return {}
    kwargs: dict[str, Any] = {**normalize_gen_kwargs(task.config.generation_kwargs)}
    name, sampled = task.config.task, bool(kwargs.get("do_sample"))
    others = sorted(set(kwargs) - HONOURED - (set() if sampled else {"min_p"}))
    if others:
        raise ValueError(f"{name}: gen_kwargs {', '.join(others)} cannot be honoured, only {', '.join(HONOURED)} can")
    if sampled and float(kwargs.get("temperature", 1.0)) <= 0:
        raise ValueError(f"{name}: do_sample=true needs a temperature above 0, got {kwargs['temperature']}")
    if sampled and task.config.repeats > 1:
        raise ValueError(f"{name} combines several sampled answers of a document (repeats), which is not supported")
    settings = {key: kwargs[key] for key in ("temperature", "top_p", "top_k") if key in kwargs}
    return {**kwargs, "sampling": {"temperature": 1.0, **settings} if sampled else None}


def aggregation(task: LmTask, metric: str) -> str:
    """The function that aggregates a metric over documents: lm-eval's name, or `module:function`."""
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    function = task.aggregation().get(metric)
    if function is None:
        return "mean"  # as in lm-eval
    names = [name for name in AGGREGATION_REGISTRY if AGGREGATION_REGISTRY[name] is function]
    return names[0] if names else f"{function.__module__}:{getattr(function, '__qualname__', function)}"


def _check(name: str, task: LmTask, allow_code: bool, metric: str | None) -> None:
    """Raise ValueError for tasks that are not supported, and for an unknown metric."""
    unsafe = getattr(task, "UNSAFE_CODE", False)
    if unsafe and not allow_code:
        raise ValueError(f"{name}: {CODE_REFUSED}")
    if getattr(task, "MULTIMODAL", False) or not hasattr(task, "task_docs"):
        raise ValueError(f"{name} is not supported: it needs images or sounds, or it has no YAML configuration")
    if task.OUTPUT_TYPE not in (GENERATES, *RATES):
        raise ValueError(f"{name} scores whole texts ({task.OUTPUT_TYPE}): use task=perplexity")
    metrics = [f"{one},{pipeline.name}" for one in task.aggregation() for pipeline in task._filters]
    if metric is not None and metric not in metrics and not unsafe:  # tasks that run code name their values differently
        raise ConfigError("metric", metric, why=f"is not one of {name}: {', '.join(metrics)}")


def _check_verifiers(name: str, task: LmTask) -> None:
    """For IFEval: raise ValueError if NLTK's data is missing, and draw nothing in its verdicts."""
    if task.config.dataset_path != "google/IFEval":
        return
    check_nltk(name, [instruction for row in task.task_docs for instruction in row["instruction_id_list"]])
    seed_language_detection()
    known = import_module("lm_eval.tasks.ifeval.instructions_registry").INSTRUCTION_DICT
    known[LETTERS] = any_character(known[LETTERS])


def _set_fewshot(tasks: Mapping[str, LmTask], count: int | None) -> None:
    """Set the number of examples in prompts as lm-eval does: a task that sets 0 keeps 0, and the default is 0."""
    if count and all(task.config.num_fewshot == 0 for task in tasks.values()):
        raise ConfigError("num_fewshot", count, why=f"has no effect: lm-eval fixes the prompts of {', '.join(tasks)}")
    for name, task in tasks.items():
        if task.config.num_fewshot != 0 and (count is not None or task.config.num_fewshot is None):
            task.set_config(key="num_fewshot", value=count or 0)
        needed, split = task.config.num_fewshot or 0, task.fewshot_cfg.split
        evaluated = split is not None and split == (task.config.test_split or task.config.validation_split)
        available = max(len(task.sampler.fewshot_docs()) - evaluated, 0) if needed else 0
        if needed > available:
            why = f"of {name} needs {counted(needed, 'example')}, but the split {split} has {available}: "
            why += "add it to data_dir"
            raise ConfigError("num_fewshot", needed, why=f"{why}, or set a smaller num_fewshot")


def provide_squad_metrics() -> None:
    """Define the module `squad_metrics` that lm-eval's tasks import and transformers 5 has removed.

    Source: Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1: exact match and F1 over words, without articles and
    punctuation. An empty answer only matches an empty reference (SQuAD 2.0).
    """

    def compute_exact(reference: str, answer: str) -> int:
        return int(plain(reference).split() == plain(answer).split())

    def compute_f1(reference: str, answer: str) -> float:
        expected, found = plain(reference).split(), plain(answer).split()
        return bag_f1(found, expected) if expected and found else float(expected == found)

    if SQUAD not in sys.modules and find_spec(SQUAD) is None:
        package, metrics = ModuleType(SQUAD), ModuleType(f"{SQUAD}.squad_metrics")
        vars(metrics).update(compute_exact=compute_exact, compute_f1=compute_f1)
        vars(package).update(squad_metrics=metrics)
        sys.modules |= {SQUAD: package, f"{SQUAD}.squad_metrics": metrics}
