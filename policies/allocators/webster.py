"""Webster's rule: whole slots in proportion to real preferences; shares never grow when layers are added.

L layers; a layer holding b slots has the quotient preference / (2b + 1).
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

LEAST = 1e-290  # smaller preferences count as 0: their quotients would lose digits, and with them the order


def webster(preference: Sequence[float], total: int, cap: int | Sequence[int]) -> list[int]:
    """Distribute `total` slots over the layers in proportion to their preference; the sum is exact.

    Each slot goes to the layer with the largest quotient among layers below their cap (ties: the lower layer), so an
    additional layer never raises the share of another. Layers of preference 0 evenly share the slots that exceed the
    caps of the others. preference: L finite numbers >= 0. cap: the most slots of a layer, one number or one per layer.
    Returns L slot counts; their sum is min(total, sum of the caps).
    Raises ValueError if total is negative or a preference is negative or not finite.
    Source: CAKE (arXiv 2503.12491), eq. 7; the rounding is ours, because truncation as in its code loses slots.
    """
    weights = [float(p) for p in preference]
    caps = [cap] * len(weights) if isinstance(cap, int) else list(cap)
    if total < 0:
        raise ValueError(f"total must be 0 or more slots, got {total}")
    for weight in weights:
        if not 0 <= weight < float("inf"):
            raise ValueError(f"preference must be finite numbers of 0 or more, got {weight}")
    budgets = [0] * len(weights)
    preferred = [layer for layer, weight in enumerate(weights) if weight >= LEAST]
    others = [layer for layer, weight in enumerate(weights) if weight < LEAST]
    left = total
    for layers in (preferred, others):
        # The other layers all have quotient 0, so the rule would give every slot to the lowest of them.
        alike = layers is others
        shares = _dealt([1.0 if alike else weights[i] for i in layers], left, [caps[i] for i in layers])
        for layer, share in zip(layers, shares, strict=True):
            budgets[layer] = share
        left -= sum(shares)
    return budgets


def _dealt(weights: list[float], total: int, caps: list[int]) -> list[int]:
    """The rule for positive weights: rounded real shares of a smaller total, then the last slots one at a time."""
    total = min(total, sum(caps))
    budgets = _certain(weights, total - 2 * len(weights), caps)
    queue = [(-weights[i] / (2 * b + 1), i) for i, b in enumerate(budgets) if b < caps[i]]
    heapify(queue)
    for _ in range(total - sum(budgets)):
        layer = queue[0][1]
        budgets[layer] += 1
        full = budgets[layer] == caps[layer]
        heapreplace(queue, (1.0 if full else -weights[layer] / (2 * budgets[layer] + 1), layer))
    return budgets


def _certain(weights: list[float], total: int, caps: list[int]) -> list[int]:
    """A lower bound of the slots per layer that the rule assigns out of at least `total` + 2L.

    With real shares s of `total` (none above its cap, the excess in proportion), the slots with a quotient of at least
    total / (2 * sum of s / weight) are rounded in, at most total + L/2 of them. They come first in the order
    of quotients, and the 1.5 L slots between are margin for the arithmetic of floats.
    """
    budgets, below = [0] * len(weights), set(range(len(weights)))
    while below and total > 0:
        top = max(weights[i] for i in below)  # relative weights: their sum neither overflows nor underflows
        per_weight = total / sum(weights[i] / top for i in below)
        shares = {i: weights[i] / top * per_weight for i in below}
        full = {i for i, share in shares.items() if share >= caps[i]}
        for i in full or below:
            budgets[i] = min(caps[i], int(shares[i] + 0.5))
        if not full:
            break
        total -= sum(caps[i] for i in full)
        below -= full
    return budgets
