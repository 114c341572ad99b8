"""Requirements of parts. The cache computes and stores only what the parts of a policy require."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Needs:
    """Inputs of a part and properties of a scorer's scores. By default, a part needs no attention and no statistics.

    Inputs:
    window: length of the observation window, in newest queries.
    window_decoding: number of window queries used while decoding, in addition to the newest; None: all.
    statistics: running statistics that a scorer updates per slot (`observe`) and an allocator or a merger reads.
    sums: sums over the attention of all queries of a prompt that a scorer reads.
    keys: a scorer reads the keys or values of each head; if all heads share one latent, the mean of their scores is
    used.
    newest_row: a scorer reads the attention of the newest query while decoding.
    model: the part uses the layer's rotation or its output projection (`Observation.model`).
    memory: a scorer stores data per sequence and layer instead of per slot (`Observation.memory`).
    evictable: a scorer uses which tokens may be evicted (`Observation.evictable`).
    question: the part uses the start of the prompt's question (`Observation.sequences.questions`); the window
    contains the question.
    reads: numbers of each sequence that the part uses: names of fields of `Observation.sequences`, such as `begins`.
    layer: the part uses the layer index, so layers cannot be scored together.
    kept: a scorer uses the tokens that earlier layers kept (`selected`).
    query_heads: running statistics are kept per query head, not averaged over the group.
    hidden: a scorer reads the input of the layer's attention (`Observation.shared["hidden"]`, [B,M,hidden]).
    bias: a merger gives the slots that it writes a bias, which attention adds to their logits.

    Properties of the scores:
    whole_prompt: scores are defined only at the end of the prompt, so block schedules are rejected.
    unweighable: why value-aware wrappers are rejected; "" if they are not.
    never_negative: no score is below 0.
    ties: equal tokens have equal scores up to rounding; scores are then rounded to half the bits, so that they tie.
    fixed_scores: the score of a token never changes, so that a threshold may decide (`Threshold`).
    lookahead: no query of the prompt scores, only those of the pre-pass `Lookahead`.
    kv_heads_only: an `AttentionScorer` has no separate scores for the query heads of a group.
    """

    window: int = 0
    window_decoding: int | None = None
    statistics: tuple[str, ...] = ()
    sums: Literal["column_sums", "moments"] | None = None
    keys: bool = False
    newest_row: bool = False
    model: bool = False
    memory: bool = False
    evictable: bool = False
    question: bool = False
    reads: tuple[str, ...] = ()
    layer: bool = False
    kept: bool = False
    query_heads: bool = False
    hidden: bool = False
    bias: bool = False
    whole_prompt: bool = False
    unweighable: str = ""
    never_negative: bool = False
    ties: bool = False
    fixed_scores: bool = False
    lookahead: bool = False
    kv_heads_only: bool = False


class Protected(NamedTuple):
    """Numbers of first and of newest tokens per KV head that are always kept. They count in the budget.

    others: number of tokens beside them for which the smallest budget must have room.
    """

    first: int = 0
    newest: int = 0
    others: int = 0
