"""What the documentation site does to pages: the README is its first, and what lies outside of docs/ is named, not linked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README_MARK = "<!-- README -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page's text as the site shows it."""
    if README_MARK in markdown:
        markdown = markdown.replace(README_MARK, as_page_of_docs((ROOT / "README.md").read_text()))
    return _without_links_outside(markdown)


def as_page_of_docs(readme: str) -> str:
    """The README, its links and the pages that it lists as they are seen from docs/."""
    linked = re.sub(r"\]\(docs/", "](", readme)
    return re.sub(r"^\| `docs/([\w-]+)\.md` \|", r"| [\1](\1.md) |", linked, flags=re.MULTILINE)


def _without_links_outside(markdown: str) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
