"""From PyTorch into lenz: capture, normalise, and hand on an `FxProgram`.

The only room that uses private modules of torch. It hands on an FX graph of aten calls with fake
tensors, and a `Sym` for every SymInt that a reader needs.
"""

from lenz.frontend.facts import assuming as assuming
from lenz.frontend.facts import kept as kept
from lenz.frontend.program import CompileFX, FxProgram, Output, Placeholder, origin
from lenz.frontend.program import caller as caller
from lenz.frontend.symbols import Binding, SymbolMap
