"""Names and sentences that a stranger understands."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
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
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<name>[A-Za-z_$][\w$]*)""",
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
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(there)}" for name, there in places.items() if len(there) > 1]


def bad_docstrings(text: str) -> list[int]:
    """Return the lines of docstrings that open with one of `OPENERS`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and (node.value.value.split() or [""])[0] in OPENERS
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


def sources() -> dict[str, str]:
    """Return the texts of all Python and JavaScript files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.js"],  # noqa: S607 -- whichever git there is
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
    [(bad_docstrings, 0.01), (long_trailing_comments, 0.02)],
    ids=["docstrings", "trailing comments"],
)
def test_prose_of_python_files_follows_its_rules(
    find: Callable[[str], list[int]], most: float
) -> None:
    files = {path: text for path, text in sources().items() if path.endswith(".py")}
    found = [f"{path}:{line}" for path, text in files.items() for line in find(text)]
    count = sum(text.count('"""') // 2 for text in files.values())
    assert len(found) <= most * count, found


def test_sentences_that_break_a_rule_are_found_in_made_up_sources() -> None:
    text = '''"""Of a job."""
X = 3  # seconds since somebody was last seen alive
Y = 4  # seconds
Z = 5  # noqa: ANN401 -- a reason that is longer than thirty characters
# A comment of its own line may be as long as it wants.
def f():
    """Return it."""
'''
    assert bad_docstrings(text) == [1]
    assert long_trailing_comments(text) == [2]


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
