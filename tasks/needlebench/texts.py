"""NeedleBench's own wording, as data: `tasks/data/needlebench_templates.json` names source and licence."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def texts(v2: bool, language: str) -> dict[str, Any]:
    """Prompt templates by sub-task (slots context, question; v2's reasoning also last_person), and more.

    v1: guide, the sentence before the format request. v2: ancestor_question, relations and relatives, from which family
    chains are told.
    """
    data: dict[str, dict[str, dict[str, Any]]] = json.loads(
        files("kvbench.tasks").joinpath("data/needlebench_templates.json").read_text(encoding="utf-8")
    )
    return data["v2" if v2 else "v1"][language]
