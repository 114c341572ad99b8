"""The prompts of a task, made once for all runs that use them, and checks that a run's policy supports them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvbench.cache.families import layout_of
from kvbench.config.parts import refusing_in
from kvbench.engine.divergence import check_divergence, given_answer
from kvbench.engine.teacher_forcing import policy_for
from kvbench.errors import UsageError, refusing
from kvbench.models.prompt import Prompt
from kvbench.models.prompts import PromptMaker
from kvbench.policies.policy import Policy, layer_budgets, read_plan
from kvbench.policies.policy_checks import check_next_prompt
from kvbench.policies.pre_passes.pre_pass import PromptChoice
from kvbench.results.samples import Sample
from kvbench.run.run import Run
from kvbench.tasks.task import PlainTokenizer
from kvbench.terminal.progress import progress

log = logging.getLogger(__name__)


@dataclass
class Prompts:
    """The first prompts of a task, repeated for every answer; error: why the next prompt could not be made."""

    made: list[Prompt] = field(default_factory=list)
    error: UsageError | None = None

    def first(self, limit: int | None) -> list[Prompt]:
        """The first `limit` prompts, or all for None. Raises the UsageError if one of them could not be made."""
        if self.error is not None and (limit is None or limit > len(self.made)):
            raise self.error
        return self.made[:limit]


def prompts_for(runs: Sequence[Run]) -> Prompts:
    """The prompts of runs with equal prompts, up to the largest limit among them."""
    run, limits = runs[0], [run.limit for run in runs]
    limit = None if None in limits else max(n for n in limits if n is not None) // run.samples
    needs_question = any(run.policy.needs.question for run in runs)
    prompts = Prompts()
    try:
        tokenizer = run.checkpoint.tokenizer()
        spec, positions = run.checkpoint.spec, run.checkpoint.max_positions
        maker = PromptMaker(
            tokenizer,
            run.task,
            positions,
            spec.max_prompt_tokens,
            run.compress,
            needs_question,
            spec.system_prompt,
        )
        _check_length(run)
        if "task.chat" in run.changed and run.task.chat and not tokenizer.chat_template:
            raise UsageError(f"task.chat=true: the tokenizer of {spec.name} has no chat template")
        with refusing_in("task", run.config["task"], f"task {run.task.name}: "):
            plain = PlainTokenizer(tokenizer)
            examples = run.task.examples(plain, run.seed, limit)
            for example in progress(examples, "prompts", limit):
                prompt = maker.make(example)
                _check_vocabulary(run, prompt)
                prompts.made += _each_sample(given_answer(prompt) if run.task.divergence else prompt, run.samples)
        if not prompts.made:
            raise UsageError(f"task {run.task.name} has no examples")
        _warn_if_answers_are_cut(run, plain, prompts.made[0])
    except UsageError as error:
        prompts.error = error
    return prompts


def make_prompts(run: Run) -> list[Prompt]:
    """All prompts of a run. Raises UsageError if one of them does not fit the model or the policy."""
    prompts = prompts_for([run]).first(run.limit)
    check_policy(run, prompts)
    return prompts


def _warn_if_answers_are_cut(run: Run, tokenizer: PlainTokenizer, prompt: Prompt) -> None:
    """Log a warning if task.max_new_tokens is smaller than a correct answer."""
    most, before = prompt.example.max_new_tokens, prompt.example.answer_prefix
    if "task.max_new_tokens" not in run.changed or not prompt.example.references:
        return
    answers = [ref if before[-1:].isspace() else f" {ref}" for ref in prompt.example.references]
    tokens = {answer: len(tokenizer.encode(before + answer)) - len(tokenizer.encode(before)) for answer in answers}
    answer = min(answers, key=tokens.__getitem__)
    if tokens[answer] > most:
        log.warning("task.max_new_tokens=%d cuts answers off: %r takes %d tokens", most, answer[:60], tokens[answer])


def _check_length(run: Run) -> None:
    """Raise UsageError for a task length of more than twice the model's positions, before prompts are made.

    Shorter lengths are checked in tokens, prompt by prompt.
    """
    name, positions = run.task.length_field, run.checkpoint.max_positions
    if name is None:
        return
    given = getattr(run.task, name)
    longest = max(given) if isinstance(given, tuple) else given
    if positions is not None and run.task.truncation == "refuse" and longest > 2 * positions:
        raise UsageError(
            f"task.{name}={longest} is too long: the model's maximum is {positions} positions, choose a shorter length"
        )


def _check_vocabulary(run: Run, prompt: Prompt) -> None:
    """Raise UsageError for a token that the model does not know: its tokenizer is that of another model."""
    known = int(run.checkpoint.config.get_text_config(decoder=True).vocab_size)
    if prompt.largest_token >= known:
        raise UsageError(
            f"the tokenizer of {run.checkpoint.spec.name} makes token {prompt.largest_token}, and the vocabulary of "
            f"the model has {known} tokens: use the model's own tokenizer"
        )


def _each_sample(prompt: Prompt, samples: int) -> list[Prompt]:
    """A prompt once for each of its answers, numbered among all answers."""
    if samples == 1:
        return [prompt]
    first = prompt.example.index * samples
    return [replace(prompt, example=replace(prompt.example, index=first + i), sample=i) for i in range(samples)]


def is_generated(prompt: Prompt) -> bool:
    """Whether the model generates an answer to an example, instead of scoring given tokens."""
    return not prompt.is_scored and not prompt.pairs


def in_batch(run: Run, prompt: Prompt) -> bool:
    """Whether an example continues from a prompt in a cache of kvbench; otherwise it is computed as a whole."""
    return not prompt.pairs and not prompt.is_whole_text and run.policy.generator is None


def check_policy(run: Run, prompts: Sequence[Prompt]) -> None:
    """Raise UsageError if a run's policy or sampling cannot be used with its prompts."""
    if run.task.divergence:
        check_divergence(run, prompts)
    sampling = None if run.sampling is None or run.sampling.greedy else run.sampling
    if sampling is not None and not any(map(is_generated, prompts)):
        raise UsageError(
            f"generation.temperature={sampling.temperature} has no effect: task {run.task.name} scores tokens that "
            "are given, leave it out"
        )
    if run.watch and not all(in_batch(run, prompt) for prompt in prompts):
        raise UsageError(
            f"watch has no effect: task {run.task.name} is computed as a whole under {run.policy_name}, leave it out"
        )
    if run.policy.needs.question:
        unclear = next((prompt for prompt in prompts if prompt.question is None), None)
        if unclear is not None:
            raise UsageError(
                f"task {run.task.name}: {run.policy_name} needs the position of the question in a prompt, and the "
                f"question of example {unclear.example.index} cannot be separated from the text before it"
            )
    layers, lengths = len(layout_of(run.checkpoint.config).attention), {n for prompt in prompts for n in prompt.lengths}
    with refusing(f"budget={run.budget}: "):
        if run.policy.evicts:
            for length, asked, begin in {
                (n, 0 if p.question is None else n - p.question, begin)
                for p in prompts for n, begin in p.lengths.items()
            }:  # fmt: skip
                layer_budgets(run.policy, layers, length, asked, begin)
        for length in lengths if run.policy.reader is not None else ():
            read_plan(run.policy, length)
    with refusing(f"task {run.task.name}: "):
        if any(prompt.turns for prompt in prompts):
            _check_turns(run.policy)
            if any(prompt.own for prompt in prompts) and sampling is not None:
                raise ValueError("history=own needs greedy decoding, because a turn repeats the answers before it")
        if run.policy.generator is not None and not all(map(is_generated, prompts)):
            raise ValueError(f"{run.policy_name} can only generate, and this task scores given tokens")
        for prompt in (prompt for prompt in prompts if prompt.is_scored):
            policy_for(run.policy, prompt)


def _check_turns(policy: Policy) -> None:
    """Raise ValueError if a policy cannot compress another prompt after the first one."""
    if policy.generator is not None:
        raise ValueError(f"{policy.name} compresses a cache of its own, and only one prompt: use mode=scdq")
    if isinstance(policy.pre_pass, PromptChoice):
        raise ValueError(f"{policy.name} rewrites a prompt before it is read, so none can follow it: use mode=scdq")
    if policy.schedule.late:
        raise ValueError(
            f"{policy.name} evicts only once a token after a prompt has attended to all of it (late=true), and in a "
            "conversation the next prompt follows: use another schedule or policy"
        )
    if policy.evicts:
        check_next_prompt(policy.name, policy.store, policy.allocator)


def blank(prompt: Prompt) -> Sample:
    """The sample of an example before it is computed."""
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
