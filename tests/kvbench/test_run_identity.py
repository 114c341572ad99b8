"""Old rows are not taken for new ones: what an edited scorer, other versions and equal names do to a run."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from small_cells import small_cell

from kvbench.cli import main
from kvbench.config.parts import part_class
from kvbench.engine.compute import compute_runs
from kvbench.errors import ConfigError
from kvbench.run import digests
from kvbench.run.run import build_run
from kvbench.run.run_config import changed_fields, run_config
from kvbench.tasks.hub import data_file
from kvbench.tools.diagnose import runs_of

SMALL = ("task.lengths=[300]", "task.depths=[0.5]", "task.repeats=2", "task.max_new_tokens=3", "out=runs", "budget=40")
SCORER = '''
"""A scorer of one's own."""

from dataclasses import dataclass
from kvbench.policies.scorers.scorer import Scorer


@dataclass(frozen=True)
class KNorm(Scorer):
    """Keeps short keys."""

    def score(self, observation, state):
        return -observation.keys.float().norm(dim=-1)
'''


@pytest.fixture
def own(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy `mine` and its scorer, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_conf/policy").mkdir(parents=True)
    (tmp_path / "my_conf/policy/mine.yaml").write_text(
        "_target_: kvbench.policies.policy.Policy\nscorer: {_target_: my_scorers.KNorm}\n"
    )
    (tmp_path / "my_scorers.py").write_text(SCORER)
    yield tmp_path
    sys.modules.pop("my_scorers", None)


def run(folder: Path, model: Path, *arguments: str) -> int:
    return main(["--config-dir", str(folder / "my_conf"), f"model={model}", *SMALL, *arguments])


def compute(folder: Path, model: Path, *arguments: str) -> None:
    """The same without printing, as a fresh process would see it: modules of the folder are read anew."""
    sys.modules.pop("my_scorers", None)
    digests._code_digest.cache_clear()
    words = [f"model={model}", *SMALL, "limit=null", *arguments]
    assert compute_runs(runs_of(words, folder / "my_conf")) == [None]


def runs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def test_a_corrected_scorer_is_run_again_and_an_explained_one_is_not(own: Path, tiny_model: Path) -> None:
    compute(own, tiny_model, "policy=mine")
    (first,) = runs(own)
    (own / "my_scorers.py").write_text(SCORER.replace("Keeps short keys.", "Keeps the keys of small norm.") + "# why\n")
    compute(own, tiny_model, "policy=mine")
    assert runs(own) == [first]
    (own / "my_scorers.py").write_text(SCORER.replace("return -observation", "return observation"))
    compute(own, tiny_model, "policy=mine")
    assert len(runs(own)) == 2


def test_a_file_that_a_policy_reads_counts_by_its_contents(tmp_path: Path, tiny_model: Path) -> None:
    def run_id(name: str, newest: float) -> str:
        scores = {
            f"{layer}-{head}": newest if (layer, head) == (0, 0) else 1.0 for layer in range(9) for head in range(9)
        }
        (tmp_path / name).write_text(json.dumps(scores))
        importance = f"policy.allocator.importance={tmp_path / name}"
        return small_cell(tmp_path / "runs", tiny_model, "headkv_r", 64, importance).run_id

    first = run_id("heads.json", 2.0)
    assert run_id("moved.json", 2.0) == first
    assert run_id("heads.json", 3.0) != first


def test_data_counts_by_its_contents_wherever_it_lies(own: Path, tiny_model: Path) -> None:
    row = {"context": "The key is red. It rains. ", "question": "Which key?", "answers": ["red"], "max_new_tokens": 2}
    asked = [f"model={tiny_model}", "policy=knorm", "budget=12", "compress=context", "out=runs", "task.chat=false"]
    for folder, answers, count in (("one", ["red"], 1), ("two", ["red"], 1), ("two", ["blue"], 2)):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "rows.jsonl").write_text(json.dumps({**row, "answers": answers}) + "\n")
        assert main([*asked, "task=context_question", f"task.data_dir={folder}/rows.jsonl"]) == 0
        assert len(runs(own)) == count


def test_results_inside_the_data_are_not_data_and_the_task_keeps_its_name(
    own: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "book.txt").write_text("A word or two. " * 60)
    asked = [f"model={tiny_model}", "policy=full", "task=perplexity", "task.data_dir=.", "task.length=60", "out=."]
    for words in (["limit=1"], [], ["-m"]):
        assert main([*words, *asked]) == 0
        assert len(list(own.glob("*/samples.jsonl"))) == 1
    assert "task perplexity(length=60), 1 example" in capsys.readouterr().out
    (own / "book.txt").write_text("Another word. " * 60)
    assert main(asked) == 0
    assert len(list(own.glob("*/samples.jsonl"))) == 2


def test_tables_show_the_dtype_if_it_is_not_that_of_the_checkpoint(
    own: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype, shown in (("float32", False), ("bfloat16", True)):
        assert run(own, tiny_model, "policy=knorm", "limit=1", f"dtype={dtype}", f"out={dtype}") == 0
        assert (f"dtype {dtype}" in capsys.readouterr().out) == shown
        (file,) = (own / dtype).glob("*/config.yaml")
        assert yaml.safe_load(file.read_text())["checkpoint_dtype"] == "float32"


def test_a_run_of_other_versions_is_continued_only_if_asked_and_tables_say_so(
    own: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(own, tiny_model, "policy=knorm", "limit=1") == 0
    (name,) = runs(own)
    file = own / "runs" / name / "environment.json"
    environment = json.loads(file.read_text())
    environment["packages"]["torch"] = "1.13"
    file.write_text(json.dumps(environment))
    samples = (own / "runs" / name / "samples.jsonl").read_bytes()
    capsys.readouterr()
    assert run(own, tiny_model, "policy=knorm", "limit=2") == 1
    said = capsys.readouterr().err
    assert "begun with other versions (torch 1.13 then" in said
    assert "allow_version_mismatch=true" in said
    assert (own / "runs" / name / "samples.jsonl").read_bytes() == samples
    assert run(own, tiny_model, "policy=knorm", "limit=2", "allow_version_mismatch=true") == 0
    assert f"mixed versions in {name}: torch 1.13 then" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value", "rows", "said"),
    [
        ("torch_threads", 64, "null", ""),  # nothing is timed
        ("torch_threads", 64, "1", "begun on {processor}, 64 threads, see environment.json"),
        ("processor", "a Z80", "null", "begun on a Z80, see environment.json"),
    ],
)
def test_a_run_continued_on_other_hardware_records_the_difference(
    field: str, value: object, rows: str, said: str, own: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compute(own, tiny_model, "policy=knorm", "limit=1")
    (name,) = runs(own)
    file = own / "runs" / name / "environment.json"
    environment = json.loads(file.read_text())
    processor = environment["hardware"]["processor"]
    environment["hardware"][field] = value
    file.write_text(json.dumps(environment))
    caplog.clear()
    compute(own, tiny_model, "policy=knorm", "limit=2", f"engine.rows={rows}")
    told = [message for message in caplog.messages if "continued" in message]
    assert len(told) == bool(said)
    assert all(message.endswith(said.format(processor=processor)) for message in told)


@pytest.mark.parametrize("policy", ["full", "kivi_g8_r8"])
def test_schedules_of_a_policy_without_eviction_are_one_run(policy: str, tmp_path: Path, tiny_model: Path) -> None:
    fields = ["schedule=blocks", "block=16", "decode=evict", "every=4", "protect=prompt"]
    plain, *others = (small_cell(tmp_path, tiny_model, policy, 40, *more) for more in ([], fields, ["every=4"]))
    assert {cell.run_id for cell in others} == {plain.run_id}
    run = run_config(tiny_model, policy, "niah", **{k: yaml.safe_load(v) for k, v in (f.split("=") for f in fields)})
    assert not [key for key in changed_fields(run) if key.startswith("policy.")]
    evicting = (small_cell(tmp_path, tiny_model, "h2o", 40, *more).run_id for more in ([], ["every=4"]))
    assert len(set(evicting)) == 2
    with pytest.raises(ValueError, match="decode must be evict, grow, threshold or share, got 'never'"):
        small_cell(tmp_path, tiny_model, policy, 40, "decode=never")


def test_a_snapshot_of_the_hub_has_the_name_of_its_repository(tmp_path: Path, tiny_model: Path) -> None:
    snapshot = tmp_path / "models--owner--some-model-1b" / "snapshots" / "0123abcd"
    shutil.copytree(tiny_model, snapshot)
    assert small_cell(tmp_path, snapshot).naming.model == "some-model-1b"
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(f"defaults: [hub]\npath: {snapshot}\n")
    folders = [tmp_path / "conf"]
    assert build_run(run_config("mine", "full", "niah", folders)).naming.model == "mine"
    named = run_config("mine", "full", "niah", folders, **{"model.name": "other"})
    assert build_run(named).naming.model == "other"


def test_an_error_in_an_own_class_is_not_hidden_by_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "parts.py").write_text("import mine.absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, said in (("mine.parts", r"No module named 'mine\.absent'$"), ("elsewhere", "or on PYTHONPATH$")):
        with pytest.raises(ConfigError, match=said):
            part_class({"_target_": f"{module}.Part"})


def test_paths_in_messages_are_shown_as_they_were_given() -> None:
    assert str(ConfigError("out", Path("/nope"), why="is not a folder")) == "out=/nope is not a folder"
    with pytest.raises(ConfigError, match=r"^data_dir=\S*absent\.jsonl does not exist$"):
        data_file("absent.jsonl", ("", "absent.jsonl"), None, "https://example.org")


def test_a_run_of_a_hidden_model_folder_is_not_hidden(own: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, own / ".model")
    compute(own, own / ".model", "policy=knorm")
    (folder,) = (path.parent for path in own.glob("runs/*/samples.jsonl"))
    assert folder.name.startswith("_model-knorm-40-")


CODE = '"""A part."""\n\nX = 1  # one\n\n\ndef f(a: int) -> int:\n    """Doc."""\n    return a + X\n'


def test_code_of_the_package_counts_whoever_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(text: str) -> str:
        (tmp_path / "policies").mkdir(exist_ok=True)
        (tmp_path / "policies" / "part.py").write_text(text)
        digests._own_code.cache_clear()
        digests._code_digest.cache_clear()
        return digests.code_digest({})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "__file__", str(tmp_path / "run" / "run.py"))
    first = own(CODE)
    assert own(CODE + "# more\n") == first
    assert own(CODE + "Y = 2\n") != first
    assert own(CODE) == first
    with monkeypatch.context() as parsing:
        parsing.setattr(digests, "_source", None)  # the digest of this code is known
        assert own(CODE) == first
    (stored,) = (tmp_path / "cache" / "kvbench" / "code").iterdir()
    stored.write_text("damaged")
    assert own(CODE) == first
    monkeypatch.undo()
    digests._own_code.cache_clear()
    digests._code_digest.cache_clear()
