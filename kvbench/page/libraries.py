"""The JavaScript that the page embeds: plotly.js out of plotly's package, DataTables out of that of itables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources


@dataclass(frozen=True)
class Libraries:
    """Sources, safe inside `<script>` and `<style>`; datatables is an ES module. versions: by the library's name."""

    plotly: str
    datatables: str
    datatables_css: str
    versions: dict[str, str]


@cache
def libraries() -> Libraries:
    """The sources as the installed packages have them."""
    bundle = resources.files("itables") / "html"
    versions = {
        "plotly.js": f"plotly {metadata.version('plotly')}",
        "DataTables": f"itables {metadata.version('itables')}",
    }
    return Libraries(
        plotly=_safe((resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")),
        datatables=_safe((bundle / "dt_bundle.js").read_text(encoding="utf-8")),
        datatables_css=(bundle / "dt_bundle.css").read_text(encoding="utf-8"),
        versions=versions,
    )


def _safe(source: str) -> str:
    """Source that ends its `<script>` nowhere: an HTML comment in it would let a later `<script` swallow the end."""
    assert "</script" not in source, "a library would end its own script element"
    return source.replace("<!--", "<\\!--")
