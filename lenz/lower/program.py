"""The program as `lower/` sees it; `frontend.FxProgram` implements this protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule, Node

from lenz.sym import Sym, SymEnv


class Program(Protocol):
    """A normalised FX graph and its facts.

    `constants` are the tensors among its attributes, by name. `saved` are positions of results that
    may have other strides than their fake tensors, `apart` of those that autograd must
    not see as views. `deterministic` asks for reproducible results.
    `env` holds facts about sizes, `sym` converts a size of a fake tensor, and `origin` returns the
    user's source line of a node.
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
    def apart(self) -> Sequence[int]: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def env(self) -> SymEnv: ...
    def sym(self, size: Any) -> Sym: ...
    def origin(self, node: Node) -> str: ...
