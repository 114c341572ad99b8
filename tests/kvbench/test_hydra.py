"""`python -m kvbench` is a Hydra application: what Hydra's users type works, and sweeps are launched together."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import base_at_least

import kvbench
from hydra_plugins.kvbench.plugins import narrowed
from kvbench.cli import COMMANDS, main
from kvbench.config.compose import CONF
from kvbench.config.parts import build
from kvbench.config.presets import make_policy
from kvbench.policies.scorers.snapkv import SnapKV
from kvbench.run.run_config import run_config
from kvbench.terminal.command import program

FORMS = {  # of each the beginning of a line that it prints
    "--cfg job": "budget: 128",
    "--cfg all": "hydra:",
    "--info": "Config search path",
    "--hydra-help": "Hydra (",
    "--config-path {folder} --config-name mine --cfg job": "own: 1",
    "++policy.scorer.window=8 --cfg job": "    window: 8",
    "+policy@second=snapkv --cfg job": "second:",
    "policy=caote_knorm -p policy --cfg job": "value:",
    "task=lm_eval/gsm8k -p task --cfg job": "task: gsm8k",
    "--help": "budget: 128        # tokens per KV head",
}
SMALL = ("task.lengths=[300]", "task.depths=[0.5]", "task.repeats=2", "task.max_new_tokens=3", "out=runs", "budget=40")
RUNS = {  # how many samples files each of them leaves
    "-m hydra/launcher=basic policy=full,snapkv": 2,
    "-m hydra/sweeper=basic policy=full,snapkv": 2,
    "-m 'policy=glob(*stream*)' budget=20,40": 2,
    "-m hydra.sweeper.grids=[{policy:tova,seed:[0,1]},{policy:full}]": 3,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])  # --info adds its own
    monkeypatch.setattr(logging, "_handlerList", [])  # Hydra's flags close all handlers; absl's closes pytest's stderr
    (tmp_path / "mine.yaml").write_text("own: 1\n")
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_hydras_flags_print_their_output(form: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(form.format(folder=folder))) == 0
    shown = capfd.readouterr()
    assert any(line.startswith(FORMS[form]) for line in shown.out.splitlines())
    assert shown.err == ""


@pytest.mark.parametrize("line", RUNS)
def test_hydras_sweeps_compute_their_runs(line: str, tiny_model: Path, folder: Path) -> None:
    assert main(order(line, tiny_model)) == 0
    assert len(list(folder.glob("runs/*/samples.jsonl"))) == RUNS[line]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hydra.run.dir=own", "hydra.run.dir=own has no effect: results are in the folder out="),
        ("-m ++hydra.sweep.subdir=own", "hydra.sweep.subdir=own has no effect"),
        ("hydra.output_subdir=.hydra", "hydra.output_subdir=.hydra has no effect"),
        ("hydra/job_logging=default", "hydra/job_logging=default would write an empty log file"),
        ("hydra.job.chdir=true", "hydra.job.chdir=true has no effect: relative paths"),
        ("policy=", "policy must be a name, or names for a sweep (-m policy=a,b), got ''"),
        ("policy=[snapkv,full]", "policy must be a name, or names for a sweep (-m policy=a,b), got '[snapkv,full]'"),
        ("-m policy=full,null", "policy must be a name, or names for a sweep (-m policy=a,b), got 'full,null'"),
        ("logger=null", "logger must be a name, or names for a sweep (-m logger=a,b); logger=none logs nothing"),
        ("~policy", "policy=null is not allowed: a run needs one"),
        ("polcy=snapkv", "polcy=snapkv is not a field of a run: did you mean policy? (2"),
        ("reprot runs", "command=reprot does not exist: did you mean report"),
        ("snapkv", "lm-eval; snapkv is a policy: kvbench policy=snapkv)"),
        ("policy=full,snapkv", "policy='full,snapkv' has several values, which is a sweep: add -m"),
        ("budget=range(1,9)", "budget='range(1,9)' has several values, which is a sweep: add -m"),
        ("-m budget=interval(64,128)", "is a range for optimizers (hydra/sweeper=...): list values, as in 64,128"),
        ("hydra/launcher=slrum", "did you mean slurm? (allowed: basic, kvbench, slurm)"),
        ("hydra.launcher.jobs=2", "jobs='2' is not a field of hydra/launcher=kvbench (allowed: workers)"),
        (
            "-m hydra/launcher=slurm hydra.launcher.timeout=3",
            "did you mean timeout_min or max_num_timeout? (14 fields ",
        ),
        ("engine.row=1", "engine.row='1' is not a field of engine: did you mean rows? (allowed: rows, save_seconds, "),
        ("generation.seed=1", "is not a field of generation (allowed: temperature, top_p, top_k, samples)"),
        ("hydra.verbose=true", "hydra.verbose=true has no effect: messages are the same in all runs"),
        ("--policy snapkv", "--policy is not an option: write policy=... without dashes"),
        ("--dry-run", "--dry-run is not an option: write dry_run=... without dashes"),
        ("-p snapkv", "-p is an option of --cfg: choose a policy by policy=NAME"),
    ],
)
def test_settings_that_would_leave_empty_files_are_refused(
    line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize("form", ["--config-dir . --config-name mine", "--config-dir . experiment=own"])
def test_a_file_cannot_set_hydras_folders_either(form: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "hydra: {run: {dir: own}, output_subdir: .hydra}\n"
    (folder / "mine.yaml").write_text(f"defaults: [config, _self_]\n{text}")
    (folder / "experiment").mkdir()
    (folder / "experiment/own.yaml").write_text(f"# @package _global_\n{text}")
    assert main(form.split()) == 1
    assert "hydra.run.dir=own has no effect: results are in the folder out=" in capfd.readouterr().err
    assert not (folder / "own").exists()


def test_a_removed_field_has_its_default_and_grids_without_m_warn(
    tiny_model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = "hydra.sweeper.grids=[{policy:[snapkv,full]}]"
    removed = ["~logger", "~dry_run", "~generation", "~engine", "~seed", "~allow_version_mismatch"]
    assert main([f"model={tiny_model}", *SMALL, *removed, grid]) == 0
    assert "only one run is computed: add -m" in capsys.readouterr().err
    assert len(list(folder.glob("runs/*/samples.jsonl"))) == 1


@pytest.mark.parametrize("word", ["policy.scorer.windw=3", "nothing=1"])
def test_full_errors_are_the_message_and_more(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main([word])
    short = capsys.readouterr().err
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main([word]) != 0
    full = capsys.readouterr().err
    assert "Traceback (most recent call last)" in full
    assert "Traceback" not in short
    wanted = "+nothing=1" if word == "nothing=1" else word.split("=")[0]
    assert wanted in short
    assert wanted in full


WRONG = {
    "policy/own": ("defaults: [own, _self_]", "policy/own.yaml cannot be read: its defaults contain itself"),
    "policy/one": ("defaults: [two, _self_]", "policy/one.yaml cannot be read: its defaults contain itself"),
    "policy/two": ("defaults: [/policy/one, _self_]", "policy/two.yaml cannot be read: its defaults contain itself"),
    "task/own": ("defaults: [{/task@: own}, _self_]", "task/own.yaml cannot be read: its defaults contain itself"),
    "policy/tab": (
        "scorer:\n\twindow: 8",
        "policy/tab.yaml cannot be read: line 2, column 1: found character that cannot start any token (a",
    ),
    "policy/twice": ("a: 1\na: 2", "policy/twice.yaml cannot be read: line 2, column 1: found duplicate key a"),
    "policy/list": ("[snapkv]", "policy/list.yaml cannot be read: it must hold fields"),
    "policy/bytes": ("\udcff", "policy/bytes.yaml cannot be read: 'utf-8' codec"),
    "policy/hole": ("defaults: [snapkv]\nscorer: {window: '${a}'}", "policy.scorer.window: Interpolation key 'a' not"),
    "experiment/all": (
        "# @package _global_\ndefaults: [{override /policy: one}]",
        "policy/one.yaml cannot be read: its",
    ),
}


def test_a_wrong_file_is_one_message_everywhere(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, (text, _) in WRONG.items():
        file = folder / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    for name, (_, message) in WRONG.items():
        word = f"+{name.replace('/', '=')}".replace("+policy", "policy").replace("+task", "task")
        said = []
        for how in ([], ["-m"]) if name in ("policy/own", "policy/tab", "task/own") else ([],):
            assert main([*how, f"--config-dir={folder}", word, "limit=1", "dry_run=true"]) == 1
            said.append(capfd.readouterr().err)
        if name.startswith("policy"):
            fields = f"model=pocket policy={name.partition('/')[2]} length=64"
            assert program(COMMANDS)(["memory", *fields.split(), f"--config-dir={folder}"]) == 2
            said.append(capfd.readouterr().err)
            with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
                kvbench.evaluate("pocket", policies=name.partition("/")[2], config_dir=folder)
            said.append(str(error.value))
        for err in said:
            lines = [line for line in err.splitlines() if line and not line.startswith(("Error executing", "Set the"))]
            assert len(lines) == 1, err
            assert message in lines[0]


def order(line: str, model: Path) -> list[str]:
    """Flags first: argparse does not find overrides on both sides of one."""
    words = shlex.split(line)
    flags = [word for word in words if word == "-m"]
    return [*flags, f"model={model}", *SMALL, *words[len(flags) :]]


def test_a_sweeper_gets_the_score_of_every_job(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[object] = []
    from hydra_plugins.kvbench.plugins import KvbenchLauncher

    launch = KvbenchLauncher.launch

    def spied(self: KvbenchLauncher, *arguments: object, **named: object) -> object:
        returns = launch(self, *arguments, **named)
        got.extend(one.return_value for one in returns)
        return returns

    monkeypatch.setattr(KvbenchLauncher, "launch", spied)
    assert main(order("-m policy=full,tova,full", tiny_model)) == 0
    scores = [json.loads(path.read_text())["score"] for path in sorted(Path("runs").glob("*/metrics.json"))]
    assert got == [scores[0], scores[1], scores[0]]  # equal jobs are one run


def test_a_dry_run_counts_prompts_and_tokens_and_shows_the_first_prompt(
    tiny_model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(order("-m policy=full,tova dry_run=true", tiny_model)) == 0
    *runs, total, head, first = capsys.readouterr().out.splitlines()[:5]
    tokens = [int(line.split()[-2]) for line in runs]
    assert all(": 2 prompts, " in line for line in runs)
    assert total == f"2 runs: {sum(tokens)} prompt tokens, {tokens[0]} with shared prefills"
    assert (head, bool(first)) == ("the first prompt:", True)
    assert not list(folder.glob("runs/*/samples.jsonl"))


def test_a_run_is_composed_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, load = list[str](), ConfigLoaderImpl.load_configuration

    def counted(loader: ConfigLoaderImpl, config_name: str, **how: Any) -> object:
        composed.append(config_name)
        return load(loader, config_name, **how)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    assert main(order("policy=full dry_run=true", tiny_model)) == 0
    assert composed == ["config"]


GRIDS = [
    {"model": "a", "policy": ["full"]},
    {"model": "a", "policy": ["h2o", "tova"], "budget": [2, 4], "block": [[1]]},
]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ([], ["model=a policy=full", "model=a policy=h2o,tova budget=2,4 block=[1]"]),
        (["limit=2"], ["model=a policy=full limit=2", "model=a policy=h2o,tova budget=2,4 block=[1] limit=2"]),
        (["policy=tova", "budget=4"], ["model=a policy=tova budget=4 block=[1]"]),
        (["model=b"], ["model=b policy=full", "model=b policy=h2o,tova budget=2,4 block=[1]"]),
        (["budget=8"], ["model=a policy=full", "model=a policy=h2o,tova budget=8 block=[1]"]),
    ],
)
def test_values_of_the_command_line_select_among_the_grids_or_replace_theirs(
    arguments: list[str], lines: list[str]
) -> None:
    assert [" ".join(line) for line in narrowed(GRIDS, arguments)] == lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["task=niah"], "policy=h2o task=niah model.max_prompt_tokens=9"),
        (["task=longbench"], "policy=h2o task=longbench task.extended=true model.max_prompt_tokens=9"),
        (["task.extended=false", "task=niah"], "policy=h2o task=niah task.extended=false model.max_prompt_tokens=9"),
    ],
)
def test_another_choice_leaves_out_the_grids_fields_of_the_replaced_one(arguments: list[str], line: str) -> None:
    grid = {"policy": "h2o", "task": "longbench", "task.extended": True, "model.max_prompt_tokens": 9}
    assert [" ".join(words) for words in narrowed([grid], arguments)] == [line]


def test_the_defaults_of_python_are_those_of_the_command_line() -> None:
    fields = yaml.safe_load((CONF / "config.yaml").read_text())
    record = run_config().record
    for key in fields.keys() - {"defaults", "hydra"}:
        assert record[key] == fields[key], key


def test_a_policy_is_made_inside_another_hydra_application(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy/mine.yaml").write_text("defaults: [knorm, _self_]\n")
    with initialize_config_dir(str(Path.cwd()), job_name="own", version_base="1.3"):
        before = GlobalHydra.instance().hydra
        assert kvbench.make_policy("mine", 64, config_dir=folder).budget == 64  # composed here, not in another test
        assert GlobalHydra.instance().hydra is before
        assert JobRuntime.instance().get("name") == "own"  # which hydra.job.name of the next job is


def test_wrappers_accept_policies_that_leave_parts_out(folder: Path) -> None:
    """As the documentation writes a policy: its scorer alone."""
    (folder / "policy").mkdir()
    policy = "_target_: kvbench.policies.policy.Policy\nscorer: {_target_: kvbench.policies.scorers.knorm.KNorm}\n"
    (folder / "policy" / "plain.yaml").write_text(policy)
    made = kvbench.make_policy("ada_plain", 64, config_dir=folder)
    assert type(made.allocator.base).__name__ == "Uniform"


def test_a_model_file_may_have_a_path_alone(tiny_model: Path, folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "ours.yaml").write_text(f"path: {tiny_model}\n")
    assert main(["--config-dir", ".", "model=ours", "policy=tova", *SMALL]) == 0
    (run,) = folder.glob("runs/*/config.yaml")
    assert run.parent.name.startswith("ours-tova-40-niah-")


def test_a_yaml_with_defaults_and_interpolations_means_the_same_in_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "scorers/wide": "window: 16\n",
        "policy/mine": "defaults: [snapkv, {/scorers@scorer: wide}, _self_]\n"
        "scorer: {kernel: '${oc.env:NO_KERNEL,5}'}\n",
        "policy/whole": "defaults: [mine, _self_]\nscorer: {window: '${budget}'}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    other = tmp_path / "other"
    other.mkdir()
    (other / "app.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(other), version_base="1.2"):  # inside another Hydra application
        scorer = make_policy("caote_mine", 64, config_dir=tmp_path).scorer
        assert make_policy("whole", 64, config_dir=tmp_path).scorer == SnapKV(window=64, kernel=5)
        assert compose("app").x == 1
        assert (base_at_least("1.2"), base_at_least("1.3")) == (True, False)
    assert scorer == SnapKV(window=16, kernel=5)
    assert not GlobalHydra.instance().is_initialized()
    assert main(["--config-dir", str(tmp_path), "policy=caote_mine", "-p", "policy.scorer", "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert build({**shown, "kernel": 5}) == scorer  # --cfg prints the interpolation
    (tmp_path / "policy" / "snapkv.yaml").write_text("defaults: [h2o]")  # your file comes before ours
    assert make_policy("snapkv", 64, config_dir=tmp_path).scorer == make_policy("h2o", 64).scorer


def test_values_on_the_command_line_select_among_those_of_a_sweeping_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment=demo", "policy=full,nothing", f"out={tmp_path}"]) != 0
    assert "several values" not in capsys.readouterr().err
