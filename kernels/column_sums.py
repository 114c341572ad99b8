"""Column sums of attention: how much each slot was attended to by all queries of a call (H2O's statistic).

Shapes: B batch, H_q query heads, H_kv KV heads, G = H_q / H_kv, M queries, T slots, D head dim.
"""

from torch import Tensor

from kvbench.kernels.attention_rows import attention_rows, widen

ROWS_AT_ONCE = 128  # queries whose rows exist at the same time: memory stays O(T), matmuls stay large


def column_sums_ref(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """The definition: all rows at once, then their sum. Arguments and result as in `column_sums`."""
    rows = attention_rows(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    return rows.sum(-2)


def column_sums(
    queries: Tensor,
    keys: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention each slot drew, summed over the queries: [B,H_kv,G,T] float32, in O(T) memory.

    queries [B,H_q,M,D], keys [B,H_kv,T,D], query_positions [B,M], key_positions [B,H_kv,T]; -1 = padding, empty slot.
    """
    batch, query_heads, new, _ = queries.shape
    heads, slots = keys.shape[1:3]
    if new <= ROWS_AT_ONCE:
        return column_sums_ref(queries, keys, query_positions, key_positions, scaling, softcap, sliding_window)
    total = widen(keys.new_empty(0)).new_zeros(batch, heads, query_heads // heads, slots)
    # Slots ascend in position while a prompt comes in, so a block of rows sees only a prefix of them.
    ascending = bool((key_positions[..., 1:] > key_positions[..., :-1]).all())
    for start in range(0, new, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        end = slots
        if ascending:
            end = int((key_positions <= query_positions[:, rows].max()).sum(-1).max())
        total[..., :end] += column_sums_ref(
            queries[:, :, rows],
            keys[:, :, :end],
            query_positions[:, rows],
            key_positions[..., :end],
            scaling,
            softcap,
            sliding_window,
        )
    return total
