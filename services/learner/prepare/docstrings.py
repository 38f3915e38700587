"""Posts and reference summaries from docstrings: real English text that every installation has. Used by `tldr`.

A docstring's first line is the summary, its prose paragraphs are the post. Sources are read and parsed, never imported.
The same packages at the same versions give the same rows in the same order.
"""

import ast
import importlib.util
import logging
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import DataError

log = logging.getLogger(__name__)

STANDARD_LIBRARY = "stdlib"
# Text that repeats itself a hundred times in a package's tests would be most of the data.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "testing"})
MIN_REFERENCE_WORDS, MAX_REFERENCE_WORDS, MIN_POST_WORDS = 3, 14, 12

# The prose of a docstring ends where its reference part begins.
REFERENCE_PART = re.compile(
    r">>>|\.\. |:|Parameters|Args|Returns|Examples?\b|Notes?\b|References|Raises|See Also|Attributes|-{3}|={3}|\* |- "
)
MARKUP = re.compile(r"[`*_<>\\{}=|~]{2,}|https?:|\$")
SENTENCE_END = re.compile(r"(?<=[.!?:;]) ")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Docstring:
    """A post and its reference summary."""

    package: str
    post: str
    reference: str


def read_docstrings(packages: Sequence[str]) -> list[Docstring]:
    """Docstrings of packages (`stdlib` is Python's own), each post and each reference once.

    Raises `DataError` for a package that is not installed.
    """
    found: list[Docstring] = []
    posts: set[str] = set()
    references: set[str] = set()
    for package in packages:
        for file in _files(package):
            for text in docstrings_of(file.read_text(encoding="utf-8", errors="ignore")):
                parts = split_docstring(text)
                if parts is None or parts[0].lower() in posts or parts[1].lower() in references:
                    continue
                posts.add(parts[0].lower())
                references.add(parts[1].lower())
                found.append(Docstring(package, *parts))
    counts = Counter(one.package for one in found)
    log.info("%d docstrings: %s", len(found), ", ".join(f"{p} {n}" for p, n in counts.items()))
    return found


def docstrings_of(source: str) -> Iterator[str]:
    """The docstrings of a module, its classes and their methods, and its functions; none if it can't be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # templates and files for other versions of Python
    todo: list[Documented] = [tree]
    while todo:
        node = todo.pop(0)
        text = ast.get_docstring(node)
        if text:
            yield text
        # Bodies only: a walk over all expressions takes ten times as long.
        todo += [
            child
            for child in node.body
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]


def split_docstring(text: str) -> tuple[str, str] | None:
    """(post, reference), or None when it is not plain English prose under a short first line."""
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    reference = " ".join(" ".join(paragraphs[0]).split())
    prose: list[str] = []
    for paragraph in paragraphs[1:]:
        if not paragraph or any(REFERENCE_PART.match(line) for line in paragraph):
            break
        prose += paragraph
    post = " ".join(" ".join(prose).split())
    words = len(reference.split())
    fits = (
        MIN_REFERENCE_WORDS <= words <= MAX_REFERENCE_WORDS and len(post.split()) >= MIN_POST_WORDS
    )
    plain = reference.isascii() and post.isascii() and not MARKUP.search(reference + post)
    return (post, reference) if fits and plain else None


def whole_sentences(text: str) -> Iterator[str]:
    """The text's beginnings that end with a sentence, shortest first."""
    kept = ""
    for sentence in SENTENCE_END.split(text):
        kept = f"{kept} {sentence}".strip()
        yield kept


def _files(package: str) -> list[Path]:
    folder = _folder(package)
    return sorted(
        file
        for file in folder.rglob("*.py")
        if not SKIPPED_FOLDERS & set(file.relative_to(folder).parts)
    )


def _folder(package: str) -> Path:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    # Not imported: only its place is asked for.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"prepare.params.packages: expected an installed package, found none named {package!r}; "
            f"install it, or take it off the list ({STANDARD_LIBRARY} is Python's own library)"
        )
    return Path(next(iter(spec.submodule_search_locations)))
