"""Docstrings as Markdown, with equations such as `c_j = alpha_j / (1 - alpha_j) * ||X - v_j||` for MathJax (AsciiMath).

Equations are marked for `pymdownx.arithmatex`. MathJax comes from the package `django-static-mathjax` and is copied
into the site.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from griffe import Extension, Object

GREEK = "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi psi omega"
KNOWN = {*f"{GREEK} {GREEK.title()} sum max min log sqrt floor ceil norm hat bar in and oo uu larr exp ln".split()}
SPELLED = {"inf": "oo", "union": "uu", "minus": "setminus", "notin": "!in"}
"""Words of docstrings that AsciiMath spells differently."""
MATHJAX = ("startup.js", "core.js", "input/asciimath.js", "output/chtml.js", "output/chtml/fonts/tex.js")


class Docstrings(Extension):
    """Converts every docstring to Markdown before mkdocstrings renders it."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ANN401 - of griffe
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = docstring(obj.docstring.value)


def asciimath(line: str) -> str:
    """A line of a docstring in AsciiMath: names of several letters, such as `kernel`, become upright text."""

    def word(match: re.Match[str]) -> str:
        name = match.group()
        return SPELLED.get(name, name if name in KNOWN else f'"{name}"')

    line = re.sub(r"\|\|(.+?)\|\|", r"norm(\1)", line.strip()).replace("<-", "larr").replace("~", "~~")
    parts = re.split(r'("[^"]*")', line)
    return "".join(part if part.startswith('"') else re.sub(r"[A-Za-z]{2,}", word, part) for part in parts)


def equations(text: str) -> str:
    """One equation per line, marked for MathJax."""
    return "\n\n".join(f"\\[\n{asciimath(line)}\n\\]" for line in text.splitlines() if line.strip())


def paragraph(text: str) -> str:
    """A paragraph of a docstring as Markdown; an indented paragraph has one equation per line, unless it is code."""
    joined = re.sub(r"\n {5,}", " ", text)
    lines = joined.splitlines()
    code = any(line.lstrip().startswith(("python", "from ")) for line in lines)
    if all(line.startswith("    ") for line in lines) and not code:
        return equations(joined)
    text = re.sub(
        r"^(?!- |  )(.+)\n(?=- )", r"\1\n\n", text, flags=re.MULTILINE
    )  # a list needs an empty line before it
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("*", "\\*").replace("_", "\\_") for part in parts)


def docstring(text: str) -> str:
    """A whole docstring as Markdown."""
    text = re.sub(r"\n[ \t]*(?=Source: |Raises )", "\n\n", text.strip("\n"))
    return "\n\n".join(paragraph(one) for one in re.split(r"\n[ \t]*\n", text))


def mathjax_files() -> dict[str, Path]:
    """The files of MathJax that a page loads, by their path in the site."""
    spec = find_spec("mathjax")
    assert spec is not None, "django-static-mathjax is installed with the documentation's packages"
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations))) / "static" / "mathjax" / "es5"
    fonts = sorted((root / "output/chtml/fonts/woff-v2").glob("*.woff"))
    paths = [*(root / name for name in MATHJAX), *fonts]
    return {f"mathjax/{path.relative_to(root).as_posix()}": path for path in paths}
