"""Tasks of lm-eval as kvbench tasks: an example is a document with its requests, scored by lm-eval's own metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from jinja2.exceptions import TemplateError

from kvbench.errors import ConfigError, from_extra
from kvbench.tasks.lm_eval.load import GENERATES, RATES, LmTask, Loaded, aggregation, generation, load, task_names
from kvbench.tasks.suite import in_turn
from kvbench.tasks.task import Example, Task, Tokenizer, counts, is_blank

KEY = ("task", "num_fewshot", "gen_kwargs", "metric", "data_dir", "allow_code_execution", "include_path", "included")


def _version() -> str:
    with from_extra("lm-eval", "a task of lm-eval"):
        return version("lm_eval")


@dataclass(frozen=True, kw_only=True)
class LmEval(Task):
    """A task, group or tag of lm-eval, with its own prompts, filters and metrics.

    task: its name in lm-eval. num_fewshot: number of examples in the prompt; None: the task's number. fewshot_seed: of
    their draw. apply_chat_template, system_instruction, gen_kwargs: as on lm-eval's command line.
    metric: the "metric,filter" used as the score of an example, in lm-eval's unit; None: the first metric that is
    aggregated as a mean, or else the first number. data_dir: a local copy of the data set. include_path: a folder of
    your own task files, as in lm-eval; included: a digest of its files. allow_code_execution: allow tasks that run
    code written by the model. version: lm-eval's version, because its tasks change between releases.
    """

    named_by: ClassVar[str | None] = "task"
    cuts_bos: ClassVar[bool] = True
    decoding: ClassVar[str] = "as in lm-eval's task"

    task: str
    truncation: str = "left"
    num_fewshot: int | None = None
    fewshot_seed: int = 1234
    apply_chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] | None = None
    metric: str | None = None
    data_dir: str | None = None
    allow_code_execution: bool = field(default=False, metadata={"decides": False})  # a permission
    include_path: str | None = field(default=None, metadata={"decides": False})  # `included` is used instead
    included: str | None = field(init=False, default=None)
    version: str = field(init=False, default_factory=_version)

    @classmethod
    def own_names(cls) -> Sequence[str]:
        """lm-eval's tasks and groups."""
        return task_names()

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 0, "num_fewshot", "fewshot_seed")
        if self.num_fewshot is not None:  # a sweep over it has rows with different names
            shots = f"_{self.num_fewshot}shot"
            object.__setattr__(self, "name", self.name.removesuffix(shots) + shots)
        if self.gen_kwargs is not None and not isinstance(self.gen_kwargs, Mapping):
            raise ConfigError("gen_kwargs", self.gen_kwargs, why="is not allowed, write gen_kwargs={max_gen_toks: 512}")
        if self.include_path is not None:
            object.__setattr__(self, "included", _digest(self.include_path))
        if self.chat or self.stop or self.end_texts:
            raise ValueError("chat, stop and end_texts are not set here: use apply_chat_template and gen_kwargs.until")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: documents of all tasks in turn; limit counts them together, `seed` has no effect.

        Raises ValueError for an unknown task, missing data and settings that are not supported.
        """
        running = {name: self._documents(name, task, tokenizer) for name, task in self._loaded.tasks.items()}
        return (example for _, example in in_turn(running, limit))

    def judge(self, output: str, example: Example) -> tuple[float | None, dict[str, Any]]:
        """The score of an example, and each "metric,filter" as computed by lm-eval for this document."""
        task, number = self._loaded.tasks[example.metadata["task"]], example.metadata["document"]
        document = task.task_docs[number]
        responses = json.loads(output) if task.OUTPUT_TYPE in RATES else [output]
        requests = self._requests(task, document, number, [""] * task.multiple_input or "")
        for request, response in zip(requests, responses, strict=True):
            request.resps = [tuple(response) if isinstance(response, list) else response]
        found: dict[str, Any] = {}
        for pipeline in task._filters:
            pipeline.apply(requests)
            values = task.process_results(document, [request.filtered_resps[pipeline.name] for request in requests])
            found |= {f"{metric},{pipeline.name}": _plain(value) for metric, value in values.items()}
        if self.metric is not None and self.metric not in found:
            raise ConfigError("metric", self.metric, why=f"is not one of {task.config.task}: {', '.join(found)}")
        means = [key for key in found if aggregation(task, key.split(",")[0]) == "mean"]
        chosen = [*means, *found] if self.metric is None else [self.metric]
        return next((float(found[key]) for key in chosen if isinstance(found[key], int | float)), None), found

    def task_of(self, example: Example) -> Task:
        """This task with the stop strings of the example's lm-eval task."""
        until = generation(self._loaded.tasks[example.metadata["task"]]).get("until", [])
        task = copy(self)
        object.__setattr__(task, "stop", tuple(stop for stop in until if stop))
        return task

    @property
    def _loaded(self) -> Loaded:
        return load(json.dumps({name: getattr(self, name) for name in KEY}, sort_keys=True))

    def _requests(self, task: LmTask, document: Any, number: int, context: Any) -> list[Any]:  # noqa: ANN401
        """lm-eval's requests for one document: one generation, or the continuations to score."""
        metadata, chat = (task.config.task, number, 1), self.apply_chat_template
        made = task.construct_requests(
            doc=document, ctx=context, metadata=metadata, apply_chat_template=chat, chat_template=None
        )
        return sorted(made, key=lambda request: request.idx) if isinstance(made, list) else [made]

    def _documents(self, name: str, task: LmTask, tokenizer: Tokenizer) -> Iterator[Example]:
        """The examples of one task, with prompts and few-shot examples as in lm-eval."""
        task.set_fewshot_seed(self.fewshot_seed)

        def render(turns: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return chat_text(
                getattr(tokenizer, "tokenizer", None), turns, add_generation_prompt, self.chat_template_args or {}
            )

        for number, document in enumerate(task.task_docs):
            context = task.fewshot_context(
                document,
                num_fewshot=task.config.num_fewshot or 0,
                system_instruction=self.system_instruction,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=True,  # lm-eval's default
                chat_template=render if self.apply_chat_template else None,
                gen_prefix=task.doc_to_prefix(document),
            )
            requests = self._requests(task, document, number, context)
            if task.OUTPUT_TYPE == GENERATES and len(requests) > 1:
                raise ValueError(f"{name} has several requests per document, which is not supported")
            yield self._example(name, task, number, document, requests)

    def _example(self, name: str, task: LmTask, number: int, document: Any, requests: Sequence[Any]) -> Example:  # noqa: ANN401
        from lm_eval.utils import handle_non_serializable, hash_string

        rates, settings = task.OUTPUT_TYPE in RATES, generation(task)
        target = task.doc_to_target(document)
        if isinstance(target, int) and task.config.doc_to_choice is not None:
            target = task.doc_to_choice(document)[target]
        targets = target if isinstance(target, list) else [target]
        text = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
        return Example(
            index=number,
            prompt="" if rates else requests[0].args[0],
            references=tuple(text for text in map(str, targets) if not is_blank(text)),
            question="" if rates else _question(task, document, requests[0].args[0]),
            max_new_tokens=settings.get("max_gen_toks", 0),
            rated=tuple(request.args for request in requests) if rates else (),
            sampling=settings.get("sampling"),
            metadata={
                "benchmark": "lm_eval",
                "task": name,
                "document": number,
                "version": task.VERSION,
                "num_fewshot": task.config.num_fewshot or 0,
                "doc_hash": str(hash_string(text)),  # as in lm-eval's results
                **self._loaded.aggregates(name),
            },
        )


def chat_text(
    tokenizer: Any,  # noqa: ANN401 - of Hugging Face
    turns: Sequence[dict[str, str]],
    add_generation_prompt: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Turns in a tokenizer's chat template, without system turns if it refuses them, as in lm-eval.

    arguments: further arguments of the template. Raises ValueError without a template.
    """
    if not tokenizer.chat_template:
        raise ValueError("apply_chat_template=true, but the model's tokenizer has no chat template")
    end = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
    try:
        return str(tokenizer.apply_chat_template(list(turns), **(arguments or {}), tokenize=False, **end))
    except TemplateError:
        others = [turn for turn in turns if turn["role"] != "system"]
        if len(others) == len(turns):
            raise
        return chat_text(tokenizer, others, add_generation_prompt, arguments)


def _digest(include_path: str) -> str:
    """A digest of the task files in a folder and of the YAML and Python files next to them."""
    from lm_eval.tasks import TaskManager

    own = Path(include_path).expanduser()
    if not own.is_dir():
        raise ConfigError("include_path", include_path, why="is not a folder, it must have task files of lm-eval")
    index = TaskManager(include_path=str(own), include_defaults=False).task_index.values()
    folders = {own, *(entry.yaml_path.parent for entry in index if entry.yaml_path)}
    paths = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in ("", ".yaml", ".py"))
    contents = b"".join(sha256(path.read_bytes()).digest() for path in paths if path.is_file())
    return f"sha256:{sha256(contents).hexdigest()[:16]}"


def _question(task: LmTask, document: Any, prompt: str) -> str:  # noqa: ANN401
    """The part of a prompt after its few-shot examples; "" without examples, where lm-eval does not separate them."""
    own = task.doc_to_text(document) if task.config.num_fewshot else None
    start = prompt.rfind(own.strip()) if isinstance(own, str) and own.strip() else -1
    return prompt[start:] if start >= 0 else ""


def _plain(value: Any) -> Any:  # noqa: ANN401
    """The value of a metric as JSON: numbers and lists instead of numpy's, None instead of NaN."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
