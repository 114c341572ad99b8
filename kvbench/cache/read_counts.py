"""What the newest decoded token of a sequence read, where its policy reads less than it holds.

Shapes: L layers, H_kv KV heads.
"""

from torch import Tensor

from kvbench.cache.group import PolicyGroup

POSITION = 4  # bytes: a slot's, which every cache here reads with its key


def tokens_read(group: PolicyGroup) -> list[list[int]] | None:
    """Tokens that the query of the first sequence's newest token read, [L][H_kv]; None where none was decoded."""
    read = _read(group)
    return None if read is None else [x.tolist() for x in read]


def nbytes_read(group: PolicyGroup) -> int | None:
    """Bytes of their keys, values and positions, and of the summaries or keys they were chosen by, in all layers."""
    read = _read(group)
    if read is None:
        return None
    total = 0
    for layer, tokens in zip(group.layers, read, strict=True):
        assert layer.pages is not None
        key, value = (x.shape[-1] * x.element_size() for x in (layer.store.keys, layer.store.values))
        total += int(tokens.sum()) * (key + value + POSITION) + layer.pages.nbytes_read // group.size
        if group.policy.reader is not None and group.policy.reader.reads_keys:
            total += int((layer.counts[0] - tokens).sum()) * (key + POSITION)
    return total


def _read(group: PolicyGroup) -> list[Tensor] | None:
    """[H_kv] of each layer."""
    pages = [layer.pages for layer in group.layers]
    found = [None if x is None or x.read is None else x.read[0] for x in pages]
    return None if any(x is None for x in found) else [x for x in found if x is not None]
