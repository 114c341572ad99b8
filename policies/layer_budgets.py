"""How many slots a policy gives each layer."""

from collections.abc import Sequence

from kvbench.errors import LARGEST
from kvbench.policies.allocators.allocator import StatisticAllocator, required_length
from kvbench.policies.policy import Policy
from kvbench.policies.policy_checks import check_prompt_fits, check_protected, check_question_fits, least_budget
from kvbench.policies.readers.reader import ReadPlan


def total_slots(policy: Policy, layers: int, length: int | None) -> int:
    """Slots per KV head over all layers for one sequence with a prompt of `length` tokens.

    A share is round(share * length * layers); without a budget, all tokens. ValueError if `length` is needed but None.
    """
    if policy.budget is None:
        return required_length(length, f"the allocator of {policy.name}") * layers
    if policy.reader is not None:
        length = required_length(length, policy.name)
        return min(read_plan(policy, length).kept, length) * layers
    if isinstance(policy.budget, int):
        return policy.budget * layers
    length = required_length(length, f"a budget that is a share of the prompt ({policy.budget})")
    return round(policy.budget * length * layers)


def layer_budgets(policy: Policy, layers: int, length: int | None, question: int = 0) -> list[int]:
    """Slots per KV head of each layer for one sequence with a prompt of `length` tokens; the sum is exact.

    question: tokens of the question, which policies with `needs.question` always keep. An allocator that needs
    statistics splits evenly before layers are measured.
    ValueError if a layer gets fewer slots than tokens that are always kept.
    """
    scorer, allocator = policy.scorer, policy.allocator
    assert scorer is not None
    total = total_slots(policy, layers, length)
    whole = policy.reader is not None and length is not None and total == length * layers
    if policy.budget is None or whole:  # no lower bound: a short prompt is kept whole
        return allocator.split(total, layers, length, 0)
    check_protected(policy.name, scorer, allocator, total // layers)
    budgets = allocator.split(total, layers, length, least_budget(scorer, allocator))
    assert sum(budgets) == total or not allocator.exact, "an allocator must distribute exactly the total"
    for budget in budgets:
        check_protected(policy.name, scorer, allocator, budget)
    if policy.schedule.protect == "prompt" and length is not None:
        check_prompt_fits(policy.name, scorer, length, min(budgets))
    if policy.needs.question:
        check_question_fits(policy.name, question, min(budgets))
    return budgets


def budget_tokens(policy: Policy, length: int) -> int:
    """The budget of a policy with a reader in tokens per KV head; all tokens for a reader with a `mass`."""
    if policy.reader is not None and policy.reader.mass is not None:
        return LARGEST
    assert policy.budget is not None
    return policy.budget if isinstance(policy.budget, int) else int(policy.budget * length)


def read_plan(policy: Policy, length: int) -> ReadPlan:
    """How decoded queries read after a prompt of `length` tokens. ValueError for a budget smaller than a page."""
    assert policy.reader is not None
    tokens = budget_tokens(policy, length)
    plan = policy.reader.plan(max(tokens, 1), length)
    if min(tokens, plan.tokens) < (1 if plan.cuts else plan.page):
        raise ValueError(
            f"{policy.name} reads pages of {plan.page} tokens, so a budget of {tokens} tokens per KV head is "
            f"too small: it must be at least {2 if plan.cuts else plan.page}"
        )
    return plan


def leaves_whole(policy: Policy, layers: int, length: int) -> bool:
    """Whether an allocator with statistics keeps a prompt of `length` tokens whole."""
    assert isinstance(policy.allocator, StatisticAllocator)
    assert policy.scorer is not None
    floor = least_budget(policy.scorer, policy.allocator)
    return policy.allocator.leaves_whole(length, total_slots(policy, layers, length), layers, floor)


def shared_budgets(policy: Policy, statistics: Sequence[Sequence[float]], layers: int, length: int) -> list[int]:
    """Slots per KV head of the layers measured so far (one statistic each), for a prompt longer than the budget."""
    allocator = policy.allocator
    assert isinstance(allocator, StatisticAllocator)
    assert policy.scorer is not None
    total, floor = total_slots(policy, layers, length), least_budget(policy.scorer, allocator)
    budgets = allocator.share(statistics, total, layers, floor, length)
    if not allocator.exact:
        return budgets
    unmeasured = layers - len(statistics)
    assert all(floor <= budget <= length for budget in budgets), "a layer's share must be within its bounds"
    assert sum(budgets) == total if unmeasured == 0 else sum(budgets) <= total - floor * unmeasured
    return budgets
