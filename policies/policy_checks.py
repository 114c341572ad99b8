"""Makes the composition of a policy: parts that follow from others, and checks of all. They raise ValueError."""

from dataclasses import replace

from kvbench.errors import ConfigError, as_python, counted
from kvbench.policies.allocators.allocator import Allocator, JointAllocator, StatisticAllocator
from kvbench.policies.allocators.threshold import with_threshold
from kvbench.policies.allocators.whole_pages import check_pages, paged_allocator
from kvbench.policies.checks import LARGEST, whole_number
from kvbench.policies.composition import Composition
from kvbench.policies.pre_passes.lookahead import Lookahead
from kvbench.policies.pre_passes.pre_pass import BlockPasses, PrePass
from kvbench.policies.schedule import Prompt
from kvbench.policies.scorers.scorer import AttentionScorer, Scorer
from kvbench.policies.selections.fair import Fair
from kvbench.policies.selections.pages import Pages
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.store import Store


def settled(own: Composition) -> Composition:
    """The composition with the parts that follow from others. Raises ValueError if parts do not fit each other."""
    own = replace(own, budget=as_python(own.budget))
    for check in (check_value, check_reader, check_lookahead):
        check(own)
    if own.scorer is None:
        if own.reader is not None and own.reader.mass is not None:
            return replace(own, budget=None)  # it reads until the mass is reached
        if own.pre_pass is not None or own.reader is not None:
            check_budget(own.budget, own.name)
        return own
    scorer, allocator, pages = own.scorer, own.allocator, own.selection
    if isinstance(pages, Pages):
        allocator = paged_allocator(own.name, pages, allocator, own.schedule, own.store)
    allocator = with_threshold(own.name, allocator, scorer, own.schedule, own.value or own.selection)
    own = replace(own, pre_pass=_pre_pass(own, scorer), allocator=allocator)
    allocator.check_policy(own.name, scorer.needs.window)
    own.store.check_policy(own.name, own.schedule.returns_to_budget, allocator.per_head)
    for of_evictions in (check_single, check_fair, check_schedule, check_statistics, check_merger):
        of_evictions(own, scorer)
    if allocator.sets_budget:
        own = replace(own, budget=None)
    else:
        check_budget(own.budget, own.name)
    if own.schedule.decode == "share":
        check_share(own)
    if isinstance(own.budget, int) and own.reader is None:
        check_protected(own.name, scorer, allocator, own.budget)
        if isinstance(pages, Pages):
            check_pages(own.name, pages, scorer, own.budget)
    return own


def _pre_pass(own: Composition, scorer: Scorer) -> PrePass | None:
    """The pre-pass of a policy: its own or that of its scorer, which may be needless after a whole prompt."""
    if scorer.pre_pass is None:
        return own.pre_pass
    if own.pre_pass not in (None, scorer.pre_pass):
        raise ValueError(f"{own.name}'s scorer already has a pre-pass, so pre_pass must not be set")
    needless = isinstance(scorer.pre_pass, BlockPasses) and isinstance(own.schedule, Prompt)
    return None if needless else scorer.pre_pass


def check_budget(budget: object, name: str = "") -> None:
    """Raise ValueError unless the budget is a whole number of tokens >= 1 or a share of the prompt between 0 and 1.

    name: the name of the policy that needs a budget.
    """
    if name and budget is None:
        raise ValueError(f"{name} needs a budget: tokens per KV head (such as 512) or a share (such as 0.2)")
    tokens = isinstance(budget, int) and not isinstance(budget, bool) and 1 <= budget <= LARGEST
    if not tokens and not (isinstance(budget, float) and 0 < budget < 1):
        allowed = "a whole number of tokens per KV head (1 or more) or a share of the prompt (above 0, below 1)"
        raise ValueError(f"budget must be {allowed}, got {budget!r}")


def check_value(own: Composition) -> None:
    """Raise ValueError unless a value-aware wrapper supports the scores."""
    name, value, scorer = own.name, own.value, own.scorer
    if value is None:
        return
    if scorer is None:
        raise ValueError(f"{name} keeps every token, so there are no scores for a value-aware wrapper")
    if scorer.needs.unweighable:
        raise ValueError(f"{name} {scorer.needs.unweighable}")
    if (value.needs.query_heads or own.granularity == "layer") and (
        not isinstance(scorer, AttentionScorer) or scorer.needs.kv_heads_only
    ):
        raise ValueError(
            f"{name} scores KV heads, not query heads, so gqa=group_l2, gqa=score_mean and granularity=layer "
            "with a value-aware wrapper are not supported; use gqa=alpha_mean"
        )
    if value.needs.window > scorer.needs.window:
        raise ValueError(
            f"{name} weighs values by the attention of a window of queries, and its scorer {type(scorer).__name__} has "
            "none: use a scorer with window=, such as snapkv, or another wrapper, such as critical_"
        )


def check_lookahead(own: Composition) -> None:
    """Raise ValueError unless a lookahead and the scorer fit each other."""
    name, pre_pass, scorer = own.name, own.pre_pass, own.scorer
    if not isinstance(pre_pass, Lookahead):
        if scorer is not None and scorer.needs.lookahead:
            raise ConfigError(
                "window", 0, "at least 1 query, or 0 with the pre-pass Lookahead, as in laq or lookahead_snapkv"
            )
        return
    if scorer is not None and scorer.pre_pass is not None:
        raise ValueError(f"{name}'s scorer already has a pre-pass, so it cannot have a lookahead too")
    if scorer is None or scorer.needs.question or not (scorer.needs.window or scorer.needs.lookahead):
        raise ValueError(
            f"{name} adds queries to an observation window, and its scorer has none that ends the prompt: use a scorer "
            "with window=, such as snapkv, or tova"
        )
    if pre_pass.drafter is not None and own.allocator.sets_budget:
        raise ValueError(f"{name} has no budget to which draft=evicted could evict the prompt: use draft=full")
    if isinstance(own.budget, int):
        check_draft(name, pre_pass, own.budget)


def check_draft(name: str, pre_pass: Lookahead, budget: int) -> None:
    """Raise ValueError if a budget has no room for a token before the window of the lookahead's SnapKV."""
    if pre_pass.drafter is not None and budget <= pre_pass.draft_window:
        raise ValueError(
            f"a budget of {counted(budget, 'token')} per KV head is too small for {name}: draft=evicted keeps the "
            f"newest {counted(pre_pass.draft_window, 'token')} and at least one more; use a smaller "
            "draft_window or draft=full"
        )


def check_share(own: Composition) -> None:
    """Raise ValueError if decoding cannot return to a share of all tokens: no share, or units of several tokens."""
    if not isinstance(own.budget, float):
        raise ConfigError(
            "decode", "share", why=f"needs a share as budget, such as budget=0.5, got budget={own.budget}"
        )
    if isinstance(own.selection, Pages):
        raise ValueError(f"{own.name} keeps whole pages, which decode=share would cut: use decode=evict or decode=grow")


def check_schedule(own: Composition, scorer: Scorer) -> None:
    """Raise ValueError unless scorer and allocator have the required statistics when the schedule evicts."""
    name, schedule, allocator, pre_pass = own.name, own.schedule, own.allocator, own.pre_pass
    needs, measures = scorer.needs, isinstance(allocator, StatisticAllocator)
    all_layers_first = measures or isinstance(allocator, JointAllocator)
    whole, attends_first = isinstance(schedule, Prompt), schedule.order == "attend_then_evict"
    by_block = isinstance(pre_pass, BlockPasses)
    after_prefill = pre_pass is not None
    if (needs.whole_prompt or (after_prefill and not by_block)) and not whole:
        raise ValueError(f"{name} needs the whole prompt and does not support schedule=blocks: use schedule=prompt")
    if needs.question and schedule.late:
        raise ValueError(f"{name} evicts before the first token is decoded and does not support late=true")
    if after_prefill and (measures or not attends_first or schedule.late):
        raise ValueError(
            f"{name} scores a prompt after all layers have processed it, so it does not support "
            "order=evict_then_attend, late=true and allocators that read each layer's statistics"
        )
    if all_layers_first and not (whole and attends_first):
        raise ValueError(
            f"the allocator of {name} needs statistics of all layers: use schedule=prompt and order=attend_then_evict"
        )
    if all_layers_first and schedule.rerotate:
        raise ValueError(
            f"rerotate=true rotates keys as soon as a layer is evicted, but the allocator of {name} evicts no layer "
            "before all layers are measured: use an allocator without statistics, such as uniform or pyramid"
        )
    if all_layers_first and needs.kept:
        raise ValueError(
            f"{name} scores a layer by the tokens that earlier layers kept, but its allocator evicts no layer before "
            "all layers are scored: use an allocator without statistics, such as uniform or pyramid"
        )


def check_statistics(own: Composition, scorer: Scorer) -> None:
    """Raise ValueError unless the scorer keeps the running statistics that other parts read."""
    for what, part in (("allocator", own.allocator), ("merger", own.merger)):
        missing = [statistic for statistic in part.needs.statistics if statistic not in scorer.needs.statistics]
        if missing:
            raise ValueError(
                f"the {what} of {own.name} reads {' and '.join(missing)}, which its scorer "
                f"{type(scorer).__name__} does not keep: use another scorer, such as h2o"
            )


def check_merger(own: Composition, scorer: Scorer) -> None:
    """Raise ValueError unless the merger's queries are available and the store supports its biases."""
    name, merger, allocator, store = own.name, own.merger, own.allocator, own.store
    if merger.needs.window and isinstance(allocator, StatisticAllocator | JointAllocator):
        raise ValueError(
            f"the merger of {name} reads the prompt's newest queries, which are released before its allocator has "
            "measured all layers: use an allocator without statistics, such as uniform or pyramid"
        )
    if merger.needs.bias and not store.exact:
        raise ValueError(
            f"the merger of {name} gives slots a bias, which only the stores dense and ragged support: use one of them"
        )


def least_budget(scorer: Scorer, allocator: Allocator) -> int:
    """The smallest possible budget of a layer (slots per KV head)."""
    return max(sum(scorer.protects(1)), allocator.needs.window, 1)


def check_protected(name: str, scorer: Scorer, allocator: Allocator, budget: int) -> None:
    """Raise ValueError if a layer's budget is smaller than the number of tokens that are always kept."""
    first, newest, _ = scorer.protects(budget)
    whole_number(f"the first tokens that {name}'s scorer protects", first, 0)
    whole_number(f"the newest tokens that {name}'s scorer protects", newest, 0)
    least = max(least_budget(scorer, allocator), first + newest)
    if budget >= least:
        return
    parts = [counted(n, what) for n, what in ((first, "sink"), (newest, "newest token")) if n]
    always = f" ({' and '.join(parts)} are always kept)" if parts else ""
    raise ValueError(
        f"a budget of {counted(budget, 'token')} per KV head is too small for {name}: it must be at least "
        f"{least}{always}"
    )


def check_fair(own: Composition, scorer: Scorer) -> None:
    """Raise ValueError unless the parts of a prompt can keep their shares, and its queries are there to score them."""
    name, schedule = own.name, own.schedule
    if not isinstance(own.selection, Fair):
        return
    if isinstance(own.allocator, StatisticAllocator):
        raise ValueError(
            f"{name} keeps the same share of each part of a prompt in every layer, but its layers share the budget by "
            "a statistic: use an allocator without statistics, such as uniform or pyramid"
        )
    whole = isinstance(schedule, Prompt) and not schedule.late and own.pre_pass is None
    if own.selection.divides(scorer) and not whole:
        raise ValueError(
            f"{name} divides the window of queries among the parts of a prompt, which must be one block without a "
            "pre-pass: use schedule=prompt, late=false and a policy without lookahead, such as fair_snapkv"
        )


def check_single(own: Composition, scorer: Scorer) -> None:
    """Raise ValueError unless tokens that the schedule protects can always stay: whatever else is kept, one by one."""
    protection, shares = own.schedule.protection, isinstance(own.allocator, StatisticAllocator)
    if protection is None or not protection.single:
        return
    if shares or isinstance(own.selection, Pages) or scorer.needs.question:
        raise ValueError(
            f"protect={own.schedule.protect} keeps single tokens in every layer, which {own.name} does not support: "
            "its layers share the budget by a statistic, it keeps whole pages, or it keeps the question; use another "
            "policy, such as snapkv"
        )


def check_question_fits(name: str, question: int, budget: int) -> None:
    """Raise ValueError if the question, which some policies always keep, is longer than a layer's budget."""
    if question > budget:
        raise ValueError(
            f"{name} keeps the question, here {counted(question, 'token')}, but has "
            f"{counted(budget, 'token')} per KV head: use a larger "
            "budget"
        )


def check_reader(own: Composition) -> None:
    """Raise ValueError unless tokens are stored unchanged, as sparse attention requires, and evicted as it plans."""
    name, reader, scorer, schedule = own.name, own.reader, own.scorer, own.schedule
    if reader is None:
        return
    if type(own.store) is not Dense or own.granularity != "kv_head" or (scorer is not None and not reader.evicts):
        raise ValueError(
            f"{name} uses sparse attention and keeps every token: it must be combined with no scorer, the "
            "dense store and granularity=kv_head"
        )
    if reader.evicts and (scorer is None or schedule.decoding_evicts or schedule.late):
        raise ValueError(
            f"{name} evicts prompt tokens before sparse attention reads the rest: it must be combined with a scorer, "
            "decode=grow and late=false"
        )


def check_next_prompt(name: str, store: Store, allocator: Allocator) -> None:
    """Raise ValueError if a second prompt could not be evicted to the budget."""
    if not store.reopens:
        raise ValueError(
            f"{name} stores a prompt in a compressed form from which no token can be evicted, so "
            "the cache cannot return to its budget after another prompt: use a dense store, or a new cache for the "
            "whole conversation"
        )
    allocator.check_next_prompt(name)


def check_layers(layers: int, *parts: Store | PrePass | None) -> None:
    """Raise ValueError if a part names a layer that a model with `layers` layers does not have."""
    for part in parts:
        if part is not None:
            part.check_layers(layers)
