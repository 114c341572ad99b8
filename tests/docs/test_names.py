"""What the pages name exists: fields with their values, policies, files, words of code, flags, links and commands."""

import dataclasses
import inspect
import re
import subprocess
import tomllib
import typing
from functools import cache
from importlib import import_module
from pathlib import Path

import ledger_pages
import policy_pages
import pytest
import yaml
from documents import CODE, PAGES, ROOT, files, policy_exists, read, runs

from kvbench.config.compose import CONF, load, names
from kvbench.config.parts import part_class
from kvbench.models.loading import ModelSpec
from kvbench.policies.policy import Policy
from kvbench.policies.press import KVPress

SOURCES = [*PAGES, ROOT / "docs" / "ledger.yaml"]
OTHERS = {kind: set(found) for kind, found in yaml.safe_load(read("tests/docs/others.yaml")).items()}
FIELD = re.compile(r"(?<![\w.~/\"'\[-])\+{0,2}([a-z_][\w.]*)=([\w/.,-]*)")
FILE = re.compile(r"`([\w./-]+\.(?:py|md|ya?ml|csv|svg|sh|gz|jsonl?|log|toml|txt|safetensors))`")
PATH = re.compile(
    r"(?<![\w./])(?:policy|task|model|engine|generation|logger|scorer|value|allocator|merger|store|schedule)\.[a-z_][\w.]*"
)
COMMIT = r"(?=\w*\d)(?=\w*[a-f])[0-9a-f]{8}"
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def pages() -> list[tuple[Path, str]]:
    """The pages and the ledger, with their texts, without what the changelog lists as removed."""
    return [(page, read(page).split("### Removed")[0]) for page in SOURCES]


@cache
def fields() -> dict[str, set[str]]:
    """Every field of a run, with its whole path, and the words that its choices and its comments or module have."""
    known: dict[str, set[str]] = {
        group: {*names(group)} for group in ("policy", "task", "model", "experiment", "logger")
    }

    def add(path: str, text: str = "", hint: object = None) -> None:
        choices = {*map(str, typing.get_args(hint))} if typing.get_origin(hint) is typing.Literal else set()
        known.setdefault(path, set()).update(choices or re.findall(r"\w+", text))

    def add_part(path: str, part: object) -> None:
        if isinstance(part, dict) and "_target_" in part and dataclasses.is_dataclass(kind := part_class(part)):
            add(path)
            hints, text = typing.get_type_hints(kind), inspect.getsource(inspect.getmodule(kind))
            for field in dataclasses.fields(kind):
                add(f"{path}.{field.name}", text, hints[field.name])

    for kind, path in ((ModelSpec, "model"), (Policy, "policy"), (KVPress, "policy")):
        hints, text = typing.get_type_hints(kind), inspect.getdoc(kind) or ""
        for field in dataclasses.fields(kind):
            add(f"{path}.{field.name}", text, hints[field.name])
    outer = ""
    for line in read(CONF / "config.yaml").splitlines():
        indent, key, rest = re.match(r"( *)(\w*):?(.*)", line).groups()
        outer = outer if indent else key
        add(f"{outer}.{key}" if indent else key, " ".join(re.findall(r"[;,#]\s*(\w+)", rest)))
    for file in (CONF / "logger").glob("*.yaml"):
        for key in load(file):
            add(f"logger.{key}", read(file))
    for file in (*(CONF / "policy").glob("*.yaml"), *(CONF / "wrapper").glob("*.yaml")):
        for decision, part in load(file).items():
            add_part(f"policy.{decision}", part)
    for file in (CONF / "task").rglob("*.yaml"):
        config = load(file)
        add_part("task", config)
        for key in config:
            add(f"task.{key}", read(file))
    return known


def value_is_known(name: str, value: str) -> bool:
    """Whether a field may have a word, or each of some words, as its value."""
    if "," in value:
        return all(value_is_known(name, one) for one in value.split(","))
    if (
        name == "logger.project"
        or not re.fullmatch(r"[a-z_]\w+", value)
        or value in ("true", "false", "null", "none", *OTHERS["readers"])
    ):
        return True
    return value in fields()[name] or (name == "policy" and policy_exists(value))


def test_every_field_exists_and_may_have_its_value() -> None:
    wrong = []
    for page, text in pages():
        codes = [code.split("(")[0] for code in CODE.findall(text)] + [" ".join(words) for words in runs(text)]
        for name, value in (found for code in codes for found in FIELD.findall(code)):
            if name.startswith(("hydra.", "policy.press.", *OTHERS["old"])) or name in OTHERS["arguments"]:
                continue
            wrong += [] if name in fields() and value_is_known(name, value) else [(page.name, name, value)]
        for path in (path.rstrip(".") for code in CODE.findall(text) for path in PATH.findall(code)):
            known = path in fields() or f"policy.{path}" in fields() or path.startswith("policy.press.")
            wrong += [] if known or path in OTHERS["arguments"] or path.endswith(".py") else [(page.name, path, "")]
    assert wrong == [], wrong


def test_every_file_in_backticks_exists() -> None:
    """In the repository, or as a file that code writes or a command of the page makes."""
    folders = ("tests", "docs", "scripts", "conf", "results", "kvbench", "policies", "kernels", "tasks")
    tree = {file.name for folder in folders for file in (ROOT / folder).rglob("*")} | {f.name for f in ROOT.iterdir()}
    code = "".join(map(read, files("kvbench", "tasks", "scripts")))
    wrong = []
    for page, text in pages():
        made = {Path(name).stem for name in re.findall(r"(?:-o |out=|title=\")(\S+)", text)} | OTHERS["readers"]
        for name in {*FILE.findall(text)} if page.name != "CHANGELOG.md" else ():
            known = any((place / name).exists() for place in (ROOT, ROOT / "kvbench", page.parent))
            known = known or ("/" not in name and (name in tree or name in code)) or Path(name).stem in made
            wrong += [] if known else [(page.name, name)]
    assert wrong == [], wrong


def test_every_word_and_flag_of_a_code_is_in_the_code() -> None:
    own = (
        "kvbench",
        "policies",
        "kernels",
        "tasks",
        "conf",
        "scripts",
        "hydra_plugins",
        "docs/examples",
        "tests/support",
    )
    sources = files(*own, "results/paper", kinds=(".py", ".yaml", ".sh", ".json"))
    texts = [*map(read, (*sources, "Makefile", "pyproject.toml"))]
    texts += [read(file).partition("\n")[0] for file in (ROOT / "results").glob("*/*.csv")]
    paths = [path for name in ("tests", "results", "docs", "conf") for path in (ROOT / name).rglob("*")]
    known = {word for text in (*texts, *map(str, (*sources, *paths, *PAGES))) for word in re.findall(r"\w+", text)}
    known |= {flag for text in texts for flag in FLAG.findall(text)}.union(*OTHERS.values())
    wrong = []
    for page, text in pages():
        codes = " ".join(CODE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        words = {*FLAG.findall(text), *re.findall(r"[A-Za-z_]\w*", FLAG.sub(" ", codes))} - known
        words -= {word for word in words if re.fullmatch(COMMIT, word)}
        wrong += [(page.name, word) for word in words if not policy_exists(word)]
    assert wrong == [], wrong


def test_launchers_and_sweepers_of_the_pages_are_configured() -> None:
    """Hydra's own, ours, and plugins that a page says to install."""
    known = {"basic", "kvbench", "slurm", "grids", "submitit_slurm", "submitit_local", "optuna"}
    found = {name for _, text in pages() for name in re.findall(r"hydra/(?:launcher|sweeper)=(\w+)", text)}
    assert found <= known


def test_a_default_that_a_page_names_is_one() -> None:
    defaults = {}
    for file in CONF.rglob("*.yaml"):
        for key, value in re.findall(r"^ *(\w+): ([^#\n]*)", read(file), re.MULTILINE):
            defaults.setdefault(key, set()).add(value.strip())
    everything = set().union(*defaults.values())
    asked = 0
    for page, text in pages():
        for name, told in re.findall(r"`([\w.]+)` \((?:default )?`?([\w/.]+?)`?\)", text):
            asked += name.rpartition(".")[2] in defaults
            assert told in defaults.get(name.rpartition(".")[2], {told}), (page.name, name, told)
        for told in re.findall(r"`(\w+)` \(the default\)", text):
            assert {told, f"[{told}]"} & everything, (page.name, told)
    assert asked > 1


def test_links_to_pages_made_at_build_time_and_parts_of_the_api_exist() -> None:
    made = {f"policies/{name}" for name in (*policy_pages.pages(), "index")}
    made |= {f"ledger/{name}" for name in (*ledger_pages.chapters(), "index")}
    wrong = []
    for page, text in pages():
        links = re.findall(r"\]\((?:\.\./)?((?:policies|ledger)/\w+)\.md", text)
        if page.parent.name == "ledger":
            links += [f"ledger/{name}" for name in re.findall(r"\]\((\w+)\.md\)", text)]
        wrong += [(page.name, link) for link in links if link not in made]
        for file, path in re.findall(r"\]\(([\w./]*)#(kvbench\.[\w.]+)\)", text):
            wrong += [] if f"::: {path}\n" in (page.parent / file).read_text(encoding="utf-8") else [(page.name, path)]
        for path in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE):
            module, _, name = path.rpartition(".")
            found = (name[0].islower() and importable(path)) or hasattr(import_module(module), name)
            wrong += [] if found else [(page.name, path)]
    assert wrong == [], wrong


def importable(path: str) -> bool:
    """Whether a dotted path is that of a module."""
    try:
        import_module(path)
    except ModuleNotFoundError:
        return False
    return True


def test_papers_of_the_pages_are_those_of_the_code() -> None:
    code = map(read, files("kvbench", "policies", "tasks", "conf", "docs/examples"))
    known = {paper for text in code for paper in re.findall(r"\d{4}\.\d{5}", text)}
    assert {paper for _, text in pages() for paper in re.findall(r"\b\d{4}\.\d{5}\b", text)} - known == set()


def test_other_commands_of_the_pages_exist() -> None:
    """Targets of make, scripts with their flags, modules, and extras of the package."""
    targets = {*re.findall(r"^([a-z0-9-]+):", read("Makefile"), re.MULTILINE)}
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]

    def right(line: str) -> bool:
        fine = not line.startswith("make ") or {*line.split()[1:]} <= targets
        for name in re.findall(r"^(?:PYTHONPATH=\S+ )?python ((?:scripts|tests)/\S+\.py)", line):
            code = read(name) if (ROOT / name).exists() else ""
            fine = fine and all(
                f'"{flag}"' in code or f"{flag} " in code for flag in re.findall(r" (--?[a-z][\w-]*)", line)
            )
            fine = fine and code != ""
        modules = re.findall(r"^(?:python -m|import) (kvbench(?:\.[a-z_]+)*)", line)
        return fine and all(map(importable, modules)) and {*re.findall(r"pip install .*\[(\w+)\]", line)} <= {*extras}

    for page, text in pages():
        lines = [line for line in text.splitlines() if line.startswith("    ")] + CODE.findall(text)
        assert [one for one in lines if not right(one.strip().removeprefix("$ ").partition(" #")[0])] == [], page.name


def test_commits_of_the_pages_are_in_the_history() -> None:
    commits = {commit for _, text in pages() for commit in re.findall(rf"\b{COMMIT}\b", text)}
    assert len(commits) > 5
    git = ("git", "-C", str(ROOT), "cat-file", "--batch-check")
    done = subprocess.run(git, input="\n".join(sorted(commits)), capture_output=True, text=True, check=False)
    if done.returncode or "commit" not in done.stdout:
        pytest.skip("no clone with its history")
    assert [line for line in done.stdout.splitlines() if " commit " not in line] == []
