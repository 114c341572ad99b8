"""Fair eviction: the parts of a prompt that a task names keep the same share of their tokens.

Shapes: B batch, H_q query heads, H KV heads, G query heads per KV head, M queries, w queries of a window, T slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.errors import ConfigError
from kvbench.kernels.references import attention_rows
from kvbench.policies.observation import Observation, QueryWindow, SlotInfo, State
from kvbench.policies.ranking import Ranking
from kvbench.policies.scorers.scorer import Scorer
from kvbench.policies.selections.selection import Selection
from kvbench.policies.selections.shares import ranks_within

NEEDS_PARTS = (
    "divides the budget among the parts of a prompt, of which the task names fewer than two: use task=instructions "
    "with a document (task.lengths) or a defense (task.defense)"
)


@dataclass(frozen=True)
class Fair(Selection):
    """Tokens compete only within their part of the prompt, so that no part is evicted more than another.

        n_1 = floor(n T_1 / T), n_2 = n - n_1
        w_1 = min(floor(w / 2), T_1), w_2 = min(w - w_1, T_2)

    n tokens of two adjacent parts of T_1 and T_2 tokens are kept. Parts reach from their first token to the next part,
    the first one from the prompt's start and the last one to the newest token. A scorer with an observation window of w
    queries scores a prompt part by part: the last w_1 queries of the first part score its tokens, and the last w_2 of
    the second part those of the second; p parts divide the window by p. Scores that need statistics or the tokens that
    earlier layers kept (K-VEC), and decoded tokens, use one window. Protected tokens rank highest in their part; they
    never exceed its share.

    starts: positions of the first tokens of the parts, which the task names for each example (task=instructions).
    Source: arXiv 2510.00231, fair eviction, and the presses of its code.
    """

    starts: tuple[int, ...] = field(default=(), metadata={"decides": False})

    def rank(self, ranking: Ranking) -> Ranking:
        starts = torch.tensor([0, *self._checked[1:]], device=ranking.positions.device)
        parts = torch.searchsorted(starts[1:], ranking.positions.long().contiguous(), right=True)
        ends = torch.cat([starts[1:].expand(len(ranking.seen), -1), ranking.seen[:, None]], dim=1)  # [B,parts]
        sizes = torch.minimum(ends, ranking.seen[:, None]) - starts  # of the text, evicted tokens included
        size = sizes.double()[:, None].expand(-1, parts.shape[1], -1).gather(-1, parts)
        rank, _ = ranks_within(ranking, parts)
        # The first part is rounded down. At a tie between parts its token, which has the lower position, comes first.
        shares = -(rank - (parts > 0).double()) / size
        stays = torch.zeros_like(ranking.protected) if ranking.spared is None else ranking.spared
        return replace(ranking, scores=shares, tie_break=None, protected=stays)

    @property
    def _checked(self) -> tuple[int, ...]:
        if len(self.starts) < 2:
            raise ConfigError("selection", "Fair", why=NEEDS_PARTS)
        return self.starts

    def divides(self, scorer: Scorer) -> bool:
        """Whether the scorer's window is divided among the parts of a prompt."""
        needs = scorer.needs
        return bool(needs.window) and not (needs.statistics or needs.kept or needs.question)

    def rank_parts(
        self, observation: Observation, state: State, rank: Callable[[Scorer, Observation, State], Ranking], of: Scorer
    ) -> Ranking:
        """The ranking of a whole prompt whose parts are ranked one by one, each by the end of its own queries.

        rank: ranks an observation with a scorer. of: the policy's scorer, whose window is divided. Raises ValueError if
        the queries of the parts were processed in an earlier call.
        """
        tokens = observation.positions.shape[-1]
        if observation.queries.shape[2] != tokens or not (observation.slots.whole and observation.slots.ascending):
            raise ValueError("fair_ divides the window of a whole prompt in one call: use schedule=prompt")
        begins = [0, *self._checked[1:]]
        ends = [*begins[1:], tokens]
        found = []
        for begin, end, window in zip(begins, ends, self._windows(of.needs.window, begins, ends), strict=True):
            scorer: Any = of
            scorer = replace(scorer, window=window) if hasattr(scorer, "window") else scorer
            own = {name: x[:, :, begin:end] for name, x in state.items()}
            found.append(rank(scorer, _Part.of(observation, begin, end, window), own))
        ties = [part.tie_break for part in found if part.tie_break is not None]
        spared = [part.spared for part in found if part.spared is not None]
        return Ranking(
            scores=torch.cat([part.scores for part in found], -1),
            tie_break=torch.cat(ties, -1) if ties else None,
            positions=observation.positions,
            protected=torch.cat([part.protected for part in found], -1),
            seen=observation.seen,
            spared=torch.cat(spared, -1) if spared else None,
            packed=observation.slots.packed,
            ascending=observation.slots.ascending,
        )

    @staticmethod
    def _windows(window: int, begins: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Queries of each part, at least one: the window divided by the number of parts, the rest for the last."""
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        own = [max(1, min(window // len(sizes), size)) for size in sizes[:-1]]
        return [*own, max(1, min(window - sum(own), sizes[-1]))]


class _Part(Observation):
    """A part of a whole prompt, as if the prompt ended with it; attention includes the tokens before the part."""

    before: Tensor  # attention [B,H,G,w,n] of the part's last w queries to its n tokens

    @classmethod
    def of(cls, whole: Observation, begin: int, end: int, window: int) -> Self:
        """The part [begin, end) of a prompt, whose last `window` queries observe it."""
        some, tokens = slice(begin, end), whole.positions.shape[-1]
        given: dict[str, Any] = {x.name: getattr(whole, x.name) for x in fields(Observation)}
        given |= {name: given[name][:, :, some] for name in ("queries", "keys", "values", "positions")}
        given["query_positions"] = whole.query_positions[:, some]
        budgets = tuple(n * end // tokens - n * begin // tokens for n in whole.sequences.budgets)
        given["sequences"] = whole.sequences._replace(budgets=budgets, last=end - 1, prompts=(end,))
        given["seen"] = torch.full_like(whole.seen, end)
        queries, places = given["queries"][:, :, -window:], given["query_positions"][:, -window:]
        given["window"] = QueryWindow(queries, places, see_own=True)
        bias = whole.slots.bias
        given["slots"] = SlotInfo(
            whole=False, packed=whole.slots.packed, bias=None if bias is None else bias[:, :, some]
        )
        part = cls(**given | {"known": {}, "evictable": None})
        params = whole.params
        part.before = attention_rows(
            queries, whole.keys[:, :, :end], places, whole.positions[:, :, :end], *params[:3],
            sinks=params.sinks, bias=None if bias is None else bias[:, :, :end],
        )[..., begin:]  # fmt: skip
        return part

    def _reduces(self, window: int) -> bool:
        return False

    def _rows_and_sight(self, window: int) -> tuple[Tensor, Tensor | None]:
        return self.before, None
