"""Commands that a page of the documentation shows, for tests that type or parse them."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of docs/<page>.md in this language, in their order."""
    text = (DOCS / f"{page}.md").read_text()
    return [body for found, body in BLOCK.findall(text) if found == language]


def commands(block: str) -> list[str]:
    """The commands of a block: continued lines are one, comments and blank lines none."""
    joined = re.sub(r"\\\n\s*", " ", block)
    lines = (line.rstrip() for line in joined.splitlines())
    return [line for line in lines if line and not line.lstrip().startswith("#")]
