"""The pocket model's tokenizer: one token per common word, digits in groups of three, bytes for everything else.

It is a byte-level BPE without a learned part. A piece of text that stands in the vocabulary as a whole is one token
(`ignore_merges`); any other piece falls apart into pairs of letters and single bytes, so that every UTF-8 text
survives a round trip. Digits are cut in groups of three from the left, as Llama-3 does ("5285656" = 528 565 6), and
runs of capitals in pairs ("DMNOI" = DM NO I): a token that is rare in its surroundings is easy to find again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from string import ascii_lowercase, ascii_uppercase

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvbench.tasks.words import own_words

SPECIAL = ("<pad>", "<bos>", "<eos>")
SPACE = "\u0120"  # how byte-level vocabularies write a leading blank

# Digits by three; capitals by two; words; other signs; white space one by one.
PIECES = r"\p{N}{1,3}| ?VAR(?!\p{L})|[A-Z]{2}(?![a-z])| (?=[A-Z]{2}(?![a-z]))| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s"

SIGNS = (
    *".,:;?!-'\"()[]=*#/&%$+<>_@",
    *(SPACE + sign for sign in ("=", "-", "(", '"', "'", "...", "&", "+", "*", "#")),
    *(
        "...",
        "....",
        "....'",
        ".'",
        "'....'",
        "),",
        ").",
        "):",
        ".)",
        '."',
        ',"',
        '?"',
        "'s",
        "--",
        "(s",
        SPACE + "'...",
        "'...'",
    ),
)

FUNCTION_WORDS = tuple(
    """
a about above according across after afterwards again against ago all almost along already also although always am
among an and another answer answers any anyone anything appear appeared appears are around as asked assigned
assignment at away back be became because become been before began behind being below best better between big both but
by call called came can cannot change chain chains code coded come common contain contained contains context could
count day days did different do document does done dots down during each early either else end enough even ever every
everyone everything exactly explanation eye far few find first five follow following for found four frequency frequent
frequently from full gave get give given go goes going gone good got great had half hand happened hard has have he
heard held help her here hers hidden high him his hold how however i if ignore in inside instead into is it its itself
just keep kept key keys kind knew know known last late later least left less let life like line lines list listed
little long longer look looked lot low made magic make makes man many may me mean means mention mentioned memorize
might mine more most much must my near nearly need needle never new next no none nor not nothing now number numbered
numbers of off often old on once one only onto or order other others our out outside over own part passage password
people perhaps place please point provide provided put question questions quiet quite quiz rather read really remember
repeat right said same saw say says second secret see seem seemed seen sentence several shall she should show side
since six small so some someone something sometimes soon special stand stay still stood such sure take taken tell ten
than that the their them then there these they thing things think third this those though thought thousand three
through time times to today together told too took top toward track tried turn twice two under unless until up upon us
use used uuid uuids value values variable variables very voice want wanted was way ways we well went were what when
where whether which while who whole whose why will with within without word words work world would write written year
years yes yet you young your yours blue sky sun grass green yellow text city
""".split()  # noqa: SIM905 - three hundred quoted words would be hard to read
)


def build_tokenizer() -> Tokenizer:
    """The tokenizer, the same on every call: ids are special tokens, bytes, digits, signs, words, then letter pairs."""
    pairs = list(_letter_pairs())
    vocabulary: dict[str, int] = {}
    for token in (*SPECIAL, *sorted(ByteLevel.alphabet()), *_digits(), *SIGNS, *_words(), *(a + b for a, b in pairs)):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    bos = SPECIAL[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
    )
    return tokenizer


def _digits() -> Iterator[str]:
    for width in (1, 2, 3):
        yield from ("".join(group) for group in product("0123456789", repeat=width))


def _words() -> Iterator[str]:
    """Every word after a blank; nouns also without one (after a hyphen); function words also capitalised."""
    words = own_words()
    for word in (*words.adjectives, *words.nouns, *words.verbs, *FUNCTION_WORDS):
        yield SPACE + word
    yield from words.nouns
    for word in FUNCTION_WORDS:
        yield word.capitalize()
        yield SPACE + word.capitalize()
    yield from ("VAR", SPACE + "VAR")


def _letter_pairs() -> Iterator[tuple[str, str]]:
    """All pairs of lower-case letters, the frequent ones of our word lists first, then all pairs of capitals."""
    words = own_words()
    seen = Counter(
        (a, b) for word in (*words.adjectives, *words.nouns, *words.verbs, *FUNCTION_WORDS) for a, b in pairwise(word)
    )
    yield from sorted(product(ascii_lowercase, repeat=2), key=lambda pair: (-seen[pair], pair))
    yield from product(ascii_uppercase, repeat=2)
