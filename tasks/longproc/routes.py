"""Generates the routes of path traversal: invented cities with one outgoing connection each, and one route."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvbench.tasks.words import own_words

TRANSITS = ("bus", "train", "plane", "ferry")
ENDINGS = ("ton", "ville", "burg", "port", "field", "haven")
Edge = tuple[str, str, str]
"""From a city, to a city, by bus, train, plane or ferry."""


def draw(rng: random.Random, steps: int, cities: int) -> tuple[list[Edge], list[Edge]]:
    """Every connection in random order, and those of the route: the first `steps` cities lead to the last one.

    The other cities lead anywhere, to themselves too, so that the route is the only one from its start.
    """
    names = [f"{noun.capitalize()}{end}" for noun in own_words().nouns for end in ENDINGS]
    places = rng.sample(names, cities)
    route = [(places[i], places[i + 1], rng.choice(TRANSITS)) for i in range(steps)]
    others = [(place, rng.choice(places), rng.choice(TRANSITS)) for place in places[steps:]]
    edges = [*route, *others]
    rng.shuffle(edges)
    return edges, route


def described(edges: Sequence[Edge]) -> str:
    """The connections as the prompt has them."""
    head = (
        "In a hypothetical world, there are a number of cities. Each city has a one-way connection to only one other "
        "city via a specific transit method. The details of the cities are as follows:\n"
    )
    lines = (f"{a} is a lively city. You can travel from {a} to {b} by {by}." for a, b, by in edges)
    return head + "\n".join(lines)


def written(route: Sequence[Edge]) -> str:
    """The route as an answer has it."""
    return "\n".join(f"From {a}, take a {by} to {b}." for a, b, by in route)
