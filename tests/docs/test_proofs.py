"""Numbers and refusals in the text of pages are proved by a file that the paragraph names, or by proofs.yaml."""

import re
from collections.abc import Mapping
from functools import cache

import yaml
from documents import CODE, PAGES, ROOT, files, prose, read

LONG_SETS = ("infinitebench", "longbench_v2", "loogle", "zero_scrolls", "scbench")
OWN_RULES = {"results.md", "speed.md", "families.md"}
"""Pages whose numbers other tests look up in CSV files, or that a script writes."""
TOLD = [page for page in PAGES if page.name not in OWN_RULES]
TOLD = [page for page in TOLD if "results" not in page.parts or not any(page.parent.rglob("*.csv"))]
PROOFS: Mapping[str, Mapping[str, str]] = yaml.safe_load(read("tests/docs/proofs.yaml"))
"""page: quotation: the file, or file::test, that has its numbers, or in which is refused what it says."""
NAMES = re.compile(
    r"\]\([^)]*\)|<[^>]*>|95%|\b100\b|\(?(arXiv )?\d{4}\.\d{5}\)?|\bet al\. \d+"
    r"|\b[A-Z][\w.]*[A-Za-z][ -]\d+(\.\d+)*( [HB])?\b|\b(torch|sm_|capability) ?[\d.]+"
)
"""Links, confidence, the whole, papers, and names with a version or a size."""
NUMBER = re.compile(r"(?<![\w.,#/^-])\d[\d,]*(?:\.\d+)*(?![\w/])")
WORDS = (
    "five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)
WORD = re.compile(rf"\b({WORDS.replace(' ', '|')})\b", re.IGNORECASE)
REFUSAL = re.compile(r"(?<!others )(?<!if it )(are|is|and) refused|\b(refuses?\b|raises|warning|exit status)")


@cache
def paragraphs() -> list[tuple[str, str]]:
    """(page, text) of paragraphs, list items and rows, each in one line, without code; the README's table aside."""
    found = []
    for page in TOLD:
        comments = re.findall(r"^(?:    )?(?:kvbench|make|python) .* # (.*)$", read(page), re.MULTILINE)
        text = re.sub(r"^(    |::: |#|\| [\w,()= ]+ \| (\d+|-) \|).*?$", "", prose(page), flags=re.MULTILINE)
        for block in (*re.split(r"\n\s*\n|\n(?=[|-] ?|\d+\. )", text), *comments):
            found.append((str(page.relative_to(ROOT)), re.sub(r"^\d\. ", "", " ".join(block.split()))))
    return found


def digits(text: str) -> str:
    """A text with its numbers from five to twenty in digits."""
    return WORD.sub(lambda word: str(WORDS.split().index(word[0].lower()) + 5), text)


def numbers(text: str) -> list[str]:
    """The numbers of a text above 4 or with decimals; those of a code beside them are its own."""
    codes = " ".join(CODE.findall(text))
    found = [one.rstrip(",") for one in NUMBER.findall(digits(NAMES.sub(" ", CODE.sub(" ", text))))]
    return [one for one in found if ("." in one or int(one.replace(",", "")) > 4) and not has(codes, one)]


@cache
def every_test() -> dict[str, str]:
    """The text of every test, with its decorators, by its name."""
    files = [
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "docs"
    ]
    blocks = [block for file in files for block in file.split("\n\n\n")]
    return {name: block for block in blocks for name in re.findall(r"^def (test_\w+)", block, re.MULTILINE)}


def source(name: str) -> str:
    """The text of a file or a test."""
    return every_test()[name] if name.startswith("test_") else read(name)


def has(text: str, number: str) -> bool:
    """Whether a text has a number, in one of its forms: 1,319 or 1319 or 1_319; 12% or 0.12; 8,192 or 2**13."""
    value = number.replace(",", "")
    forms = {value} | ({f"{float(value) / 100:g}"} if value.count(".") < 2 and float(value) <= 100 else set())
    forms |= {f"2**{int(value).bit_length() - 1}"} if value.isdigit() and int(value).bit_count() == 1 else set()
    text = digits(text) + re.sub(r"(?<=\d)[_,](?=\d{3}(?!\d))", "", text)
    return any(re.search(rf"(?<![\d.]){re.escape(form)}(?!\d|\.\d)", text) for form in forms)


def named(block: str) -> str:
    """The texts of the files and the configurations of the tasks that a paragraph names."""
    found = re.findall(r"`((?:tests|results|scripts|kernels)/[\w./-]+\.\w+)`", block)
    for task in re.findall(r"`([a-z]\w+(?:/\w+)?)`", block):
        found += [f"conf/task/{task}.yaml", *["tasks/data/long_sets.json"] * (task.startswith(LONG_SETS))]
    return "".join(source(file) for file in found if (ROOT / file).exists())


def test_every_number_is_in_a_file_that_its_paragraph_or_its_proof_names() -> None:
    wrong = []
    for name, block in paragraphs():
        rest = block
        for quote in PROOFS.get(name, {}):
            rest = rest.replace(quote, " ")
        wrong += [(name, one, rest) for one in numbers(rest) if not has(named(block), one)]
    assert wrong == []


def test_every_sentence_about_a_refusal_is_proved_by_a_test() -> None:
    wrong = []
    for name, block in paragraphs():
        for sentence in re.split(r"(?<=[.;:]) ", block):
            proofs = [
                proof for quote, proof in PROOFS.get(name, {}).items() if quote in sentence and proof[:5] == "test_"
            ]
            wrong += [(name, sentence)] if REFUSAL.search(CODE.sub("", sentence)) and not any(proofs) else []
    assert wrong == []


def test_every_proof_has_the_numbers_and_the_refusal_of_its_quotation() -> None:
    """A test of tests/docs reads the page, so that its name is enough."""
    own = "".join(map(read, files("tests/docs")))
    wrong = []
    for name, proofs in PROOFS.items():
        text = " ".join(read(name).split())
        for quote, proof in proofs.items():
            proved = f"def {proof}(" in own or all(has(source(proof), one) for one in numbers(quote))
            if REFUSAL.search(CODE.sub("", quote)):
                proved = proved and re.search(r"raises|warn|match=|refused|\.err\b|caplog", source(proof)) is not None
            wrong += [] if proved and quote in text else [(name, quote)]
    assert wrong == []
