"""Names and sentences that a stranger understands."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("common/", "services/", "deploy/")
# Words of this project alone, and what the field calls them in most places.
PRIVATE = {
    **dict.fromkeys(("tell", "tells", "telling", "told"), "report, notify, answer"),
    **dict.fromkeys(("hear", "hears", "hearing", "heard"), "receive, last_seen"),
    **dict.fromkeys(("wish", "wishes"), "request, desired, selector"),
    **dict.fromkeys(("parted", "parting"), "diverged, handover"),
    **dict.fromkeys(("strike", "strikes"), "failures"),
    **dict.fromkeys(("desk", "desks"), "loop, harness"),
    **dict.fromkeys(("glance", "glances"), "status"),
    **dict.fromkeys(("seat", "seats", "seated", "seating"), "slot"),
    **dict.fromkeys(("trouble", "troubles"), "error, problem"),
    **dict.fromkeys(("letter", "letters"), "dead_letter, dead_letters"),
    "calm": "idle",
    "lone": "single_worker",
}
# Names of others' libraries.
FOREIGN = {"ascii_letters": "string", "tell": "a file's position"}
FOREIGN_FILES = ("common/embedded/apache_kafka.py",)
JAVASCRIPT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`|(?P<name>[A-Za-z_$][\w$]*)""",
    re.DOTALL,
)
# First words of docstrings that hide what the sentence is about.
OPENERS = frozenset(
    [
        "What",
        "Who",
        "Whoever",
        "Whose",
        "Which",
        "How",
        "Where",
        "Whether",
        "Of",
        "By",
        "As",
        "So",
        "In",
        "At",
        "On",
        "From",
        "With",
        "For",
        "To",
    ]
)
# Comments for programs, which stand behind the code that they are about.
DIRECTIVE = re.compile(r"# (noqa|type: ignore|pragma)")
LONGEST_TRAILING = 30
# First words of comments that are part of a sentence which stands elsewhere.
FRAGMENTS = frozenset(
    [
        "of", "by", "for", "in", "from", "to", "with", "as", "until", "so", "likewise", "that",
        "which", "who", "whose", "what", "between", "else", "after", "since", "while",
    ]
)  # fmt: skip
# Phrases that hide who does what, or how much. Each of many peers has fewer than 2 in 10,000 words.
VAGUE = re.compile(
    "|".join(
        rf"\b(?:{phrase})\b"
        for phrase in (
            "whoever|whatever|whomever",
            "likewise|anew",
            "lets? go",
            "(?:of|by|in|for|from|to) wh(?:ich|om)",
            "so (?:many|long|much|often|few)",
            "(?:go|goes|going|went) on",
            "(?:is|are|was|were) (?:told|heard of|asked|away|back)",
            "(?:is|are|has|have) none",
            "where (?:there|it|that|none|no|one|they)",
        )
    ),
    re.IGNORECASE,
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MOST_VAGUE = 10


def parts(name: str) -> list[str]:
    """Return the words of an identifier, in lower case."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return [word.lower() for word in words]


def is_private(name: str) -> bool:
    """Return True if one of an identifier's words is private."""
    words = parts(name)
    return name not in FOREIGN and any(
        word in PRIVATE and not (word.startswith("letter") and at and words[at - 1] == "dead")
        for at, word in enumerate(words)
    )


def names_in(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the identifiers of a file with their lines."""
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
    else:
        for match in JAVASCRIPT.finditer(text):
            if match["name"]:
                yield text.count("\n", 0, match.start()) + 1, match["name"]


def bad_identifiers(path: str, text: str) -> list[tuple[int, str]]:
    """Return the identifiers of a file that have a private word, with their lines."""
    return [
        (line, name)
        for line, name in names_in(path, text)
        if is_private(name) or (name == "tell" and path not in FOREIGN_FILES)
    ]


def double_classes(files: Mapping[str, str]) -> list[str]:
    """Return a sentence for each public class name that several files or places define."""
    places = defaultdict[str, list[str]](list)
    for path, text in files.items():
        if path.startswith(PRODUCT) and path.endswith(".py"):
            for node in ast.walk(parsed(text)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(there)}" for name, there in places.items() if len(there) > 1]


@cache
def parsed(text: str) -> ast.Module:
    """Parse a file once."""
    return ast.parse(text)


def docstrings_of(text: str) -> dict[ast.expr, str]:
    """Return docstrings, those of attributes included."""
    return {
        node.value: node.value.value
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def bad_docstrings(text: str) -> list[int]:
    """Return the lines of docstrings that open with one of `OPENERS`."""
    return [
        node.lineno
        for node, docstring in docstrings_of(text).items()
        if (docstring.split() or [""])[0] in OPENERS
    ]


def long_trailing_comments(text: str) -> list[int]:
    """Return the lines with code and a comment of more than `LONGEST_TRAILING` characters."""
    lines = text.splitlines()
    return [
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        and len(token.string) > LONGEST_TRAILING + len("# ")
        and not DIRECTIVE.match(token.string)
        and lines[(line := token.start[0]) - 1][: token.start[1]].strip()
    ]


def comments_of(text: str) -> dict[int, str]:
    """Return the comments for people by line."""
    return {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)
    }


def fragments(text: str) -> list[int]:
    """Return the lines of comments that begin in the middle of a sentence."""
    comments = comments_of(text)
    return [
        line
        for line, comment in comments.items()
        if line - 1 not in comments and re.split(r"\W+", comment.lower())[0] in FRAGMENTS
    ]


def code_texts(text: str) -> list[str]:
    """Return docstrings and comments."""
    return [*docstrings_of(text).values(), *comments_of(text).values()]


def strings_of(text: str) -> list[str]:
    """Return the strings of five words or more that are no docstrings."""
    docstrings = docstrings_of(text)
    return [
        node.value
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and len(node.value.split()) >= 5
        and node not in docstrings
    ]


def vague_per_10000(texts: Iterable[str]) -> float:
    """Return how many phrases of 10,000 words are vague."""
    words = hits = 0
    for text in texts:
        words += len(text.split())
        hits += len(VAGUE.findall(text))
    return 10_000 * hits / max(words, 1)


def sources(*patterns: str) -> dict[str, str]:
    """Return the texts of files that git tracks by path, by default of Python and JavaScript."""
    listed = subprocess.run(  # noqa: S603 -- fixed arguments
        ["git", "ls-files", *(patterns or ("*.py", "*.js"))],  # noqa: S607 -- whichever git there is
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return {
        path: (ROOT / path).read_text(encoding="utf-8") for path in listed if (ROOT / path).exists()
    }


def test_no_identifier_has_a_private_word() -> None:
    found = [
        f"{path}:{line} {name}: say {', or '.join(PRIVATE[w] for w in parts(name) if w in PRIVATE)}"
        for path, text in sources().items()
        for line, name in bad_identifiers(path, text)
    ]
    assert found == []


def test_no_two_public_classes_of_the_product_share_a_name() -> None:
    assert double_classes(sources()) == []


@pytest.mark.parametrize(
    ("find", "most"),
    [(bad_docstrings, 0.001), (long_trailing_comments, 0.005), (fragments, 0.005)],
    ids=["docstrings", "trailing comments", "fragments"],
)
def test_prose_of_python_files_follows_its_rules(
    find: Callable[[str], list[int]], most: float
) -> None:
    files = sources("*.py")
    found = [f"{path}:{line}" for path, text in files.items() for line in find(text)]
    count = sum(len(docstrings_of(text)) for text in files.values())
    assert len(found) <= most * count, found


@pytest.mark.parametrize(
    ("pattern", "texts_of"),
    [("*.py", code_texts), ("*.py", strings_of), ("*.md", lambda text: [FENCED.sub("", text)])],
    ids=["docstrings and comments", "strings", "pages"],
)
def test_few_phrases_are_vague(pattern: str, texts_of: Callable[[str], list[str]]) -> None:
    texts = {path: texts_of(text) for path, text in sources(pattern).items()}
    worst = sorted(texts, key=lambda path: -len(VAGUE.findall(" ".join(texts[path]))))[:5]
    assert vague_per_10000(chain.from_iterable(texts.values())) <= MOST_VAGUE, worst


def test_sentences_that_break_a_rule_are_found_in_made_up_sources() -> None:
    word = "anew"
    text = f'''"""Of a job."""
X = 3  # seconds since somebody was last seen alive
Y = 4  # seconds
Z = 5  # noqa: ANN401 -- a reason that is longer than thirty characters
# A comment of its own line may be as long as it wants, and its second line may begin
# with any word.
# of a job
def f():
    """Return it."""
    # of a job
    return "one two three {word} five"
'''
    assert bad_docstrings(text) == [1]
    assert long_trailing_comments(text) == [2]
    assert fragments(text) == [10]
    assert vague_per_10000(["It is back."]) == 10_000 / 3
    assert vague_per_10000(strings_of(text)) == 10_000 / 5
    assert vague_per_10000(code_texts(text)) == 0


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("a.py", "def read(x):\n    return x.told_of\n", [(2, "told_of")]),
        ("a.py", "class LastGlance:\n    pass\n", [(1, "LastGlance")]),
        ("a.py", 'told = "told"\n', [(1, "told")]),
        ("a.py", "dead_letters = DeadLetter, retold, Bells, lonely\n", []),
        ("a.py", "letters = dead_letters\n", [(1, "letters")]),
        ("a.py", '"""What is told."""  # told\n', []),
        ("a.js", 'const heardOf = "told"; // told\n', [(1, "heardOf")]),
        ("a.js", "job.deadLetters(parts); /* told\n told */\nseat();\n", [(3, "seat")]),
        ("a.js", "f(`${time} told`); told();\n", [(1, "told")]),
    ],
)
def test_private_words_are_found_in_made_up_sources(
    path: str, text: str, expected: list[tuple[int, str]]
) -> None:
    assert bad_identifiers(path, text) == expected


def test_classes_of_one_name_are_found_in_made_up_sources() -> None:
    files = {
        "common/a.py": "class Part:\n    pass\nclass _Own:\n    pass\n",
        "services/b.py": "def f():\n    class Part:\n        pass\nclass _Own:\n    pass\n",
        "tests/c.py": "class Part:\n    pass\n",
    }
    assert double_classes(files) == ["Part: common/a.py:1, services/b.py:2"]
