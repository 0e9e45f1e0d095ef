"""The code blocks of a Markdown page, run in order in one module, with the output they promise."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of code: its first line in the page, and what it must print (None: anything)."""

    code: str
    line: int
    want: str | None


def blocks_of(page: Path) -> list[Block]:
    """The `python` blocks; a `text` block right behind one holds its output."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = -1
    for m in BLOCK.finditer(text):
        language, body = m.groups()
        if language == "python":
            found.append(Block(body, text[: m.start(2)].count("\n") + 1, None))
            end = m.end()
        elif language == "text" and found and not text[end : m.start()].strip():
            found[-1] = Block(found[-1].code, found[-1].line, body)
    return found


@contextlib.contextmanager
def module(name: str) -> Iterator[ModuleType]:
    """An empty module that dataclasses can find while the blocks run."""
    made = ModuleType(name)
    sys.modules[name] = made
    try:
        yield made
    finally:
        del sys.modules[name]


def run(page: Path, name: str) -> list[tuple[Block, str]]:
    """Run every block of a page; gives each with what it printed.

    Lines of a traceback are those of the page.
    """
    made: list[tuple[Block, str]] = []
    with module(name) as place:
        for block in blocks_of(page):
            out = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, place.__dict__)
            made.append((block, out.getvalue()))
    return made


def updated(page: Path, name: str) -> str:
    """The page with the outputs that its blocks print now."""
    text = page.read_text(encoding="utf-8")
    for block, printed in run(page, name):
        if block.want is not None:
            old = f"{block.code}```\n\n```text\n{block.want}```"
            text = text.replace(old, f"{block.code}```\n\n```text\n{printed}```")
    return text


def main(page: Path, update: bool) -> int:
    """Run a page in this process; the exit status is 1 where it is not true."""
    if update:
        page.write_text(updated(page, "page"), encoding="utf-8")
        return 0
    wrong = wrong_outputs(page, "page")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def wrong_outputs(page: Path, name: str) -> list[str]:
    """What differs from the page, one text per block; empty when the page is true."""
    return [
        f"{page.name}:{block.line} prints\n{printed}"
        for block, printed in run(page, name)
        if block.want is not None and printed != block.want
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main(Path(sys.argv[1]), "--update" in sys.argv[2:]))
