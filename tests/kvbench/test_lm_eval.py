"""lm-eval's tasks under our policies: equal to lm-eval's own `hf` with the full cache, and what we add to them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval_data as made
import pytest
from lm_eval import simple_evaluate

from kvbench.cli import main
from kvbench.engine.compute import compute_runs
from kvbench.results.loading import read_result
from kvbench.tasks.lm_eval.load import manager, provide_squad_metrics, rows_from
from kvbench.tasks.lm_eval.task import LmEval
from kvbench.tools.diagnose import runs_of


class Bench:
    """Runs command lines on the tiny model in this process."""

    def __init__(self, model: Path, data: dict[str, Path], out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.data, self.out, self._capsys = model, data, out, capsys

    def __call__(self, task: str, *arguments: str, data: bool = True) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self._capsys.readouterr()
        given = [f"task.data_dir={self.data[task]}"] if data else []
        common = [f"model.path={self.model}", "device=cpu", f"out={self.out}"]
        code = main([f"task=lm_eval/{task}", *common, *given, *arguments])
        return code, *self._capsys.readouterr()

    def run(self, task: str, *arguments: str) -> list[dict[str, Any]]:
        """The samples of a run that has to succeed."""
        given = [f"model={self.model}", f"task=lm_eval/{task}", f"task.data_dir={self.data[task]}", f"out={self.out}"]
        runs = runs_of([*given, "device=cpu", *arguments])
        assert compute_runs(runs) == [None]
        self.folder = runs[0].folder
        return [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]

    @property
    def official(self) -> dict[str, Any]:
        return json.loads((self.folder / "metrics.json").read_text())["official"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made.write_all(tmp_path_factory.mktemp("lm_eval"))


@pytest.fixture
def bench(
    tiny_model: Path,
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    return Bench(tiny_model, data, tmp_path / "runs", capsys)


def theirs(model: Path, task: str, data_dir: Path, limit: int, **options: Any) -> dict[str, Any]:
    """What lm-eval itself makes of its task with its own model `hf`; only the rows come from our files."""
    known = manager(task)
    provide_squad_metrics()
    with rows_from(str(data_dir)):
        return simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32"},
            tasks=[task],
            task_manager=known,
            device="cpu",
            batch_size=1,
            limit=limit,
            bootstrap_iters=0,
            **options,
        )


def values(results: dict[str, Any]) -> dict[str, float]:
    """The metrics of a task in lm-eval's results."""
    return {k: v for k, v in results.items() if "," in k and "_stderr," not in k}


OTHER_TASK = pytest.mark.slow("runs another task of lm-eval twice")


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("gsm8k", {"num_fewshot": 2}),
        *(pytest.param(name, {}, marks=OTHER_TASK) for name in ("gsm8k_cot_zeroshot", "coqa", "truthfulqa_gen")),
    ],
)
def test_prompts_answers_and_metrics_are_those_of_lm_eval_s_hf(
    bench: Bench, task: str, options: dict[str, Any]
) -> None:
    found = theirs(bench.model, task, bench.data[task], 2, gen_kwargs={"max_gen_toks": 24}, **options)
    asked = [f"task.{name}={value}" for name, value in options.items()]
    samples = bench.run(task, "policy=full", "limit=2", "task.gen_kwargs={max_gen_toks: 24}", *asked)
    rows = found["samples"][task]
    by_document = {row["doc_id"]: row for row in rows}
    for index, sample in enumerate(samples):
        assert sample["output"] == by_document[index]["resps"][0][0]
        assert sample["prompt_hash"] == by_document[index]["prompt_hash"]  # both are the sha256 of the text
        assert sample["metadata"]["doc_hash"] == by_document[index]["doc_hash"]
    assert any(sample["output"] for sample in samples)
    assert bench.official == pytest.approx(values(found["results"][task]))
    per_document = [row for row in rows if row["doc_id"] == 1]
    for row in per_document:
        for metric in row["metrics"]:
            assert samples[1]["measures"][f"{metric},{row['filter']}"] == pytest.approx(row[metric])


@pytest.mark.parametrize(
    "task", ["arc_easy", *(pytest.param(name, marks=OTHER_TASK) for name in ("winogrande", "lambada_openai"))]
)
def test_likelihoods_and_metrics_are_those_of_lm_eval_s_hf(bench: Bench, task: str) -> None:
    found = theirs(bench.model, task, bench.data[task], 3, num_fewshot=0)
    samples = bench.run(task, "policy=full", "limit=3", "task.num_fewshot=0")
    rows = sorted(found["samples"][task], key=lambda row: row["doc_id"])
    for sample, row in zip(samples, rows, strict=True):
        ours = json.loads(sample["output"])
        assert [value for value, _ in ours] == pytest.approx([float(r[0][0]) for r in row["resps"]], abs=1e-4)
        assert [greedy for _, greedy in ours] == [r[0][1] in (True, "True") for r in row["resps"]]
    assert bench.official == pytest.approx(values(found["results"][task]), rel=1e-4)


def test_fewshot_seed_draws_other_examples(data: dict[str, Path]) -> None:
    own = {"name": "x", "task": "gsm8k", "data_dir": str(data["gsm8k"]), "num_fewshot": 3}
    first, again, other = (
        next(iter(LmEval(**own, **seed).examples(None, 0))).prompt for seed in ({}, {}, {"fewshot_seed": 7})
    )
    assert first == again != other


def test_a_task_that_samples_is_sampled_as_it_says(bench: Bench) -> None:
    def outputs(*arguments: str) -> list[str]:
        samples = bench.run("gsm8k", "policy=full", "limit=2", "task.num_fewshot=0", *arguments)
        return [sample["output"] for sample in samples]

    sampled = "task.gen_kwargs={do_sample: true, temperature: 1.5, top_k: 40, max_gen_toks: 8}"
    own = outputs(sampled)
    assert read_result(bench.folder).identity["generation"]["decoding"] == "as in lm-eval's task"
    greedy = outputs("task.gen_kwargs={max_gen_toks: 8}")
    assert own != greedy
    assert own == outputs(
        "task.gen_kwargs={max_gen_toks: 8}", "generation.temperature=1.5", "generation.top_k=40"
    )  # whoever asks
    assert greedy == outputs(sampled, "generation.temperature=0")


def test_a_small_budget_is_kept_and_evictions_are_reported(bench: Bench) -> None:
    arguments = ("policy=snapkv", "policy.scorer.window=8", "budget=32", "decode=evict", "limit=3")
    full = bench.run("arc_easy", "policy=full", "limit=3")
    small = bench.run("arc_easy", *arguments)
    assert {n for sample in small for layer in sample["kept_tokens"] for n in layer} == {32}
    assert [sample["evicted"] for sample in small] == [1.0] * 3
    assert [sample["evicted"] for sample in full] == [0.0] * 3
    assert [s["output"] for s in small] != [s["output"] for s in full]
    assert json.loads((bench.folder / "metrics.json").read_text())["evicted_share"] == 1.0
    roomy = bench.run("arc_easy", "policy=snapkv", "budget=1000", "limit=3")
    assert [sample["evicted"] for sample in roomy] == [0.0] * 3
    assert [s["output"] for s in roomy] == [s["output"] for s in full]


def test_group_means_by_hand() -> None:
    from types import SimpleNamespace

    from kvbench.tasks.scores import summary

    def sample(task: str, value: float, by_size: bool) -> Any:
        group = {"name": "both", "weight_by_size": {"acc": by_size}}
        metadata = {"benchmark": "lm_eval", "task": task, "group": group}
        return SimpleNamespace(references=[], metadata=metadata, output="x", score=value, measures={"acc,none": value})

    rows = [("a", 1.0), ("b", 0.0), ("b", 0.0), ("b", 1.0)]
    sized = summary([sample(task, value, True) for task, value in rows])
    alike = summary([sample(task, value, False) for task, value in rows])
    assert sized["both/acc,none"] == 0.5  # 2 of 4 documents
    assert alike["both/acc,none"] == pytest.approx((1 + 1 / 3) / 2)
    assert sized["b/acc,none"] == pytest.approx(1 / 3)


def test_missing_data_is_one_message_that_names_the_download(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    code, _, said = bench("gsm8k", "task.fewshot_seed=99", data=False)
    assert code == 1
    assert "Traceback" not in said
    assert "openai/gsm8k (main) cannot be loaded (ConnectionError" in said
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir DIR`" in said
    assert "task.data_dir=DIR" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["task.num_fewshot=2"], "num_fewshot=2 of gsm8k needs 2 examples, but the split train has 0: add it to "
         "data_dir, or set a smaller num_fewshot"),
        (["task.num_fewshot=-1"], "num_fewshot must be a whole number of at least 0, got -1"),
        (["task.gen_kwargs=8"], "gen_kwargs=8 is not allowed, write gen_kwargs={max_gen_toks: 512}"),
        (["task.gen_kwargs={do_sample: true}"], "gsm8k: do_sample=true needs a temperature above 0, got 0.0"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_a_test_file_are_refused(
    bench: Bench, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    file = made.write_jsonl(tmp_path / "gsm8k_test.jsonl", made.gsm8k(4))
    code, _, said = bench("gsm8k", f"task.data_dir={file}", "limit=1", *arguments, data=False)
    assert code == 1
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("gsm8k_test.jsonl", '{"question": "a", "answer": "#### 1"}\n{"quest', "openai/gsm8k (main) cannot be loaded"),
        ("notes.md", "x", "openai/gsm8k (main) cannot be loaded"),
        (
            "test.jsonl",
            '{"input": "a", "target": "b"}\n',
            "its rows must have the fields of the data set on the Hub (UndefinedError: 'question'",
        ),
    ],
)
def test_damaged_or_wrong_files_are_one_sentence(
    bench: Bench, tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text(content)
    code, _, said = bench("gsm8k", f"task.data_dir={folder}", "task.num_fewshot=0", data=False)
    assert code == 1
    assert sentence in said
    assert "Traceback" not in said


def test_human_eval_is_refused_until_it_is_allowed(bench: Bench) -> None:
    code, _, said = bench("humaneval", "policy=full")
    assert code == 1
    assert "scoring runs code that the model wrote: allow_code_execution=true permits it" in said
    assert "Traceback" not in said


def test_human_eval_counts_passing_programs_if_execution_is_allowed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's metric is downloaded; a metric of three lines that runs the tests is in its place."""

    class Metric:
        def compute(self, references: list[str], predictions: list[list[str]], k: list[int]) -> tuple[Any, None]:
            passed = []
            for test, programs in zip(references, predictions, strict=True):
                done = [subprocess.run([sys.executable, "-c", f"{p}\n{test}"], capture_output=True) for p in programs]
                passed.append(sum(one.returncode == 0 for one in done) / len(done))
            return {"pass@1": sum(passed) / len(passed)}, None

    monkeypatch.setattr("evaluate.load", lambda name: Metric())
    task = LmEval(name="x", task="humaneval", data_dir=str(bench.data["humaneval"]), allow_code_execution=True)
    first, second = task.examples(None, 0)
    assert first.prompt == made.humaneval()[0]["prompt"]
    assert task.judge("    return a + b + 0\n", first) == (1.0, {"pass@1,create_test": 1.0})
    assert task.judge("    return a + b + 0\n", second) == (0.0, {"pass@1,create_test": 0.0})
