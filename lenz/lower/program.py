"""What is lowered, as `lower/` sees it: `frontend.FxProgram` has all of this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule, Node

from lenz.sym import Sym, SymEnv


class Program(Protocol):
    """A normalised FX graph and its facts.

    `constants` are the tensors among its attributes, by name.  `saved` are positions of results
    that may have other strides than their fake tensors.  `deterministic` asks for results without
    chance.  `env` is what is known of sizes, `sym` gives the size behind one of a fake tensor, and
    `origin` the user's line behind a node.
    """

    @property
    def name(self) -> str: ...
    @property
    def gm(self) -> GraphModule: ...
    @property
    def constants(self) -> Mapping[str, Tensor]: ...
    @property
    def saved(self) -> Sequence[int]: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def env(self) -> SymEnv: ...
    def sym(self, size: Any) -> Sym: ...
    def origin(self, node: Node) -> str: ...
