"""Tables as commands print them: a title, column names, a rule, rows in groups, and sentences."""

import re


def shown_rows(text: str) -> list[list[str]]:
    """The cells of every row of every table in a text; the footer begins with a word and a colon."""
    bodies = [re.split(r"\n\n(?=[\w ]+:)", part)[0] for part in re.split(r"^-+\n", text, flags=re.MULTILINE)[1:]]
    return [re.split(r" {2,}", line.strip()) for body in bodies for line in body.splitlines() if line.strip()]
