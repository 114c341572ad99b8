"""Cut passages of a book at equal distances, for perplexity tasks: python scripts/passages.py BOOK.txt FILE.jsonl."""

import json
import sys
from pathlib import Path

COUNT = 10
CHARACTERS = 9000

if __name__ == "__main__":
    book, file = map(Path, sys.argv[1:])
    text = book.read_text(encoding="utf-8")
    starts = [text.index("\n\n", (index + 1) * len(text) // (COUNT + 2)) + 2 for index in range(COUNT)]
    lines = [json.dumps({"text": text[start : start + CHARACTERS]}) for start in starts]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
