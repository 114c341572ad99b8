"""What a part declares of itself: the cache computes and keeps what the parts of a policy need, and nothing else."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Needs:
    """What a part reads, and what is known of the scores of a scorer. The default: no attention, and nothing.

    What it reads:
    window: how many of the newest queries it looks through (its observation window).
    window_decoding: how many of these it looks through while decoding, beside the newest; None: all.
    statistics: running statistics, which a scorer keeps per slot (`observe`) and an allocator or a merger reads.
    sums: what a scorer reads of the attention of all of a prompt's queries.
    newest_row: a scorer reads the attention of the newest query while decoding.
    model: it asks the layer of the model for its rotation or its output projection (`Observation.model`).
    memory: a scorer remembers something per sequence and layer, not per slot (`Observation.memory`).
    question: it asks where the question of a prompt begins (`Observation.questions`); the window then holds it.
    layer: it reads which layer it is, so that layers cannot be scored side by side.
    kept: a scorer reads which tokens earlier layers kept (`selected`).
    query_heads: running statistics are kept per query head, not averaged over the group.
    bias: a merger gives the slots that it writes a bias, which attention adds to their logits.

    What is known of the scores:
    whole_prompt: they have a meaning at the end of the prompt only, so that blocks are refused.
    by_position: they are the place in the text, nothing a value-aware wrapper could weigh.
    never_negative: none is below 0.
    ties: equal tokens score the same but for rounding: scores are then rounded to half the bits, so that they tie.
    kv_heads_only: an `AttentionScorer` cannot tell the query heads of a group apart after all.
    """

    window: int = 0
    window_decoding: int | None = None
    statistics: tuple[str, ...] = ()
    sums: Literal["column_sums", "moments"] | None = None
    newest_row: bool = False
    model: bool = False
    memory: bool = False
    question: bool = False
    layer: bool = False
    kept: bool = False
    query_heads: bool = False
    bias: bool = False
    whole_prompt: bool = False
    by_position: bool = False
    never_negative: bool = False
    ties: bool = False
    kv_heads_only: bool = False

    @property
    def queries_decoding(self) -> int:
        """How many of the newest queries are held once the prompt is in."""
        return self.window if self.window_decoding is None else self.window_decoding


class Protected(NamedTuple):
    """How many tokens per KV head are always kept, inside the budget: of the first positions and of the newest."""

    first: int = 0
    newest: int = 0
