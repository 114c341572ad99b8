"""Names without a file: a wrapper before a policy, a store and its settings alone or behind it: `caote_cake_kivi_int4`.

What wraps are the files of conf/wrapper/. What stores are the policies that keep every token in a store of its own;
its class says which letters set which field (`Store.slug_letters`): `kivi_g32_r128`, `zipcache_k0.6_v0.6`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from kvbench.config.tree import find, names, part_class, read
from kvbench.policies.stores.dense import Dense
from kvbench.policies.stores.store import Store


@dataclass(frozen=True)
class StoreSlug:
    """What a slug says of a store: the eviction in front of it ("" = none), its preset, and the fields it sets."""

    eviction: str
    store: str
    fields: dict[str, Any]


def wrapped(slug: str, folders: Sequence[Path] = ()) -> tuple[str, str] | None:
    """(wrapper, what it is before) of `caote_snapkv`; None if no wrapper comes first."""
    return next(((w, slug.removeprefix(f"{w}_")) for w in names("wrapper", folders) if slug.startswith(f"{w}_")), None)


def parse(slug: str, folders: Sequence[Path] = ()) -> StoreSlug | None:
    """The store a slug names, None if it names none; ValueError for a setting that the store does not have."""
    words = slug.split("_")
    for first in range(len(words)):
        for last in range(len(words), first, -1):
            name = "_".join(words[first:last])
            store = _store(name, folders)
            if store is not None:
                fields = dict(_setting(slug, word, name, store) for word in words[last:])
                return StoreSlug("_".join(words[:first]), name, fields)
    return None


def _store(name: str, folders: Sequence[Path]) -> type[Store] | None:
    """The store of a preset that does nothing but store."""
    if find("policy", name, folders) is None:
        return None
    config = read("policy", name, folders)
    if config.get("scorer") or config.get("pre_pass") or not config.get("store"):
        return None
    store: type[Store] = part_class(config["store"])
    return None if store is Dense else store


def _setting(slug: str, word: str, name: str, store: type[Store]) -> tuple[str, Any]:
    """`g32` -> (group, 32); ValueError if no letters of the store begin the word, or what follows is no value."""
    hints = get_type_hints(store)
    for letters, field in store.slug_letters.items():
        value = _value(word.removeprefix(letters), hints[field]) if word.startswith(letters) else None
        if value is not None:
            return field, value
    allowed = ", ".join(f"{letters}... ({field})" for letters, field in store.slug_letters.items()) or "none"
    raise ValueError(f"policy {slug!r} has no setting {word!r} of {name} (allowed: {allowed})")


def _value(text: str, hint: Any) -> Any:  # noqa: ANN401 - a type and a value of it
    """What `text` says for a field: `32`, `0.6`, `0-1` or `none` for a sequence; None where it says nothing."""
    if get_origin(hint) is not None and issubclass(get_origin(hint), Sequence):
        if re.fullmatch(r"none|\d+(-\d+)*", text):
            return [int(number) for number in text.split("-") if number != "none"]
    elif hint is float:
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
    return int(text) if re.fullmatch(r"\d+", text) else None
