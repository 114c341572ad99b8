"""What a part asks of its own fields: else a ValueError, one sentence with the field, what it may be and its value."""

from math import inf


def choice(name: str, value: object, *allowed: object) -> None:
    """ValueError unless a field is one of the values it may be."""
    if value not in allowed:
        words = " or ".join(", ".join(map(str, allowed)).rsplit(", ", 1))
        raise ValueError(f"{name} must be {words}, got {value!r}")


def whole_number(name: str, value: object, least: int) -> None:
    """ValueError unless a field is a whole number of at least `least`; true is no number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def number(name: str, value: object, low: float, high: float = inf, *, below: float = inf) -> None:
    """ValueError unless a field is a finite number of at least `low`, at most `high` and below `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and value < below):
        span = f"from {low:g} to {high:g}" if high < inf else f"of at least {low:g}"
        span += f" and below {below:g}" if below < inf else ""
        raise ValueError(f"{name} must be a number {span}, got {value!r}")
