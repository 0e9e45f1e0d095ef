"""Hooks of mkdocs for building the site: pages outside docs/, and links.

In the repository, pages link to files by path. On the site a link to a page leads to the page, and
a link to any other file becomes its name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site from elsewhere in the repository.
ELSEWHERE = {
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "BENCHMARKS.md": "benchmarks/README.md",
}
LINK = re.compile(r"(?<!!)\[([^\]\n]+(?:\n[^\]\n]+)?)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from elsewhere, and keep decision pages out of the menu."""
    for name, path in ELSEWHERE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site. Code blocks stay unchanged."""
    here = page.file.src_uri
    place = ELSEWHERE.get(here, f"docs/{here}")
    sources = {file.src_uri for file in files.documentation_pages()}
    pages = {ELSEWHERE.get(uri, f"docs/{uri}"): uri for uri in sources}

    def linked(found: re.Match[str]) -> str:
        text, target, part = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if path in pages:
            to = posixpath.relpath(pages[path], posixpath.dirname(here) or ".")
            return f"[{text}]({to}{part})"
        # A broken link stays: mkdocs reports it, and --strict fails.
        return text if (ROOT / path).exists() else found[0]

    parts, end = [], 0
    for block in BLOCK.finditer(markdown):
        parts += [LINK.sub(linked, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, LINK.sub(linked, markdown[end:])])
