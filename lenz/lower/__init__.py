"""aten -> Graph, define-by-run: one family of ops per file, each lowering a function of indices."""

from importlib import import_module
from pkgutil import iter_modules

from lenz.lower.registry import native_ops as native_ops
from lenz.lower.walk import lower as lower

for _file in iter_modules(__path__):  # each family registers its lowerings
    import_module(f"{__name__}.{_file.name}")
