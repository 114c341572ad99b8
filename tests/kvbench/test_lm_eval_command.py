"""lm-eval's own command line with our model in it."""

import json
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import lm_eval_data as made
import pytest
from lm_eval.tasks import TaskManager

from kvbench.cli import main as our_command
from kvbench.lm_eval import main as command_line


def test_kvbench_does_not_replace_the_script_of_lm_eval() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "entry-points" not in project
    assert set(project["scripts"]) == {"kvbench"}


def test_a_lm_eval_that_is_not_there_is_one_sentence() -> None:
    script = "import sys; sys.modules['lm_eval'] = None; from kvbench.lm_eval import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "kvbench: this command needs lm_eval, which is not installed: pip install 'kvbench[lm-eval]'\n",
    )


def command_line_task(folder: Path) -> Path:
    """A task of its own for lm-eval's command line, with two rows."""
    file = made.write_jsonl(folder / "rows.jsonl", made.gsm8k(2))
    path = folder / "made.yaml"
    path.write_text(
        f"task: made\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 4, do_sample: false}\nnum_fewshot: 0\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return path


@pytest.fixture
def plain_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval reads all its 14,000 tasks before the one that is asked for: 15 s that are not what is tested here."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_task_file_of_one_s_own_runs_under_our_command_and_counts_by_its_contents(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = command_line_task(tmp_path)
    given = ["policy=streamingllm", "budget=16", "task=lm_eval/made", f"task.include_path={tmp_path}"]
    prompts = []
    first, second = file.read_text(), file.read_text().replace("'{{question}}'", "'Think. {{question}}'")
    for text in (first, first, second):
        file.write_text(text)
        assert our_command([*given, f"model={tiny_model}", "device=cpu", f"out={tmp_path}/runs"]) == 0
        folder = Path(capsys.readouterr().out.strip().splitlines()[-1].removeprefix("results: "))
        samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert [sample["references"] for sample in samples] == [[row["answer"]] for row in made.gsm8k(2)]
        prompts.append(samples[0]["prompt_tokens"])
    assert prompts[0] == prompts[1] < prompts[2]
    assert len(list((tmp_path / "runs").iterdir())) == 2  # the second is the first again, the third another one

    assert our_command([*given[:2], "task=lm_eval/mad", given[3], f"model={tiny_model}"]) == 1
    said = f"lm-eval has no task mad, nor has include_path={tmp_path}, did you mean "
    assert said in capsys.readouterr().err
    assert our_command([*given[:3], f"task.include_path={tmp_path}/nowhere", f"model={tiny_model}"]) == 1
    assert f"include_path={tmp_path}/nowhere is not a folder" in capsys.readouterr().err


MODEL = "pretrained=pocket,policy=snapkv,budget=64"
WRONG = {
    "": "pretrained is missing",
    "pretrained=pocket,policy=snapk,budget=64": "policy=snapk does not exist",
    f"{MODEL},bogus=5": "policy snapkv has no field 'bogus'",
}


@pytest.mark.usefixtures("plain_lm_eval")
@pytest.mark.parametrize("model", WRONG)
def test_a_wrong_model_argument_is_one_sentence_there_too(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", "kvbench", "--model_args", model, "--tasks", str(command_line_task(tmp_path))]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *asked[:2], *(asked[2:] if model else asked[4:])])
    assert command_line() == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("kvbench: ")
    assert WRONG[model] in said


@pytest.mark.usefixtures("plain_lm_eval")
def test_lm_eval_s_own_command_line_finds_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "kvbench", "--tasks", str(command_line_task(tmp_path))]
    arguments += ["--output_path", str(tmp_path / "out")]
    model = f"pretrained={tiny_model},policy=streamingllm,budget=16,sinks=2,dtype=float32"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments, "--model_args", model, "--device", "cpu"])
    assert command_line() == 0
    assert "made" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(written.read_text())["config"]
    assert (config["budget"], config["requests"], config["requests_with_eviction"]) == (16, 2, 1.0)
    assert config["kept_tokens"] == 16
    assert config["policy"]["scorer"]["sinks"] == 2
    assert 0 < config["cache_bytes"] <= config["peak_bytes"]
