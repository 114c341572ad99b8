"""Docstrings as mkdocstrings shows them: equations marked for MathJax, stars and underscores as they are."""

from __future__ import annotations

from typing import Any

from equations import docstring
from griffe import Extension, Object


class Docstrings(Extension):
    """Turns every docstring into Markdown before it is rendered."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ANN401 - what griffe hands on
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = docstring(obj.docstring.value)
