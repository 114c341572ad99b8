"""The prompts of a task, made once for all runs that read them, and whether a run's policy can take them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvbench.cache.layout import attention_layers
from kvbench.config.tree import refusing_in
from kvbench.engine.reading import is_generated, is_read, policy_for
from kvbench.engine.turns import check_turns
from kvbench.errors import UsageError, refusing
from kvbench.models.prompts import Prompt, PromptMaker
from kvbench.policies.layer_budgets import layer_budgets, read_plan
from kvbench.results.sample import Sample
from kvbench.run.run import Run
from kvbench.tasks.task import PlainTokenizer
from kvbench.terminal.bars import progress

log = logging.getLogger(__name__)


@dataclass
class Prompts:
    """The first prompts of a task, as often as each is answered; error: why there is no further one, if wanted."""

    made: list[Prompt] = field(default_factory=list)
    error: UsageError | None = None

    def first(self, limit: int | None) -> list[Prompt]:
        """So many prompts, or all for None. Raises the UsageError of one among them that could not be made."""
        if self.error is not None and (limit is None or limit > len(self.made)):
            raise self.error
        return self.made[:limit]


def prompts_for(cells: Sequence[Run]) -> Prompts:
    """The prompts of cells that differ in nothing a prompt depends on, up to the largest limit among them."""
    cell, limits = cells[0], [cell.limit for cell in cells]
    limit = None if None in limits else max(n for n in limits if n is not None) // cell.samples
    asks = any(cell.policy.needs.question for cell in cells)
    prompts = Prompts()
    try:
        tokenizer = cell.checkpoint.tokenizer()
        spec, positions = cell.checkpoint.spec, cell.checkpoint.max_positions
        maker = PromptMaker(tokenizer, cell.task, positions, spec.max_prompt_tokens, cell.compress, asks)
        _check_length(cell)
        if "task.chat" in cell.changed and cell.task.chat and not tokenizer.chat_template:
            raise UsageError(f"task.chat=true: the tokenizer of {spec.name} has no chat template")
        with refusing_in("task", cell.config["task"], f"task {cell.task.name}: "):
            plain = PlainTokenizer(tokenizer)
            examples = cell.task.examples(plain, cell.seed, limit)
            for example in progress(examples, "prompts", limit):
                prompts.made += _each_sample(maker.make(example), cell.samples)
        if not prompts.made:
            raise UsageError(f"task {cell.task.name} has no examples")
        _tell_cut_answers(cell, plain, prompts.made[0])
    except UsageError as error:
        prompts.error = error
    return prompts


def _tell_cut_answers(cell: Run, tokenizer: PlainTokenizer, prompt: Prompt) -> None:
    """Say so where answers were given fewer tokens than a right one takes: small runs do that, knowing their scores."""
    most, before = prompt.example.max_new_tokens, prompt.example.answer_prefix
    if "task.max_new_tokens" not in cell.changed or not prompt.example.references:
        return
    answers = [ref if before[-1:].isspace() else f" {ref}" for ref in prompt.example.references]
    tokens = {answer: len(tokenizer.encode(before + answer)) - len(tokenizer.encode(before)) for answer in answers}
    answer = min(answers, key=tokens.__getitem__)
    if tokens[answer] > most:
        log.warning("task.max_new_tokens=%d cuts answers off: %r takes %d tokens", most, answer[:60], tokens[answer])


def _check_length(cell: Run) -> None:
    """Raise UsageError for lengths far beyond the model's positions, before minutes go into prompts of them.

    Twice as many are certain not to fit; what is nearer is counted in tokens, prompt by prompt.
    """
    field, positions = cell.task.length_field, cell.checkpoint.max_positions
    if field is None:
        return
    given = getattr(cell.task, field)
    longest = max(given) if isinstance(given, tuple) else given
    if positions is not None and cell.task.truncation == "refuse" and longest > 2 * positions:
        raise UsageError(
            f"task.{field}={longest} is too long: the model's maximum is {positions} positions, choose a shorter length"
        )


def _each_sample(prompt: Prompt, samples: int) -> list[Prompt]:
    """A prompt once for each of its answers, numbered among all answers."""
    if samples == 1:
        return [prompt]
    first = prompt.example.index * samples
    return [replace(prompt, example=replace(prompt.example, index=first + i), sample=i) for i in range(samples)]


def make_prompts(cell: Run) -> list[Prompt]:
    """All prompts of a cell, and the check that each fits the model and the policy. Raises UsageError."""
    prompts = prompts_for([cell]).first(cell.limit)
    check_policy(cell, prompts)
    return prompts


def check_policy(cell: Run, prompts: Sequence[Prompt]) -> None:
    """Raise UsageError where a cell's policy cannot bring one of the prompts to its budget, or cannot read it.

    So it does where answers are to be sampled and none is written.
    """
    sampling = None if cell.sampling is None or cell.sampling.greedy else cell.sampling
    if sampling is not None and not any(map(is_generated, prompts)):
        raise UsageError(
            f"generation.temperature={sampling.temperature} has no effect: task {cell.task.name} scores tokens that "
            "are given, leave it out"
        )
    if cell.policy.needs.question:
        untold = next((prompt for prompt in prompts if prompt.question is None), None)
        if untold is not None:
            raise UsageError(
                f"task {cell.task.name}: {cell.policy_name} asks where the question of a prompt begins, and example "
                f"{untold.example.index} has none that can be told from what stands before it"
            )
    if cell.policy.evicts:
        layers = attention_layers(cell.checkpoint.config)
        with refusing(f"budget={cell.budget}: "):
            for length, asked in {(n, 0 if p.question is None else n - p.question) for p in prompts for n in p.lengths}:
                layer_budgets(cell.policy, layers, length, asked)
    if cell.policy.reader is not None:
        with refusing(f"budget={cell.budget}: "):
            for length in {length for prompt in prompts for length in prompt.lengths}:
                read_plan(cell.policy, length)
    if any(prompt.turns for prompt in prompts):
        with refusing(f"task {cell.task.name}: "):
            check_turns(cell.policy)
            if any(prompt.own for prompt in prompts) and sampling is not None:
                raise ValueError("history=own goes with greedy decoding, since a turn repeats the answers before it")
    for prompt in filter(is_read, prompts):
        with refusing(f"task {cell.task.name}: "):
            policy_for(cell.policy, prompt)


def blank(prompt: Prompt) -> Sample:
    """What is known of an example before it is computed."""
    example = prompt.example
    return Sample(
        index=example.index,
        sample=prompt.sample,
        prompt_hash=prompt.hash,
        prompt_tokens=len(prompt.ids),
        references=list(example.references),
        metadata=dict(example.metadata),
        context_tokens=prompt.context_tokens,
        max_new_tokens=example.max_new_tokens,
    )
