"""torch's logs: `TORCH_LOGS="+lenz"`, and its artifacts `output_code`, `fusion` and `schedule`.

Artifacts are children of the logger `torch`, which has torch's handler; the logger `lenz` gets one
from torch if the user names it.
"""

from __future__ import annotations

import logging
from functools import cache

ARTIFACTS = ("fusion", "output_code", "schedule")


@cache
def logger(artifact: str = "") -> logging.Logger:
    """The logger of an artifact, or of everything else."""
    if artifact not in ARTIFACTS:
        return logging.getLogger("lenz")
    from torch._logging import getArtifactLogger

    return getArtifactLogger("torch.lenz", artifact)


def is_on(artifact: str = "") -> bool:
    """Whether the user asked for it. Messages of artifacts that are off do not propagate."""
    log = logger(artifact)
    return log.propagate and log.isEnabledFor(logging.DEBUG)


def any_is_on() -> bool:
    """Whether the user asked for any of them."""
    return any(map(is_on, ("", *ARTIFACTS)))
