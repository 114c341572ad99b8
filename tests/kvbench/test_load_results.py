"""Results as they are read from a folder: numbers read back while they are those of the samples, each told by name."""

import json
from pathlib import Path

import pytest
import yaml
from plotted_runs import sample, write_run

from kvbench.results import metrics
from kvbench.results.loading import read_result
from kvbench.results.summary import read_summary, write_summary


def test_numbers_of_other_samples_or_other_code_or_of_some_examples_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample(i, 1.0) for i in range(4)]
    folder = write_run(tmp_path, "snapkv", samples)
    path = folder / "metrics.json"
    path.write_text(path.read_text().replace('"score": 1.0', '"score": 0.125'))
    write_summary(folder, samples)
    assert read_result(folder).score == 0.125, "what is read back is what stands there"
    assert read_result(folder, limit=3).score == 1.0
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "CODE", b"other")
        assert read_result(folder).score == 1.0
    lines = (folder / "samples.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "score": 0.0})
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    assert read_result(folder).score == 0.75


@pytest.mark.parametrize("file", ["metrics.json", "summary.json"])
def test_a_run_whose_numbers_or_summary_lack_a_key_is_read_from_its_samples(file: str, tmp_path: Path) -> None:
    """As those of an older version may."""
    samples = [sample(i, 1.0) for i in range(4)]
    folder = write_run(tmp_path, "snapkv", samples)
    numbers = json.loads((folder / file).read_text())
    del (numbers if file == "metrics.json" else numbers["run"])["n" if file == "metrics.json" else "naming"]
    (folder / file).write_text(json.dumps(numbers))
    assert (read_result(folder).n, read_result(folder).policy) == (4, "snapkv")
    write_summary(folder, samples)  # of these numbers: its digest fits
    assert (read_result(folder).n, read_result(folder).policy) == (4, "snapkv")


def test_a_run_with_an_infinite_setting_has_a_summary(tmp_path: Path) -> None:
    """Such as the temperature of CAKE's ablation `cake_alloc_h_ind_mean`."""
    samples = [sample(i, 1.0) for i in range(4)]
    folder = write_run(tmp_path, "cake", samples)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["identity"]["policy"]["tau2"] = float("inf")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_summary(folder, samples)
    summary = read_summary(folder)
    assert summary.run["identity"]["policy"]["tau2"] == float("inf")
