"""Lists and descriptions of policies, tasks and models, made from their files and the docstrings of their parts."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbench.config.compose import Config, find, load, names, read_all, resolved
from kvbench.config.documentation import (
    DECISIONS,
    about,
    budgeted,
    by_kind,
    documentation,
    families,
    first_sentence,
    methods_of_others,
    needed_files,
    part_name,
    required,
    selects,
    when,
)
from kvbench.config.folders import own_folders
from kvbench.config.parts import INTERNAL, part_class
from kvbench.config.presets import build_policy, named_config, policy_config, scheduled
from kvbench.errors import LARGEST, ConfigError, first_line
from kvbench.terminal.command import PATH, Command, terminal_width

WIDTH = 118  # characters of a line that is not written to a terminal
TRIAL = 2**20  # tokens: a budget in which every policy's protected tokens have room
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "prompt"},
    {"schedule": "blocks"},
    {"decode": "evict"},
    {"decode": "grow"},
    {"every": 16},
    {"protect": "prompt"},
)
COMPOSED = {
    "policy": "Further names need no file: PREFIX_POLICY adds a wrapper to a policy that scores (caote_knorm), a "
    "store with settings stands alone or after a policy (kivi_g32_r128, snapkv_kivi_g32), kvpress/NAME is any press of "
    "kvpress.",
    "task": "Further names need no file: lm_eval/NAME is any task of lm-eval.",
    "model": "Further names need no file: model=/folder is a model on this machine; model=hub model.hub_id=owner/name.",
}
Row = tuple[str, ...]


def show(group: str, name: str | None, config_dir: Path | None = None) -> None:
    """Print the list of a group (policy, task, model), or the description of one name. UsageError if it is unknown."""
    folders = own_folders(config_dir)
    console = Console(width=terminal_width() or WIDTH, markup=False, emoji=False, highlight=False, file=sys.stdout)
    with console.capture() as shown:
        if name is None:
            _list(console, group, folders)
        elif group == "policy":
            _policy(console, name, folders)
        else:
            _fields_of(console, group, name, folders)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in shown.get().splitlines()))


def listing(group: str, plural: str, help_text: str) -> click.Command:
    """The command `kvbench policies`, `tasks` or `models`: all names of a group, or the description of one."""

    def completed(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names(group) if name.startswith(incomplete)]

    @click.command(plural, cls=Command, help=help_text)
    @click.argument("name", required=False, shell_complete=completed)
    @click.option("-cd", "--config-dir", type=PATH, help=f"Folder with your own {plural}.")
    def cli(name: str | None, config_dir: Path | None) -> None:
        show(group, name, config_dir)

    return cli


# --- lists ---------------------------------------------------------------------------------------------------------
def _list(console: Console, group: str, folders: Sequence[Path]) -> None:
    for kind, members in _sections(group, folders):
        _heading(console, kind)
        _print_rows(console, [_entry(group, name, folders) for name in members])
    console.print(COMPOSED[group])


def _sections(group: str, folders: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """The names of a group below headings: policies by kind, others by their folder."""
    if group == "policy":
        yield from ((kind, members) for kind, members in by_kind(folders).items() if members)
        yield "Wrappers, as prefixes of a policy", [f"{name}_" for name in names("wrapper", folders)]
        return
    known = names(group, folders)
    for folder in dict.fromkeys(["", *(name.rpartition("/")[0] for name in known)]):
        yield folder or f"{group.title()}s", [name for name in known if name.rpartition("/")[0] == folder]


def _entry(group: str, name: str, folders: Sequence[Path]) -> Row:
    """A name with its sentence; that of a model also with its repository."""
    wrapper = group == "policy" and name.endswith("_")
    file = find("wrapper" if wrapper else group, name.removesuffix("_"), folders)
    assert file is not None
    text = about(file)
    if wrapper:
        return name, first_sentence(text.partition(": ")[2])
    if group == "policy" and (variants := families(folders).get(name)):
        text = f"{first_sentence(text)} Variants: {', '.join(one.removeprefix(name) for one in variants)}."
        return name, text
    return (name, str(load(file).get("hub_id") or ""), text) if group == "model" else (name, first_sentence(text))


# --- one policy ----------------------------------------------------------------------------------------------------
def _policy(console: Console, name: str, folders: Sequence[Path]) -> None:
    config = resolved({"policy": policy_config(name, folders)})["policy"]
    file = find("policy", name, folders)
    command = f"kvbench policy={name}{' budget=256' * budgeted(config)}{required(config)}"
    _title(console, name, about(file) if file else "A composed name.", command)
    for part, question in {**DECISIONS, **{name: name.title() for name in methods_of_others(config)}}.items():
        if isinstance(config.get(part), dict) and part_name(config, part) not in ("Uniform", "Drop", "Dense"):
            _part(console, question, f"policy.{part}", config[part])
    if config.get("schedule") and selects(config):
        _part(console, "Schedule", "policy.schedule", config["schedule"], when(config).replace("`", ""))
    if "press" in config and config["press"] is None:
        _presses(console)
    needs, refuses = _trials(name, config, folders)
    for heading, rows in (("Needs", needs), ("Refuses", refuses)):
        if rows:
            _heading(console, heading)
            _print_rows(console, rows)
    if variants := families(folders).get(name):
        _heading(console, "Variants")
        files = {one: find("policy", one, folders) for one in variants}
        _print_rows(console, [(one, about(path)) for one, path in files.items() if path])


def _presses(console: Console) -> None:
    """The presses of the installed kvpress; nothing without one, which is then among the needs."""
    from kvbench.policies.press import press_classes

    with suppress(ValueError):
        found = {name: inspect.getdoc(press) or "" for name, press in press_classes().items()}
        _heading(console, "Presses (policy=kvpress/NAME)")
        _print_rows(console, [(name, " ".join(text.partition("\n\n")[0].split())) for name, text in found.items()])


def _trials(name: str, config: Config, folders: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """What a policy needs, and the messages of what it refuses: each form is built, and refused by the same checks as
    in a run.
    """
    from kvbench.policies.latents import check_latents
    from kvbench.policies.needs import Needs
    from kvbench.policies.policy import Policy
    from kvbench.policies.policy_checks import least_budget
    from kvbench.run.run import check_context

    def build(tree: Config) -> Policy:
        return build_policy(tree, TRIAL)

    needs: list[Row] = [(field, "a file") for field in needed_files(config)]
    try:
        policy = build(config)
    except ValueError as error:
        return [*needs, *([] if needs else [("", first_line(error))])], []
    if policy.budget is not None:
        least = least_budget(policy.scorer, policy.allocator) if policy.scorer else 1
        needs.append(("budget", f"tokens per KV head and layer, at least {least}, or a share of the prompt below 1"))
    if policy.pre_pass is not None:
        needs.append(("pre-pass", "kvbench's own generation loop (not model.generate)"))
    meanings = documentation(Needs).fields
    usual = Needs(window_decoding=policy.needs.window)
    inputs = [field.name for field in dataclasses.fields(Needs)]
    for field in inputs[: inputs.index("whole_prompt")]:  # the others are properties of scores, which checks use
        value = getattr(policy.needs, field)
        if value and value != getattr(usual, field):
            needs.append((field if value is True else f"{field}={_shown(value)}", meanings[field]))
    forms: dict[str, Callable[[], object]] = {}
    if policy.scorer is not None:
        for given in SCHEDULES:
            ((field, value),) = given.items()
            forms[f"{field}={value}"] = lambda given=given: build(scheduled(config, **given))  # type: ignore[misc]
        read_all("wrapper")  # in one composition
        for wrapper in names("wrapper", folders):
            slug = f"{wrapper}_{name}"
            forms[f"{wrapper}_"] = lambda slug=slug: build(policy_config(slug, folders))  # type: ignore[misc]
        forms["compress=context"] = lambda: check_context(policy)
    forms["models with latents"] = lambda: check_latents(policy)
    refused: list[Row] = [(form, message) for form, trial in forms.items() if (message := _refusal(trial))]
    return needs, refused


def _refusal(trial: Callable[[], object]) -> str:
    """The message with which a form is refused; "" if it is not, or only needs a further field."""
    try:
        trial()
    except ValueError as error:
        return "" if isinstance(error, ConfigError) and error.value is None else first_line(error)
    return ""


# --- one task or model ---------------------------------------------------------------------------------------------
def _fields_of(console: Console, group: str, name: str, folders: Sequence[Path]) -> None:
    config = resolved({group: named_config(group, name, folders)})[group]
    file = find(group, name, folders)
    if group == "task":
        _title(console, name, about(file) if file else "A composed name.", f"kvbench task={name}")
        _part(console, "Prompts and scores", "task", config)
        return
    from kvbench.models.files import ModelSpec

    _title(console, name, about(file) if file else "A folder.", f"kvbench model={name}")
    console.print(f"  kvbench memory model={name} policy=full length=32768   # bytes of its cache\n")
    target = f"{ModelSpec.__module__}.{ModelSpec.__qualname__}"
    _part(console, "Fields", "model", {"_target_": target, "name": name, **config})


# --- blocks --------------------------------------------------------------------------------------------------------
def _title(console: Console, name: str, text: str, command: str) -> None:
    _heading(console, name)
    console.print(f"{text}\n\n  {command}\n")


def _heading(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _part(console: Console, heading: str, path: str, config: Mapping[str, Any], idea: str = "") -> None:
    """A part: its idea, equations, fields with their values here and meanings, and its source; then parts inside it.

    idea: instead of that of its docstring.
    """
    part = part_class(config)
    found = documentation(part)
    _heading(console, f"{heading}: {part.__module__}.{part.__qualname__}")
    for paragraph in [idea] if idea else found.idea:
        console.print(f"{paragraph}\n", soft_wrap=paragraph.startswith("    "))
    declared = {one.name: one for one in dataclasses.fields(part) if one.init and one.metadata != INTERNAL}
    order = dict.fromkeys([*(name for name in config if name in declared), *declared])
    rows = []
    for name in order:
        value = config.get(name, _default(declared[name]))
        rows.append((f"{path}.{name}", _shown(value), found.fields.get(name, "")))
    _print_rows(console, [("field", "default", "meaning"), *rows] if rows else [])
    if found.source:
        console.print(f"Source: {found.source}\n")
    for name, value in config.items():
        if isinstance(value, Mapping) and "_target_" in value:
            _part(console, "Part", f"{path}.{name}", value)


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "(required)" if field.default is dataclasses.MISSING else field.default


def _shown(value: object) -> str:
    """A value as on the command line; a part by its class."""
    if isinstance(value, Mapping) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, str):
        return value.replace("\n", "\\n") or '""'
    if value == LARGEST:
        return "all"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Aligned columns, the last of which is folded, and an empty line."""
    if not rows:
        return
    table = Table.grid(padding=(0, 2))
    for place in range(len(rows[0])):
        last = place == len(rows[0]) - 1
        table.add_column(overflow="fold", ratio=1 if last else None, max_width=None if last else 44)
    for row in rows:
        table.add_row(*(f"  {cell}" if place == 0 else cell for place, cell in enumerate(row)))
    console.print(table)
    console.print()
