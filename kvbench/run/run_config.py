"""One run as it is asked for: the typed configuration that Hydra, `evaluate` and a job of a sweep make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from kvbench.config.named import named_config
from kvbench.config.presets import SCHEDULE, scheduled
from kvbench.config.tree import Config, build, merge, names, part_class, read, tree_of
from kvbench.errors import ConfigError, UsageError, choice, whole_number
from kvbench.models.loading import GivenModel
from kvbench.policies.describe import describe
from kvbench.policies.policy import Policy
from kvbench.results.labels import flat
from kvbench.tasks.task import Task

Tree = Mapping[str, Any]
NOT_OF_A_RUN = ("launcher", "hydra")


@dataclass(frozen=True)
class Generation:
    """How tokens are drawn: see conf/config.yaml."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1


@dataclass(frozen=True)
class Engine:
    """How a run is computed: see conf/config.yaml."""

    rows: int | None = None
    cuda_graph: bool | str = False


@dataclass(frozen=True)
class RunConfig:
    """The fields of conf/config.yaml with their types.

    model, policy, task: configurations of parts; `given`, a Policy and a Task stand for objects of the caller. names:
    what was chosen in each of these groups.
    """

    model: Tree
    policy: Tree | Policy
    task: Tree | Task
    budget: int | float | None = 128
    schedule: str | None = None
    block: float | str | None = None
    decode: str | None = None
    every: int | None = None
    protect: str | None = None
    compress: str = "prompt"
    limit: int | None = None
    seed: int = 0
    out: str | int = "results/runs"
    device: str = "auto"
    dtype: str | None = "auto"
    dry_run: bool = False
    allow_mixed: bool = False
    generation: Generation = Generation()
    engine: Engine = Engine()
    logger: Tree = field(default_factory=lambda: read("logger", "none"))
    names: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    given: GivenModel | None = None

    def __post_init__(self) -> None:
        whole_number("seed", self.seed, 0, 2**32 - 1)  # the seeds that NumPy takes
        if self.limit is not None:
            whole_number("limit", self.limit, 1)
        if self.engine.rows is not None:
            whole_number("engine.rows", self.engine.rows, 1)
        choice("engine.cuda_graph", self.engine.cuda_graph, True, False, "auto")

    @property
    def schedule_fields(self) -> list[object]:
        """See `schedule_fields`."""
        return schedule_fields(vars(self))

    @property
    def record(self) -> Config:
        """The configuration as plain values, as config.yaml of a run and sweep.yaml hold it."""
        kept = [f.name for f in fields(self) if f.name not in ("names", "folders", "given")]
        values = {name: getattr(self, name) for name in kept}
        parts = {name: vars(values[name]) for name in ("generation", "engine")}
        objects = {name: values[name] for name in ("policy", "task") if not isinstance(values[name], Mapping)}
        return {**values, **parts, **{name: tree_of(part) for name, part in objects.items()}}


def schedule_fields(config: Mapping[str, Any]) -> list[object]:
    """The fields of `SCHEDULE`, in its order; all None for a policy that evicts nothing: its results are the same."""
    policy = config["policy"]
    parts = {"scorer": "unknown", "pre_pass": None, "press": None}  # what stands for a missing one
    evicts = not isinstance(policy, Mapping) or any(policy.get(k, other) is not None for k, other in parts.items())
    return [config[name] if evicts else None for name in SCHEDULE]


def typed(config: Mapping[str, Any], chosen: Mapping[str, str], folders: Sequence[Path] = ()) -> RunConfig:
    """The typed run of a resolved configuration. chosen: the names of model, policy and task.

    Raises ConfigError for a field that does not exist and for a value of the wrong type.
    """
    values = {key: value for key, value in config.items() if key not in NOT_OF_A_RUN}
    for name in ("model", "policy", "task", "logger", "generation", "engine"):
        if name in values and not isinstance(values[name], Mapping):
            raise ConfigError(name, values[name], why="is not allowed, set its fields")
    parts = {
        "generation": {**values.get("generation", {}), "_target_": f"{__name__}.Generation"},
        "engine": {**values.get("engine", {}), "_target_": f"{__name__}.Engine"},
    }
    built = {name: build(tree, (name,)) for name, tree in parts.items()}
    rest = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    _ = build({**rest, "_target_": f"{__name__}.RunConfig", "model": {}, "policy": {}, "task": {}})
    own = {f.name for f in fields(RunConfig)}
    unknown = sorted(values.keys() - own)
    if unknown:
        raise ConfigError(unknown[0], values[unknown[0]], why="is not a field of a run")
    chosen = {name: chosen[name] for name in ("model", "policy", "task")}
    return RunConfig(**{**values, **built}, names=chosen, folders=tuple(folders))


def run_config(
    model: str | Path = "pocket",
    policy: str | Policy = "caote_snapkv",
    task: str | Task = "niah",
    folders: Sequence[Path] = (),
    given: GivenModel | None = None,
    **settings: Any,  # noqa: ANN401 - whatever a run has
) -> RunConfig:
    """A run by its names or objects, without Hydra. settings: fields, those of parts by their path (`task.lengths`;
    `lengths` alone is a field of the task).

    Raises ConfigError for a name or a field that does not exist and for a value of the wrong type.
    """
    config: Config = {"model": _model(model, folders) if given is None else read("model", "hub")}
    chosen = {"model": str(model)}
    objects: dict[str, Policy | Task] = {}
    for group, part in (("policy", policy), ("task", task)):
        if isinstance(part, str):
            config[group], chosen[group] = named_config(group, part, folders), part
        else:
            config[group], chosen[group], objects[group] = {}, part.name, part
    own = {f.name for f in fields(RunConfig)}
    for path, value in settings.items():
        set_field(config, path if "." in path or path in own else f"task.{path}", value)
    for group in objects:
        if config.pop(group):
            raise UsageError(f"fields of the {group} are not allowed beside an object: set them in the object")
    if "policy" in objects and any(config.get(name) is not None for name in SCHEDULE):
        raise UsageError("schedule, block, decode, every and protect are not allowed beside a Policy object")
    found = typed({**{group: {} for group in objects}, **config}, chosen, folders)
    values = {f.name: getattr(found, f.name) for f in fields(found)}
    budget = {"budget": policy.budget} if isinstance(policy, Policy) else {}
    return RunConfig(**{**values, **objects, **budget, "given": given})


def _model(model: str | Path, folders: Sequence[Path]) -> Config:
    """A name of conf/model, a folder, or a model of the Hub."""
    name = str(model)
    if name in names("model", folders):
        return named_config("model", name, folders)
    if isinstance(model, Path) or name.startswith(("/", "~", ".")) or Path(name).is_dir():
        return {**read("model", "hub"), "path": name}
    return {**read("model", "hub"), "hub_id": name} if "/" in name else named_config("model", name, folders)


def set_field(config: Config, path: str, value: object) -> None:
    """Set one field by its path (`policy.scorer.window`). Raises ConfigError."""
    *above, name = path.split(".")
    node = config
    for step in above:
        inner = node.setdefault(step, {})
        if not isinstance(inner, dict):
            raise ConfigError(path, value, why=f"is not a field: {step} has no fields")
        node = inner
    if isinstance(value, dict) and isinstance(node.get(name), dict):
        merge(node[name], value)
    else:
        node[name] = value


# --- what differs from the presets -------------------------------------------------------------------------------
def changed_fields(run: RunConfig) -> tuple[str, ...]:
    """The fields of the identity ("policy.scorer.window") that differ from those of the presets chosen.

    A task has the same name wherever its data is, so `data_dir` is none of them.
    """
    own, bare = _settings(run.record), _settings(_bare(run.record))
    given = _settings(_preset(run))
    found = [key for key, value in own.items() if key not in given or value != given[key]]
    found = [key for key in found if not key.endswith(".data_dir")]

    def counts(key: str) -> bool:  # of a part that the preset has not: its class, and fields not at their defaults
        steps = key.split(".")
        inside = any(".".join(steps[:end]) in found for end in range(1, len(steps)))
        is_part = any(other.startswith(f"{key}.") for other in own)
        return not inside or is_part or key not in bare or own[key] != bare[key]

    return tuple(filter(counts, found))


def _preset(run: RunConfig) -> Config:
    """The run with its parts as the files have them, and without a schedule or drawing of its own."""
    config = {**run.record, **dict.fromkeys(SCHEDULE), "generation": vars(Generation())}
    for group in ("policy", "task"):
        try:
            config[group] = named_config(group, run.names[group], run.folders)
        except ValueError:  # a name of the caller: nothing differs
            continue
    model = {} if run.given else _model(run.names["model"], run.folders)
    return {**config, "model": model}


def _bare(config: Config) -> Config:
    """The configuration with all fields of the parts of policy and task left to their defaults."""

    def stripped(part: Any) -> Any:  # noqa: ANN401 - whatever a YAML holds
        if not isinstance(part, Mapping):
            return part
        inner = {key: stripped(value) for key, value in part.items() if isinstance(value, Mapping)}
        return {"_target_": part["_target_"], **inner} if "_target_" in part else inner

    return {**config, "policy": stripped(config["policy"]), "task": stripped(config["task"])}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of the identity in a configuration, defaults included, by their dotted names."""
    policy = spelled_out(scheduled(dict(config["policy"]), *schedule_fields(config)))
    generation = {**config["generation"], "max_prompt_tokens": config["model"].get("max_prompt_tokens")}
    return flat({"policy": policy, "task": spelled_out(config["task"]), "generation": generation})


def spelled_out(config: Any) -> Any:  # noqa: ANN401 - whatever a YAML holds
    """A configuration of parts as `describe` would describe the parts, without building them."""
    if isinstance(config, Mapping) and "_target_" in config:
        cls = part_class(config)
        name = f"{cls.__module__}.{cls.__qualname__}"
        given = {str(k): spelled_out(v) for k, v in config.items() if not str(k).startswith("_")}
        if not is_dataclass(cls):
            return {"class": name, **given}
        deciding = [f for f in fields(cls) if f.init and f.metadata.get("decides", True)]
        defaults = {f.name: describe(_default(f)) for f in deciding}
        return {"class": name, **{k: given.get(k, v) for k, v in defaults.items() if k not in ("budget", "name")}}
    if isinstance(config, Mapping):
        return {str(k): spelled_out(v) for k, v in config.items()}
    return [spelled_out(v) for v in config] if isinstance(config, list | tuple) else describe(config)


def _default(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
