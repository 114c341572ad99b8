"""Which layers evict as rows of one batch: those that are alike, by length, as many as a workspace holds."""

from collections.abc import Iterator, Sequence

from kvbench.cache.pending import Pending
from kvbench.policies.observation import Observation
from kvbench.policies.policy import Policy

WORKSPACE = {"cpu": 2**23}  # bytes of float32 rows and vectors that stand side by side at once: as a core's cache holds
LARGER = 2**26  # elsewhere, where launches cost more
FILLED = {"cpu": 2**14}  # scores that are filled up in less time than another round of launches takes
MORE = 2**20  # elsewhere
EVEN = 4  # layers of the same length that are enough to stand by themselves


def kind(due: Pending) -> tuple[object, ...]:
    """What layers have in common that can be rows of one batch."""
    seen, memory = due.step.observation, due.layer.memory
    heads = seen.queries.shape[1::2], seen.keys.shape[1::2], seen.values.shape[1::2]
    window = None if seen.recent_queries is None else seen.recent_queries.shape[2]
    arithmetic = seen.scaling, seen.softcap, seen.sliding_window, seen.sinks is None
    shared = id(seen.shared) if seen.shared else None
    traces = tuple((name, x.shape[1:]) for name, x in memory.items()) if memory else ()
    return due.group.rule, seen.phase, *heads, window, seen.keys.dtype, seen.keys.device, *arithmetic, traces, shared


def batches(due: Sequence[Pending]) -> Iterator[Sequence[Pending]]:
    """Layers of one length are a batch that needs no masks; those of rare lengths are filled up to a similar one.

    As many at a time as the workspace holds.
    """
    if len(due) == 1:
        yield due
        return
    lengths: dict[int, list[Pending]] = {}
    for pending in due:
        lengths.setdefault(pending.step.observation.positions.shape[2], []).append(pending)
    policy, seen = due[0].policy, due[0].step.observation
    device, heads = seen.keys.device.type, seen.positions[..., 0].numel()
    space = WORKSPACE.get(device, LARGER)
    even = [length for length, some in lengths.items() if len(some) >= EVEN]
    rare = {length: len(lengths[length]) for length in sorted(lengths.keys() - set(even), reverse=True)}
    spare = min(space // 4 // _slot_bytes(policy, seen, even=False), FILLED.get(device, MORE) // heads)
    for alike in (*([length] for length in even), *_similar(rare, spare)):
        some = [pending for length in alike for pending in lengths[length]]
        most = max(1, space // _slot_bytes(policy, seen, even=len(alike) == 1) // alike[0])
        yield from (some[begin : begin + most] for begin in range(0, len(some), most))


def _similar(layers: dict[int, int], spare: int) -> Iterator[list[int]]:
    """Falling lengths, and how many layers have them, cut where more than a quarter would be filled up.

    Not for less than `spare` slots: filling them up takes less time than another round of launches.
    """
    some: list[int] = []
    filled = 0
    for length, count in layers.items():
        filled += count * (some[0] - length) if some else 0
        if some and 4 * length < 3 * some[0] and filled > spare:
            yield some
            some, filled = [], 0
        some.append(length)
    if some:
        yield some


def _slot_bytes(policy: Policy, observation: Observation, even: bool) -> int:
    """Bytes for each slot of a layer: keys and values where they are read, and attention rows of the window.

    Layers of different lengths look through their windows one after the other.
    """
    batch, query_heads, _, dim = observation.queries.shape
    _, heads, _, value_dim = observation.values.shape
    window, merges = policy.needs.queries_decoding if even else 0, policy.merger.merges
    numbers = query_heads * max(1, window)
    numbers += heads * dim if window or merges else 0
    numbers += heads * value_dim if policy.value is not None or merges else 0
    return 4 * batch * numbers
