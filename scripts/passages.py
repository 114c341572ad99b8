"""Cut passages of a book at equal distances, for perplexity tasks: python scripts/passages.py BOOK.txt FILE.jsonl."""

import json
import sys
from pathlib import Path

COUNT = 10
CHARACTERS = 9000


def passages(text: str) -> list[str]:
    """Ten passages of a book, each from the beginning of a paragraph."""
    starts = [text.index("\n\n", (index + 1) * len(text) // (COUNT + 2)) + 2 for index in range(COUNT)]
    return [text[start : start + CHARACTERS] for start in starts]


if __name__ == "__main__":
    book, file = map(Path, sys.argv[1:])
    lines = [json.dumps({"text": passage}) for passage in passages(book.read_text(encoding="utf-8"))]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
