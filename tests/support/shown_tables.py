"""Tables as commands print them: a heading, column names, a rule, rows up to an empty line, in blocks with a title."""

import re


def shown_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table in a text, without the titles of blocks."""
    bodies = [part.split("\n\n")[0] for part in re.split(r"^-+\n", text, flags=re.MULTILINE)[1:]]
    return [re.split(r" {2,}", line.strip()) for body in bodies for line in body.splitlines() if line[-1:] != ":"]
