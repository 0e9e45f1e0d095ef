"""From PyTorch into lenz: capture, normalise, and hand on an `FxProgram`.

The only room that touches private modules of torch.  What leaves it is an FX graph of aten calls
with fake tensors, and `Sym` in the place of every SymInt that a reader asks about.
"""

from lenz.frontend.facts import assuming as assuming
from lenz.frontend.facts import kept as kept
from lenz.frontend.program import CompileFX, FxProgram, Output, Placeholder, origin
from lenz.frontend.program import caller as caller
from lenz.frontend.symbols import Binding, SymbolMap
