"""lm-eval's tasks as tasks of ours: an example is a document with all its requests, its scores are their metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib.metadata import version
from math import isfinite
from typing import Any, ClassVar

from kvbench.errors import ConfigError
from kvbench.tasks.lm_eval.chat import chat_text
from kvbench.tasks.lm_eval.find import digest
from kvbench.tasks.lm_eval.load import GENERATES, RATES, LmTask, Loaded, aggregation, generation, load
from kvbench.tasks.suite import in_turn
from kvbench.tasks.task import Example, Task, Tokenizer, counts

BENCHMARK = "lm_eval"


@dataclass(frozen=True, kw_only=True)
class LmEval(Task):
    """A task, group or tag of lm-eval, with its own prompts, filters and metrics.

    task: its name there. num_fewshot: examples in the prompt; None: as the task says. fewshot_seed draws them.
    fewshot_split: where they come from, if not as the task says; from the split that is asked, the asked one is left
    out. apply_chat_template, fewshot_as_multiturn, system_instruction, gen_kwargs: as on lm-eval's command line.
    metric: "metric,filter" that becomes the score of an example, in lm-eval's unit; None: the first one whose mean is
    the task's result, or else the first number. data_dir: a local copy of the data set. include_path: a folder
    of task files of your own, as lm-eval's `--include_path`; included: a digest of what is in it. allow_code_execution:
    tasks that run what the model wrote may do so. version: of lm-eval, whose tasks change between releases.
    """

    named_by: ClassVar[str | None] = "task"
    decoding: ClassVar[str] = "as lm-eval's task says"

    task: str
    truncation: str = "left"
    num_fewshot: int | None = None
    fewshot_seed: int = 1234
    fewshot_split: str | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] | None = None
    metric: str | None = None
    data_dir: str | None = None
    allow_code_execution: bool = field(default=False, metadata={"decides": False})  # a permission: no other outcome
    include_path: str | None = field(default=None, metadata={"decides": False})  # what is in it does
    included: str | None = field(init=False, default=None)
    version: str = field(init=False, default_factory=lambda: version("lm_eval"))

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(self, 0, "num_fewshot", "fewshot_seed")
        if self.num_fewshot is not None:
            shots = f"_{self.num_fewshot}shot"  # a sweep over it has rows that can be told apart
            object.__setattr__(self, "name", self.name.removesuffix(shots) + shots)
        if self.gen_kwargs is not None and not isinstance(self.gen_kwargs, Mapping):
            raise ConfigError("gen_kwargs", self.gen_kwargs, why="is not allowed, write gen_kwargs={max_gen_toks: 512}")
        if self.include_path is not None:
            object.__setattr__(self, "included", digest(self.include_path))
        if self.chat or self.stop or self.end_texts:
            raise ValueError("chat, stop and end_texts are not set here: use apply_chat_template and gen_kwargs.until")

    def examples(self, tokenizer: Tokenizer, seed: int, limit: int | None = None) -> Iterator[Example]:
        """See `Task.examples`: the documents of all tasks in turn; limit counts them together, `seed` changes nothing.

        Raises ValueError with one sentence for an unknown task, data that cannot be had, and what cannot be honoured.
        """
        running = {name: self._documents(name, task, tokenizer) for name, task in self._loaded.tasks.items()}
        return (example for _, example in in_turn(running, limit))

    def judge(self, output: str, example: Example) -> tuple[float | None, dict[str, Any]]:
        """The score of an example, and the value of each "metric,filter" as lm-eval computes it for this document."""
        task, number = self._loaded.tasks[example.metadata["task"]], example.metadata["document"]
        document = task.task_docs[number]
        responses = json.loads(output) if task.OUTPUT_TYPE in RATES else [output]
        requests = _requests(task, document, number, [""] * task.multiple_input or "", self.apply_chat_template)
        for request, response in zip(requests, responses, strict=True):
            request.resps = [tuple(response) if isinstance(response, list) else response]
        found: dict[str, Any] = {}
        for pipeline in task._filters:
            pipeline.apply(requests)
            values = task.process_results(document, [request.filtered_resps[pipeline.name] for request in requests])
            found |= {f"{metric},{pipeline.name}": _plain(value) for metric, value in values.items()}
        return self._score(task, found), found

    def score(self, output: str, example: Example) -> float:
        """The value of `metric` for one output. Raises ValueError where no metric is a number."""
        score, _ = self.judge(output, example)
        if score is None:
            raise ValueError(f"{self.task} has no metric that is a number for a single document")
        return score

    def task_of(self, example: Example) -> Task:
        """This task with the stop strings of the lm-eval task that asks."""
        until = generation(self._loaded.tasks[example.metadata["task"]]).get("until", [])
        asking = copy(self)
        object.__setattr__(asking, "stop", tuple(stop for stop in until if stop))
        return asking

    def _score(self, task: LmTask, found: Mapping[str, Any]) -> float | None:
        if self.metric is not None and self.metric not in found:
            raise ConfigError("metric", self.metric, why=f"is not one of {task.config.task}: {', '.join(found)}")
        means = [key for key in found if aggregation(task, key.split(",")[0]) == "mean"]
        chosen = [*means, *found] if self.metric is None else [self.metric]
        return next((float(found[key]) for key in chosen if isinstance(found[key], int | float)), None)

    @property
    def _key(self) -> str:
        """All that decides what is loaded, as a string that a cache can remember."""
        names = ["task", "num_fewshot", "fewshot_split", "gen_kwargs", "metric", "data_dir", "allow_code_execution"]
        names += ["include_path", "included"]
        return json.dumps({name: getattr(self, name) for name in names}, sort_keys=True)

    @property
    def _loaded(self) -> Loaded:
        return load(self._key)

    def _documents(self, name: str, task: LmTask, tokenizer: Tokenizer) -> Iterator[Example]:
        """The examples of one task, in lm-eval's order, few-shot examples drawn as lm-eval draws them."""
        task.set_fewshot_seed(self.fewshot_seed)
        template = getattr(tokenizer, "tokenizer", None)

        def render(turns: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return chat_text(template, turns, add_generation_prompt, self.chat_template_args or {})

        for number, document in enumerate(task.task_docs):
            context = task.fewshot_context(
                document,
                num_fewshot=task.config.num_fewshot or 0,
                system_instruction=self.system_instruction,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=self.fewshot_as_multiturn,
                chat_template=render if self.apply_chat_template else None,
                gen_prefix=task.doc_to_prefix(document),
            )
            requests = _requests(task, document, number, context, self.apply_chat_template)
            kinds = {request.request_type for request in requests}
            if len(kinds) > 1 or (len(requests) > 1 and kinds == set(GENERATES)):
                raise ValueError(f"{name} asks several things of one document, which is not done here")
            yield self._example(name, task, number, document, requests)

    def _example(self, name: str, task: LmTask, number: int, document: Any, requests: Sequence[Any]) -> Example:  # noqa: ANN401
        rates = task.OUTPUT_TYPE in RATES
        target = task.doc_to_target(document)
        if isinstance(target, int) and task.config.doc_to_choice is not None:
            target = task.doc_to_choice(document)[target]
        return Example(
            index=number,
            prompt="" if rates else requests[0].args[0],
            references=tuple(str(one) for one in (target if isinstance(target, list) else [target])),
            question="" if rates else _question(task, document, requests[0].args[0]),
            max_new_tokens=0 if rates else generation(task)["max_gen_toks"],
            rated=tuple(request.args for request in requests) if rates else (),
            sampling=None if rates else generation(task)["sampling"],
            metadata={
                "benchmark": BENCHMARK,
                "task": name,
                "document": number,
                "version": task.VERSION,
                "num_fewshot": task.config.num_fewshot or 0,
                "doc_hash": _hash(document),
                **self._loaded.aggregates(name),
            },
        )


def _hash(document: Any) -> str:  # noqa: ANN401
    """What lm-eval's own results call a document: all its fields, of which scores may read any."""
    from lm_eval.utils import handle_non_serializable, hash_string

    return str(hash_string(json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)))


def _requests(task: LmTask, document: Any, number: int, context: Any, chat: bool) -> list[Any]:  # noqa: ANN401
    """lm-eval's requests for one document: one that generates, or several that rate continuations."""
    made = task.construct_requests(
        doc=document,
        ctx=context,
        metadata=(task.config.task, number, 1),
        apply_chat_template=chat,
        chat_template=None,
    )
    return sorted(made, key=lambda request: request.idx) if isinstance(made, list) else [made]


def _question(task: LmTask, document: Any, prompt: str) -> str:  # noqa: ANN401
    """The end of a prompt from where its own document begins: the examples before it are what questions share.

    Without examples a document is one text, in which lm-eval does not say what is the question.
    """
    own = task.doc_to_text(document) if task.config.num_fewshot else None
    start = prompt.rfind(own.strip()) if isinstance(own, str) and own.strip() else -1
    return prompt[start:] if start >= 0 else ""


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a metric is
    """A metric's value as JSON holds it: numpy's numbers and arrays are Python's, tuples are lists, NaN is None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
