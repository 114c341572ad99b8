"""One cell of a benchmark: every field of the configuration checked, and the identity that follows from them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvbench.cache.layout import layout_of
from kvbench.config.naming import refusing_in
from kvbench.config.presets import SCHEDULE, build_policy, scheduled
from kvbench.config.tree import build, part_class
from kvbench.errors import ConfigError, UsageError
from kvbench.identity.code_digest import code_digest, modules_of
from kvbench.identity.labels import Naming, flat
from kvbench.inference.context import check_context
from kvbench.inference.cuda_graph import can_record, can_replay, check_graph
from kvbench.inference.sampling import Sampling, check_samples
from kvbench.models.cache_shapes import check_shape
from kvbench.models.given import checkpoint_of
from kvbench.models.loading import Checkpoint, GivenModel, ModelSpec, locate, pick_device
from kvbench.models.prompts import COMPRESS
from kvbench.policies.checks import choice, whole_number
from kvbench.policies.describe import describe
from kvbench.policies.latents import check_latents
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_budget, check_layers
from kvbench.records.shards import Shard
from kvbench.tasks.task import Task
from kvbench.terminal.errors import refusing

IDENTITY_VERSION = 2  # raise it where the same configuration comes to mean something else
COMPUTES = (
    "kvbench.inference.generate",
    "kvbench.engine.batch",
    "kvbench.engine.prefill",
    "kvbench.engine.prefill_examples",
    "kvbench.engine.sequence",
    "kvbench.inference.rating",
    "kvbench.models.cache_shapes",
    "kvbench.models.prompts",
    "kvbench.models.loading",
    "kvbench.engine.answers",
    "kvbench.engine.device_memory",
    "kvbench.engine.likelihood",
    "kvbench.identity.reading",
    "kvbench.records.kept_heads",
    "kvbench.engine.one_by_one",
    "kvbench.engine.prompts",
    "kvbench.records.sample",
    "kvbench.engine.scheduler",
)
"""What computes and records a run's numbers: these modules, the parts of its policy, its task, and what they import.

Of the rooms `analysis`, `config`, `engine`, `identity`, `records` and `terminal` only what stands here counts.
"""


@dataclass(frozen=True)
class Cell:
    """What one run computes, where it computes it, and where the results go."""

    policy: Policy
    policy_name: str
    task: Task
    checkpoint: Checkpoint
    device: torch.device
    seed: int
    limit: int | None
    out: Path
    cuda_graph: bool
    allow_mixed: bool
    config: Mapping[str, Any]  # as it was given, resolved
    compress: str = "prompt"  # or "context": what stands before the question
    rows: int | None = None  # at most so many in flight; 1: examples one by one; None: as many as memory allows
    changed: tuple[str, ...] = ()  # fields of the identity that are not as the presets have them
    shard: Shard | None = None  # of its examples only these; None: all of them
    sampling: Sampling | None = None  # None: as the task says
    samples: int = 1  # answers to each prompt; limit, shards and samples count answers

    @property
    def budget(self) -> int | float | None:
        """Tokens per KV head per layer or share of the prompt; None where the policy keeps everything anyway."""
        return self.policy.budget

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the outcome, and nothing else.

        The limit is not part of it (example i does not depend on it, so a larger limit continues the run), nor are the
        device and the folders. Fields a YAML leaves to its part's default are spelled out: were a default to change,
        old results would not be taken for new ones. The same goes for files that the policy reads (see `describe`), and
        for the code that computes (see `code_digest`). The task's data is held against the samples (see `Running`).
        """
        policy, task = describe(self.policy, without=("budget", "name")), describe(self.task)
        return {
            "version": IDENTITY_VERSION,
            "model": dict(self.checkpoint.identity),
            "dtype": str(self.checkpoint.dtype).removeprefix("torch."),
            "policy": policy,
            "budget": self.budget,
            "task": task,
            "compress": self.compress,
            "seed": self.seed,
            "generation": {**self._decoding, "max_prompt_tokens": self.checkpoint.spec.max_prompt_tokens},
            "code": code_digest([*COMPUTES, *modules_of(policy), *modules_of(task)]),
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
        digest = digest_of(self.identity)
        words = [self.checkpoint.spec.name, self.policy_name, *([] if self.budget is None else [str(self.budget)])]
        return "-".join([*words, self.task.name, digest]).replace("/", "_")

    @property
    def folder(self) -> Path:
        """Where this run's files are."""
        return self.out / self.run_id

    @property
    def place(self) -> Path:
        """Where the one who computes it writes: the run's folder, or that of its shard."""
        return self.folder if self.shard is None else self.shard.folder(self.folder)

    @property
    def naming(self) -> Naming:
        """What its labels in tables are made of."""
        return Naming(self.policy_name, self.checkpoint.spec.name, self.task.name, self.changed)


def digest_of(identity: Mapping[str, Any]) -> str:
    """The end of a run's id: the first 10 digits of the sha256 of its identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


def build_cell(
    config: Mapping[str, Any],
    policy_name: str,
    model_name: str,
    preset: Mapping[str, Any] | None = None,
    given: GivenModel | None = None,
) -> Cell:
    """Check every field of a resolved configuration; nothing is computed and no weights are loaded.

    preset: the configuration of the same choices with no field set, from which labels tell what differs; None: this
    one. given: a model object, in place of the one that the configuration names. Raises UsageError for the first wrong
    value found, cheap checks first.
    """
    seed, limit = config["seed"], config["limit"]
    _flag("debug", config["debug"])
    if not isinstance(config["engine"], Mapping) or set(config["engine"]) != {"rows", "cuda_graph"}:
        raise ConfigError(
            "engine", config["engine"], why="is not allowed, set its fields: engine.rows, engine.cuda_graph"
        )
    whole_number("seed", seed, 0, 2**32 - 1)  # what NumPy's streams take
    if limit is not None:
        whole_number("limit", limit, 1)
    sampling, samples = _sampling(config)
    device = pick_device(str(config["device"]))
    policy = _policy(config, policy_name)
    compress, rows = config["compress"], config["engine"]["rows"]
    choice("compress", compress, *COMPRESS)
    if rows is not None:
        whole_number("engine.rows", rows, 1)
    cuda_graph = _cuda_graph(config["engine"]["cuda_graph"], policy, device)
    task = _task(config["task"])
    if task.compress is not None and compress not in ("prompt", task.compress):
        raise ConfigError("compress", compress, why=f"is not what task {task.name} does in this mode, leave it out")
    compress = task.compress or compress
    if compress == "context":
        with refusing():
            check_context(policy)
    out = out_folder(config["out"])
    spec = _model_spec(config["model"], model_name)
    checkpoint = locate(spec, str(config["dtype"] or "null")) if given is None else checkpoint_of(given, spec)
    with refusing_in("policy", config["policy"]):
        check_shapes(policy, checkpoint)
    with refusing():
        cuda_graph = cuda_graph and can_replay(checkpoint.config, asked=config["engine"]["cuda_graph"] is True)
    _flag("allow_mixed", config["allow_mixed"])
    return Cell(
        policy=policy,
        policy_name=policy_name,
        task=task,
        checkpoint=checkpoint,
        device=device,
        seed=seed,
        limit=None if limit is None else limit * samples,
        out=out,
        cuda_graph=cuda_graph,
        allow_mixed=config["allow_mixed"],
        config=config,
        compress=compress,
        rows=rows,
        changed=() if preset is None else changed_fields(config, preset),
        sampling=sampling,
        samples=samples,
    )


def changed_fields(config: Mapping[str, Any], preset: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of the identity ("policy.scorer.window") whose value in `config` is not that in `preset`."""
    own, given, bare = _settings(config), _settings(preset), _settings(_bare(config))
    found = [key for key, value in own.items() if key not in given or value != given[key]]

    def counts(key: str) -> bool:  # of a part that the preset has not, its class and what is not the class's default
        return not _inside(key, found) or _is_part(key, own) or key not in bare or own[key] != bare[key]

    return tuple(filter(counts, found))


def _inside(key: str, parts: Sequence[str]) -> bool:
    """Whether a field is one of a part among these."""
    steps = key.split(".")
    return any(".".join(steps[:end]) in parts for end in range(1, len(steps)))


def _is_part(key: str, settings: Mapping[str, Any]) -> bool:
    """Whether a field is a part, with fields of its own."""
    return any(other.startswith(f"{key}.") for other in settings)


def _bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with all fields of its policy's and its task's parts left to their defaults."""

    def stripped(part: Any) -> Any:  # noqa: ANN401 - whatever a YAML holds
        if not isinstance(part, Mapping):
            return part
        inner = {key: stripped(value) for key, value in part.items() if isinstance(value, Mapping)}
        return {"_target_": part["_target_"], **inner} if "_target_" in part else inner

    return {**config, "policy": stripped(config["policy"]), "task": stripped(config["task"])}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the identity that a configuration sets, or leaves to its part's default, by its dotted name."""
    policy = spelled_out(scheduled(dict(config["policy"]), *(config[name] for name in SCHEDULE)))
    generation = {**config["generation"], "max_prompt_tokens": config["model"]["max_prompt_tokens"]}
    return flat({"policy": policy, "task": spelled_out(config["task"]), "generation": generation})


def spelled_out(config: Any) -> Any:  # noqa: ANN401 - whatever a YAML holds
    """A tree of parts as `describe` would tell the parts themselves, but not built: of a file its path stands there."""
    if isinstance(config, Mapping) and "_target_" in config:
        cls = part_class(config)
        name = f"{cls.__module__}.{cls.__qualname__}"
        given = {str(k): spelled_out(v) for k, v in config.items() if not str(k).startswith("_")}
        if not is_dataclass(cls):
            return {"class": name, **given}
        told = [f for f in fields(cls) if f.init and f.metadata.get("decides", True)]
        defaults = {f.name: describe(_default(f)) for f in told}
        return {"class": name, **{k: given.get(k, v) for k, v in defaults.items()}}
    if isinstance(config, Mapping):
        return {str(k): spelled_out(v) for k, v in config.items()}
    return [spelled_out(v) for v in config] if isinstance(config, list | tuple) else describe(config)


def _default(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def check_shapes(policy: Policy, checkpoint: Checkpoint) -> None:
    """ValueError if a model lacks a layer that the policy names, or has heads that its parts cannot take."""
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


def _sampling(config: Mapping[str, Any]) -> tuple[Sampling | None, int]:
    """How tokens are drawn, None: as the task says; and how many answers each prompt gets."""
    given = config["generation"]
    if not isinstance(given, Mapping) or set(given) != {"temperature", "top_p", "top_k", "samples"}:
        names = "temperature, top_p, top_k, samples"
        raise ConfigError("generation", given, why=f"is not allowed, set its fields: {names}")
    with refusing_in("generation", given):
        found = Sampling(given["temperature"] or 0, given["top_p"], given["top_k"])
        check_samples(found, given["samples"])
    return None if given["temperature"] is None else found, given["samples"]


def _cuda_graph(value: object, policy: Policy, device: torch.device) -> bool:
    """Whether decoding steps are recorded; auto: where that can be done."""
    if value == "auto":
        return device.type == "cuda" and can_record(policy)
    _flag("engine.cuda_graph", value, "true, false or auto")
    if value is True:
        with refusing():
            check_graph(policy, device)
    return value is True


def _flag(name: str, value: object, allowed: str = "true or false") -> None:
    if not isinstance(value, bool):
        raise ConfigError(name, value, why=f"must be {allowed}")


def _policy(config: Mapping[str, Any], name: str) -> Policy:
    parts = config["policy"]
    if "budget" in parts:
        raise ConfigError("policy.budget", parts["budget"], why=f"has no effect, write budget={parts['budget']}")
    if not isinstance(parts.get("schedule", {}), Mapping):
        raise ConfigError(
            "policy.schedule", parts["schedule"], why=f"is not a part, write schedule={parts['schedule']}"
        )
    with refusing():
        if config["budget"] is not None:
            check_budget(config["budget"])  # also of a policy that has no use for it
        parts = scheduled(dict(parts), *(config[name] for name in SCHEDULE))
    with refusing_in("policy", config["policy"]):
        return build_policy({**parts, "name": name}, config["budget"])


def _task(config: Mapping[str, Any]) -> Task:
    try:
        with refusing_in("task", config, "task: "):
            task = build(config)
    except (ImportError, OSError) as error:
        raise UsageError(f"task: {error}") from error
    if not isinstance(task, Task):
        raise ConfigError("task._target_", config.get("_target_"), why="is not a task")
    if getattr(task, "data_dir", None) == "":
        raise UsageError("task.data_dir= is not allowed, it must be a file or a folder, or null")
    return task


def _model_spec(config: Mapping[str, Any], chosen: str) -> ModelSpec:
    path = config.get("path")
    name = Path(os.path.expanduser(str(path))).resolve().name if path is not None else chosen
    with refusing_in("model", config):
        spec: ModelSpec = build({**config, "_target_": f"{ModelSpec.__module__}.ModelSpec", "name": name})
        for field in ("path", "hub_id", "revision"):
            value = config.get(field)
            if value == "":
                raise ConfigError(field, value, why="must be text or null")
            if value is not None and spec.bundled and field != "path":
                inside = f"{chosen} lies in this package, take model=hub"
                why = inside if path is None else f"model.path={path} is read instead, give one of the two"
                raise ConfigError(field, value, why=f"has no effect: {why}")
        if (spec.hub_id or "").count("/") > 1:
            raise ConfigError("hub_id", spec.hub_id, why="is not allowed, it must be owner/name")
        if spec.shape is not None:
            check_shape(spec.shape)
        if spec.max_prompt_tokens is not None:
            whole_number("max_prompt_tokens", spec.max_prompt_tokens, 2)
        return spec


def out_folder(value: object) -> Path:
    """The folder that `out` names, made once there is something to write. Raises UsageError where it cannot be."""
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ConfigError("out", value, why="is not allowed, it must be a folder, such as results/runs")
    return writable(Path(os.path.expanduser(str(value))))


def writable(out: Path) -> Path:
    """`out`. Raises UsageError where nothing can be written into it, or into what there is of the way to it."""
    try:
        with tempfile.TemporaryFile(dir=next(folder for folder in (out, *out.parents) if os.path.lexists(folder))):
            pass
    except OSError as error:
        raise UsageError(f"out={out} cannot be written to ({error.strerror}), choose another folder") from error
    return out
