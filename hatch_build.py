"""The page of the package: README.md without links and pictures that only the repository has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# [text](docs/options.md), but not [text](https://...) and not [text](#part)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)[^)]+\)")
PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n+")


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the text in."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = LINK.sub(r"\1", PICTURE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
