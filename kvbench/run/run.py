"""A checked run: its parts are built, its model is located, and its id covers every setting that affects results."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvbench.cache.families import layout_of
from kvbench.cache.watcher import Watcher
from kvbench.config.compose import find
from kvbench.config.parts import build, refusing_in
from kvbench.config.presets import SCHEDULE, build_policy, check_method, named_config, scheduled
from kvbench.errors import CHANGED, ConfigError, UsageError, refusing
from kvbench.models.cache_shapes import check_shape
from kvbench.models.devices import pick_device
from kvbench.models.files import ModelSpec, check_sha256
from kvbench.models.given import checkpoint_of
from kvbench.models.loading import Checkpoint, locate
from kvbench.models.prompts import COMPRESS
from kvbench.models.replay import check_graph, records
from kvbench.policies.checks import choice, whole_number
from kvbench.policies.describe import describe
from kvbench.policies.latents import check_latents
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_budget, check_layers
from kvbench.policies.pre_passes.lookahead import Lookahead
from kvbench.policies.selections.fair import NEEDS_PARTS, Fair
from kvbench.results.labels import Naming
from kvbench.run.digests import code_digest, digest_of, modules_of, with_data
from kvbench.run.run_config import RunConfig, Sampling, changed_fields, prompt_fields, schedule_fields
from kvbench.tasks.task import Task
from kvbench.tasks.trust import trust

IDENTITY_VERSION = 3  # raise it where the same configuration comes to mean something else


@dataclass(frozen=True)
class Run:
    """One run: its parts, its model, its device and the folder of its results."""

    policy: Policy
    policy_name: str
    task: Task
    checkpoint: Checkpoint
    device: torch.device
    seed: int
    limit: int | None
    out: Path
    cuda_graph: bool
    compile: bool
    allow_version_mismatch: bool
    config: Mapping[str, Any]  # the resolved configuration
    compress: str = "prompt"  # or "context": the text before the question
    rows: int | None = None  # most sequences in a batch; 1: one by one; None: as many as memory allows
    save_seconds: float = 10  # an example is on disk this long after it started: see `Pace`
    changed: tuple[str, ...] = ()  # fields of the identity that differ from the presets
    sampling: Sampling | None = None  # None: as the task defines it
    watch: tuple[Watcher, ...] = ()
    samples: int = 1  # answers to each prompt; limit and samples count answers

    @property
    def budget(self) -> int | float | None:
        """Tokens per KV head per layer or share of the prompt; None if the policy keeps everything."""
        return self.policy.budget

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Every setting that affects results, and nothing else.

        The limit is not part of it: example i does not depend on it, so a larger limit continues the run. Neither are
        device and folders. Defaults of parts are spelled out, files count by their contents, and the code that computes
        by its digest.
        """
        policy, task = describe(self.policy, without=("budget", "name")), with_data(describe(self.task))
        watch = describe(self.watch)
        return {
            "version": IDENTITY_VERSION,
            "model": dict(self.checkpoint.identity),
            "dtype": str(self.checkpoint.dtype).removeprefix("torch."),
            "policy": policy,
            "budget": self.budget,
            "task": task,
            "compress": self.compress,
            "seed": self.seed,
            "generation": {**self._decoding, **prompt_fields(vars(self.checkpoint.spec))},
            **({"compile": True} if self.compile else {}),  # rounds differently
            **({"watch": watch} if watch else {}),
            "code": code_digest([policy, task, watch]),
        }

    @property
    def _decoding(self) -> dict[str, Any]:
        """How tokens are chosen."""
        if self.sampling is None or self.sampling.greedy:
            return {"decoding": self.task.decoding if self.sampling is None else "greedy"}
        return {"decoding": "sampled", **asdict(self.sampling), "samples": self.samples}

    @cached_property
    def run_id(self) -> str:
        """Readable words, then the first 10 digits of the sha256 of the identity."""
        words = [self.checkpoint.spec.name, self.policy_name, *([] if self.budget is None else [str(self.budget)])]
        name = "-".join([*words, self.task.name, digest_of(self.identity)]).replace("/", "_")
        return re.sub(r"^[.-]", "_", name)  # neither a hidden folder nor an option

    def check_data(self) -> None:
        """Raise UsageError if the task's data, which was just read, is no longer that of the identity."""
        if with_data(describe(self.task)) != self.identity["task"]:
            raise UsageError(f"{self.run_id}: {CHANGED}")

    @property
    def folder(self) -> Path:
        """The folder of this run's files."""
        return self.out / self.run_id

    @property
    def naming(self) -> Naming:
        """The parts of its labels in tables."""
        return Naming(self.policy_name, self.checkpoint.spec.name, self.task.name, self.changed)


def build_run(config: RunConfig) -> Run:
    """Build the parts of a run and check that they fit together; no weights are loaded and nothing is computed.

    Raises UsageError for the first wrong value, cheap checks first.
    """
    with refusing_in("generation", vars(config.generation)):
        sampling, samples = config.generation.sampling, config.generation.samples
    device = pick_device(config.device)
    policy, task = _policy(config), _task(config)
    compress = _compress(config, policy, task)
    _check_spans(policy, task)
    watch = _watchers(config.watch)
    cuda_graph = _cuda_graph(config.engine.cuda_graph, policy, device)
    out = out_folder(config.out)
    trust(modules_of([describe(policy), describe(task), describe(watch)]))  # the user named these classes
    spec = _model_spec(config)
    checkpoint = locate(spec, config.dtype or "null") if config.given is None else checkpoint_of(config.given, spec)
    with _in_policy(config):
        check_shapes(policy, checkpoint)
    return Run(
        policy=policy,
        policy_name=config.names["policy"],
        task=task,
        checkpoint=checkpoint,
        device=device,
        seed=config.seed,
        limit=None if config.limit is None else config.limit * samples,
        out=out,
        cuda_graph=cuda_graph,
        compile=config.engine.compile,
        allow_version_mismatch=config.allow_version_mismatch,
        config=config.record,
        compress=compress,
        rows=config.engine.rows,
        save_seconds=config.engine.save_seconds,
        changed=changed_fields(config) + (() if checkpoint.dtype == checkpoint.stored_dtype else ("dtype",)),
        sampling=sampling,
        samples=samples,
        watch=watch,
    )


def check_shapes(policy: Policy, checkpoint: Checkpoint) -> None:
    """Raise ValueError if the model has no layer that the policy names, or heads that its parts do not support."""
    text = checkpoint.config.get_text_config(decoder=True)
    layout = layout_of(text)
    check_layers(len(layout.attention), policy.store, policy.pre_pass)
    own = [checkpoint.shapes[index] for index in layout.attention]
    if policy.granularity == "query_head":
        own = [(text.num_attention_heads, key, value) for _, key, value in own]
    policy.allocator.check_heads([heads for heads, _, _ in own])
    if layout.latent:
        check_latents(policy)
        return
    for heads, _, dim in dict.fromkeys(own):
        policy.store.check_shape(heads, dim)


def check_context(policy: Policy) -> None:
    """Raise ValueError if a policy cannot compress a context before the question is known.

    All others can. Decisions that are based on the last tokens of a prompt (observation windows, TOVA's row,
    GemFilter's choice) are then based on the last tokens of the context; a pre-pass also rates the question's tokens.
    """
    if policy.schedule.late:
        raise ValueError(
            f"compress=context compresses before the question is read, but {policy.name} evicts only after a token "
            "behind the prompt has attended to all of it (late=true): use compress=prompt"
        )
    if isinstance(policy.pre_pass, Lookahead):
        raise ValueError(
            f"{policy.name} generates the first tokens of the answer before it compresses, and a context without its "
            "question has none: use compress=prompt"
        )
    if policy.needs.question:
        raise ValueError(
            f"{policy.name} compresses a context by its question, which is not known with compress=context: use "
            "compress=prompt"
        )


def _watchers(configs: Sequence[object]) -> tuple[Watcher, ...]:
    """The watchers of evictions. Raises ConfigError."""
    found: dict[str, Watcher] = {}
    for place, config in enumerate(configs):
        watcher = build(config, (f"watch[{place}]",))
        if not isinstance(watcher, Watcher):
            raise ConfigError(f"watch[{place}]", config, why="is not a watcher: its _target_ must name a Watcher")
        if watcher.name in found:
            raise ConfigError(f"watch[{place}]", config, why=f"is a second watcher with the name {watcher.name}")
        found[watcher.name] = watcher
    return tuple(found.values())


def _check_spans(policy: Policy, task: Task) -> None:
    """Raise ConfigError if a policy keeps parts of prompts and the task names none."""
    protection = policy.schedule.protection
    if protection is not None and "spans" in protection.reads and not task.protects:
        why = f"keeps parts of a prompt, and task {task.name} names none: use task=instructions or protect=none"
        raise ConfigError("protect", policy.schedule.protect, why=why)
    if isinstance(policy.selection, Fair) and not task.protects:
        raise ConfigError("policy.selection", "Fair", why=NEEDS_PARTS)


def _compress(config: RunConfig, policy: Policy, task: Task) -> str:
    choice("compress", config.compress, *COMPRESS)
    if task.compress is not None and config.compress not in ("prompt", task.compress):
        why = f"is not supported by task {task.name} in this mode, leave it out"
        raise ConfigError("compress", config.compress, why=why)
    compress = task.compress or config.compress
    if compress == "context":
        with refusing():
            check_context(policy)
    return compress


def _cuda_graph(value: bool | str, policy: Policy, device: torch.device) -> bool:
    """Whether decoding steps are recorded; auto: if that is possible."""
    if value == "auto":
        return records(policy, device)
    if value is True:
        with refusing():
            check_graph(policy, device)
    return value is True


def _in_policy(config: RunConfig) -> AbstractContextManager[None]:
    """Errors inside name the fields of the policy by their paths."""
    return refusing_in("policy", config.policy if isinstance(config.policy, Mapping) else {})


def _policy(config: RunConfig) -> Policy:
    if isinstance(config.policy, Policy):
        return config.policy
    parts = dict(config.policy)
    if "budget" in parts:
        raise ConfigError("policy.budget", parts["budget"], why=f"has no effect, write budget={parts['budget']}")
    if not isinstance(parts.get("schedule", {}), Mapping):
        schedule = parts["schedule"]
        raise ConfigError("policy.schedule", schedule, why=f"is not a part, write schedule={schedule}")
    preset: Mapping[str, Any] = {}
    with suppress(UsageError):  # a name of the caller has none
        preset = named_config("policy", config.names["policy"], config.folders)
    check_method(preset, parts)
    if config.budget is not None:
        with refusing():
            check_budget(config.budget)  # also of a policy that does not use it
    _ = scheduled(parts, *(getattr(config, name) for name in SCHEDULE))  # also of a policy that does not use them
    with _in_policy(config):
        return build_policy(
            {**scheduled(parts, *schedule_fields(vars(config))), "name": config.names["policy"]}, config.budget
        )


def _task(config: RunConfig) -> Task:
    if isinstance(config.task, Task):
        return config.task
    try:
        with refusing_in("task", config.task, "task: "):
            task = build(config.task)
    except (ImportError, OSError) as error:
        raise UsageError(f"task: {error}") from error
    if not isinstance(task, Task):
        raise ConfigError("task._target_", config.task.get("_target_"), why="is not a task")
    if getattr(task, "data_dir", None) == "":
        raise ConfigError("task.data_dir", "", why="is not allowed, it must be a file or a folder, or null")
    return task


def _model_spec(config: RunConfig) -> ModelSpec:
    fields, path = dict(config.model), config.model.get("path")
    if path is not None and fields.get("bundled") is not None:  # model.path= with the default model
        fields |= {"bundled": None, "dtype": "auto"}
    name = fields.get("name") or _model_name(config, path, fields.get("hub_id"))
    if "attn_implementation" in fields:
        why = "is not allowed: kvbench computes the attention of every decoder layer, also for policy=full"
        raise ConfigError("model.attn_implementation", fields["attn_implementation"], why=why)
    with refusing_in("model", fields):
        spec: ModelSpec = build({**fields, "_target_": f"{ModelSpec.__module__}.ModelSpec", "name": name})
        for field in ("path", "hub_id", "revision"):
            value = fields.get(field)
            if value == "":
                raise ConfigError(field, value, why="must be text or null")
            ignored = path is not None and field != "path" and spec.sha256 is None  # else path is a copy of that file
            if value is not None and (spec.bundled or ignored):
                read = f"model.path={path}" if path is not None else f"the folder of model={config.names['model']}"
                raise ConfigError(field, value, why=f"has no effect: {read} is read instead")
        if (spec.hub_id or "").count("/") > 1:
            raise ConfigError("hub_id", spec.hub_id, why="is not allowed, it must be owner/name")
        check_sha256(spec)
        if spec.shape is not None:
            check_shape(spec.shape)
        if spec.system_prompt is not None and not spec.system_prompt.strip():
            raise ConfigError("system_prompt", spec.system_prompt, why="must be text or null")
        if spec.max_prompt_tokens is not None:
            whole_number("max_prompt_tokens", spec.max_prompt_tokens, 2)
        return spec


def _model_name(config: RunConfig, path: object, hub_id: object) -> str:
    """The name of the model's file in conf/model; otherwise that of its folder or of its repository on the Hub."""
    chosen = config.names["model"]
    own_file = chosen not in ("local", "hub") and find("model", chosen, config.folders) is not None
    if config.given is not None or (own_file and not (path is not None and config.model.get("bundled"))):
        return chosen
    if path is not None:
        folder = Path(os.path.expanduser(str(path))).resolve()
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return folder.parent.parent.name.rpartition("--")[2]  # models--owner--name/snapshots/<commit>
        return folder.name
    return str(hub_id).rpartition("/")[2] if hub_id else chosen


def out_folder(value: object) -> Path:
    """The folder of `out`, which is created with its first file. Raises UsageError if it is not writable."""
    if isinstance(value, bool) or not isinstance(value, str | int | Path) or not str(value).strip():
        raise ConfigError("out", value, why="is not allowed, it must be a folder, such as results/runs")
    out = Path(os.path.expanduser(str(value)))
    try:
        with tempfile.TemporaryFile(dir=next(folder for folder in (out, *out.parents) if os.path.lexists(folder))):
            return out
    except OSError as error:
        raise UsageError(f"out={out} cannot be written to ({error.strerror}), choose another folder") from error
