"""The typed configuration of one run, which Hydra, `evaluate` and the jobs of a sweep create."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvbench.config.compose import Config, merge, names, read, resolved
from kvbench.config.parts import INTERNAL, build, check_fields, converted, part_class, tree_of
from kvbench.config.presets import SCHEDULE, named_config, scheduled
from kvbench.errors import ConfigError, UsageError, as_python, choice, number, whole_number
from kvbench.models.loading import GivenModel
from kvbench.policies.describe import describe
from kvbench.policies.policy import Policy
from kvbench.results.labels import POLICY
from kvbench.tasks.task import Task

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class Sampling:
    """Tokens are sampled from softmax(logits / temperature), from the `top_k` most likely ones and the `top_p` nucleus.

    temperature: 0 is greedy. top_p: total probability of the most likely tokens to sample from; 1: all. top_k: number
    of most likely tokens to sample from; 0: all. Order and ties are those of transformers' logits warpers.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0)
        number("top_p", self.top_p, 0, 1)
        whole_number("top_k", self.top_k, 0)
        if self.top_p == 0:
            raise ConfigError("top_p", self.top_p, "a number above 0 and at most 1")
        if self.greedy and (self.top_p, self.top_k) != (1, 0):
            name = "top_k" if self.top_k else "top_p"
            raise ConfigError(name, getattr(self, name), why="has no effect: decoding is greedy, set temperature")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0


@dataclass(frozen=True)
class GenerationFields:
    """The settings of sampling: see conf/config.yaml."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are chosen; None: as the task defines it. Raises ConfigError."""
        found = Sampling(self.temperature or 0, self.top_p, self.top_k)
        whole_number("samples", self.samples, 1)
        if found.greedy and self.samples > 1:
            raise ConfigError("samples", self.samples, why="has no effect: decoding is greedy, set temperature")
        return None if self.temperature is None else found


@dataclass(frozen=True)
class Engine:
    """The settings of the engine: see conf/config.yaml."""

    rows: int | None = None
    save_seconds: float = 10
    cuda_graph: bool | str = False
    compile: bool = False


@dataclass(frozen=True)
class RunConfig:
    """The fields of conf/config.yaml with their types.

    model, policy, task: configurations of parts; or objects of the caller. given: a model object of the caller. names:
    the chosen names of these groups.
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
    watch: Sequence[Tree] = field(default_factory=list)
    dry_run: bool = False
    allow_version_mismatch: bool = False
    generation: GenerationFields = GenerationFields()
    engine: Engine = Engine()
    logger: Tree = field(default_factory=lambda: read("logger", "none"))
    names: Mapping[str, str] = field(default_factory=dict, metadata=INTERNAL)
    folders: tuple[Path, ...] = field(default=(), metadata=INTERNAL)
    given: GivenModel | None = field(default=None, metadata=INTERNAL)

    def __post_init__(self) -> None:
        whole_number("seed", self.seed, 0, 2**32 - 1)  # the seeds that NumPy takes
        if self.limit is not None:
            whole_number("limit", self.limit, 1)
        if self.engine.rows is not None:
            whole_number("engine.rows", self.engine.rows, 1)
        number("engine.save_seconds", self.engine.save_seconds, 0)
        choice("engine.cuda_graph", self.engine.cuda_graph, True, False, "auto")
        choice("engine.compile", self.engine.compile, True, False)

    @property
    def record(self) -> Config:
        """The configuration as plain values, as config.yaml of a run and sweep.yaml hold it."""
        kept = [f.name for f in fields(self) if not f.metadata]
        values = {name: getattr(self, name) for name in kept}
        parts = {name: vars(values[name]) for name in ("generation", "engine")}
        objects = {name: values[name] for name in ("policy", "task") if not isinstance(values[name], Mapping)}
        return {**values, **parts, **{name: tree_of(part) for name, part in objects.items()}}


def defaults() -> Config:
    """The fields of a run that have defaults, as plain values."""
    optional = [f for f in fields(RunConfig) if f.default is not MISSING or f.default_factory is not MISSING]
    found = {f.name: _default(f) for f in optional if not f.metadata}
    return {name: vars(value) if is_dataclass(value) else value for name, value in found.items()}


def plain(config: DictConfig) -> Config:
    """A composed configuration as plain values, without Hydra's own node; fields removed by `~field` have defaults."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values: Any = OmegaConf.to_container(own, resolve=True)
    return {**defaults(), **values}


def schedule_fields(config: Mapping[str, Any]) -> list[object]:
    """The fields of `SCHEDULE`, in its order; all None for a policy that evicts nothing: its results are the same."""
    policy = config["policy"]
    evicts = not isinstance(policy, Mapping) or policy.get("_target_", POLICY) != POLICY
    evicts = evicts or policy.get("scorer", "unknown") is not None or policy.get("pre_pass") is not None
    return [config[name] if evicts else None for name in SCHEDULE]


def typed(config: Mapping[str, Any], chosen: Mapping[str, str], folders: Sequence[Path] = ()) -> RunConfig:
    """The typed run of a resolved configuration. chosen: the names of model, policy and task.

    Raises ConfigError for a field that does not exist and for a value of the wrong type.
    """
    values = {key: value for key, value in config.items() if key != "hydra"}
    for name in ("model", "policy", "task", "logger", "generation", "engine"):
        if not isinstance(values.get(name, {}), Mapping):
            raise ConfigError(name, values[name], why="is not allowed, set its fields")
    for name, part in (("generation", GenerationFields), ("engine", Engine)):
        values[name] = build({**values.get(name, {}), "_target_": f"{__name__}.{part.__name__}"}, (name,))
    values = converted(RunConfig, values)
    check_fields(RunConfig, values)
    names = {name: chosen[name] for name in ("model", "policy", "task")}
    return RunConfig(**values, names=names, folders=tuple(folders))


def run_config(
    model: str | Path = "pocket",
    policy: str | Policy = "caote_snapkv",
    task: str | Task = "niah",
    folders: Sequence[Path] = (),
    given: GivenModel | None = None,
    **settings: Any,  # noqa: ANN401 - whatever a run has
) -> RunConfig:
    """A run from names or objects, without Hydra. settings: fields of a run, and of parts by
    their path (`task.lengths`; the name `lengths` alone is a field of the task).

    Raises ConfigError for a name or a field that does not exist and for a value of the wrong type.
    """
    config: Config = {"model": _model(model, folders) if given is None else read("model", "hub")}
    chosen = {"model": str(model)}
    objects: dict[str, Any] = {}
    for group, part in (("policy", policy), ("task", task)):
        if isinstance(part, str):
            config[group], chosen[group] = named_config(group, part, folders), part
        else:
            config[group], chosen[group], objects[group] = {}, part.name, part
    own = RunConfig.__dataclass_fields__
    for path, value in settings.items():
        set_field(config, path if "." in path or path in own else f"task.{path}", value)
    for group in objects:
        if config[group]:
            wrong = ", ".join(config[group])
            raise UsageError(f"{wrong}: fields of a {group} are not allowed with an object, set them in the object")
    if "policy" in objects and any(config.get(name) is not None for name in SCHEDULE):
        raise UsageError("schedule, block, decode, every and protect are not allowed with a Policy object")
    found = typed(resolved(config), chosen, folders)
    budget = policy.budget if isinstance(policy, Policy) else found.budget
    return replace(found, budget=budget, given=given, **objects)


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
    node, value = config, as_python(value)
    for step in above:
        inner = node.setdefault(step, {})
        if not isinstance(inner, dict):
            raise ConfigError(path, value, why=f"is not a field: {step} has no fields")
        node = inner
    if isinstance(value, dict) and isinstance(node.get(name), dict):
        merge(node[name], value)
    else:
        node[name] = value


# --- the fields that differ from the presets -----------------------------------------------------------------------
def changed_fields(run: RunConfig) -> tuple[str, ...]:
    """The fields of the identity ("policy.scorer.window") that differ from the chosen presets.

    A task has the same name wherever its data is, so `data_dir` is none of them.
    """
    preset = {**run.record, **dict.fromkeys(SCHEDULE), "generation": vars(GenerationFields())}
    for group in ("policy", "task"):
        with suppress(ValueError):  # a name of the caller: nothing differs
            preset[group] = named_config(group, run.names[group], run.folders)
            preset = resolved(preset)
    preset["model"] = {} if run.given else _model(run.names["model"], run.folders)
    found = [key for key in _differing(_described(run.record), _described(preset)) if not key.endswith(".data_dir")]
    other = "policy.schedule" in found  # another class of schedule, which has other values of its fields
    return tuple(key for key in found if not (other and key in _SCHEDULE))


_SCHEDULE = tuple(f"policy.schedule.{name}" for name in ("size", "decode", "every", "protect"))


def _described(config: Mapping[str, Any]) -> Config:
    """The parts of the identity in a configuration, with the defaults of all fields."""
    policy = described(scheduled(dict(config["policy"]), *schedule_fields(config)))
    generation = {**config["generation"], **prompt_fields(config["model"])}
    return {"policy": policy, "task": described(config["task"]), "generation": generation}


def prompt_fields(model: Mapping[str, Any]) -> Config:
    """The fields of a model that change prompts, for the identity of a run; no field without a system prompt."""
    found = {name: model.get(name) for name in ("max_prompt_tokens", "system_prompt")}
    return {name: value for name, value in found.items() if name == "max_prompt_tokens" or value is not None}


def _differing(own: Any, preset: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401 - described values
    """The paths at which two descriptions differ.

    Fields of a part of another class differ from the preset's and from the defaults of their class.
    """
    if not isinstance(own, Mapping) or not own:
        if own != preset:
            yield path
        return
    others = preset if isinstance(preset, Mapping) else {}
    if own.get("class") != others.get("class"):
        yield path
        shared = {key: value for key, value in others.items() if own.get(key) == value}
        others = described({"_target_": own["class"]}) | shared
    for key, value in own.items():
        if key != "class":
            yield from _differing(value, others.get(key, MISSING), f"{path}.{key}".lstrip("."))


def described(config: Any) -> Any:  # noqa: ANN401 - whatever a YAML holds
    """A configuration as `describe` would describe the built parts, without building them."""
    if isinstance(config, Mapping) and "_target_" in config:
        cls = part_class(config)
        name = f"{cls.__module__}.{cls.__qualname__}"
        given = {str(k): described(v) for k, v in config.items() if not str(k).startswith("_")}
        if not is_dataclass(cls):
            return {"class": name, **given}
        deciding = [f for f in fields(cls) if f.init and f.metadata.get("decides", True)]
        values = {f.name: given[f.name] if f.name in given else describe(_default(f)) for f in deciding}
        return {"class": name, **{k: v for k, v in values.items() if k not in ("budget", "name")}}
    if isinstance(config, Mapping):
        return {str(k): described(v) for k, v in config.items()}
    return [described(v) for v in config] if isinstance(config, list | tuple) else describe(config)


def _default(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
