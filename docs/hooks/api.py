"""Docstrings as the API pages show them: equations set, stars that are products left alone."""

from __future__ import annotations

from typing import Any

from equations import blocks, typeset
from griffe import Extension, Object
from md import prose


class Docstrings(Extension):
    """Turns every docstring into Markdown before it is rendered."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ANN401 - what griffe hands on
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(_paragraph(*block) for block in blocks(obj.docstring.value))


def _paragraph(text: str, indented: bool) -> str:
    if not indented:
        return prose(text)
    try:
        return typeset(text)
    except ValueError:  # an example or a picture, not an equation
        return text
