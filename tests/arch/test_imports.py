"""Imports point down: the rooms of lenz have one order, and heavy packages come late."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.arch import limits
from tests.arch.source import (
    LENZ,
    REPOSITORY,
    Import,
    Source,
    dotted,
    imports_of,
    is_in,
    parse,
    sources,
)


def upward(source: Source) -> list[str]:
    """The imports of a file that its room may not have."""
    assert source.room in limits.RANKS, f"{source.name}: give room {source.room} a rank"
    found = []
    for i in imports_of(source):
        if not i.module.startswith("lenz."):
            continue
        dependency = i.module.split(".")[1]
        if source.name in limits.LOADING_FILES:
            allowed = is_in(i.module, limits.LOADING_IMPORTS)
        elif dependency == source.room:
            allowed = is_of_no_other_machine(i.module, source.module)
        elif source.room == "runtime":
            allowed = is_in(i.module, limits.RUNTIME_IMPORTS)
        else:
            # `from lenz import x` may name something of lenz/__init__.py, which has the top rank.
            rank = limits.RANKS.get(dependency, limits.RANKS["__init__"])
            allowed = rank < limits.RANKS[source.room]
        if not allowed:
            found.append(f"{source.name}:{i.line}: {source.room} may not import {i.module}")
    return found


def is_of_no_other_machine(module: str, here: str) -> bool:
    """False if a machine's room imports another one: lenz.machine.cpu from lenz.machine.cuda."""
    rooms = [m.split(".")[2] for m in (module, here) if m.startswith("lenz.machine.")]
    return len({r for r in rooms if (LENZ / "machine" / r).is_dir()}) < 2


def test_no_machine_is_imported_by_name() -> None:
    """`lenz/machines.py` finds machines; their modules are known in their own room alone."""
    for source in sources():
        for i in imports_of(source):
            named = is_in(i.module, ("lenz.machine",))
            assert not named or source.room == "machine", f"{source.name}:{i.line}: {i.module}"


def test_imports_point_down() -> None:
    found = [fault for s in sources() for fault in upward(s)]
    assert not found, "\n".join(found)


def test_nobody_imports_what_is_banned() -> None:
    for source in sources():
        for i in imports_of(source):
            assert not is_in(i.module, limits.BANNED_IMPORTS), f"{source.name}:{i.line}"
        assert "_inductor" not in source.text, f"{source.name} names the peer's module"


def test_the_standard_dataclass_is_that_of_options_alone() -> None:
    """`lenz.records` makes classes faster. Users hold Options, which refuse an assignment."""
    name = "dataclasses.dataclass"
    users = {s.name for s in sources() if name in [i.module for i in imports_of(s)]}
    assert users == {"options.py", "records.py"}


def test_heavy_packages_are_imported_late_and_in_few_files() -> None:
    for source in sources():
        for i in imports_of(source):
            if is_in(i.module, limits.LAZY):
                where = f"{source.name}:{i.line} imports {i.module}"
                assert source.name in limits.LAZY_FILES, where
                assert i.lazy, f"{where} when it is loaded"


def test_a_compilation_loads_no_file_that_registers_ops() -> None:
    """`register_fake` takes torch 20 ms: it looks for the caller among all modules."""
    files = {s.module: s for s in sources()}
    # `lenz.lower` imports its files by name.
    families = [m for m in files if m.startswith("lenz.lower.")]
    seen, ahead = set[str](), ["lenz.api", "lenz.pipeline", *families]
    while ahead:
        if (module := ahead.pop()) not in seen and module in files:
            seen.add(module)
            ahead += [i.module for i in imports_of(files[module]) if not i.lazy]
            ahead += [i.module.rpartition(".")[0] for i in imports_of(files[module]) if not i.lazy]
    register = [m for m, s in files.items() if "torch.library.register_fake(" in s.text]
    assert register and not seen & {*register}
    assert {"lenz.ir.graph", "lenz.lower", "lenz.plan.build"} <= seen


def test_torch_private_modules_stay_in_the_frontend() -> None:
    found = []
    for source in sources():
        if source.room == "frontend":
            continue
        allowed = tuple(limits.TORCH_PRIVATE.get(source.name, {}))
        found += [
            f"{source.name}:{line}: {name}"
            for name, line in private_names(source)
            if not is_in(name, allowed)
        ]
    assert not found, "\n".join(found)


def private_names(source: Source) -> list[tuple[str, int]]:
    """Modules and attributes of torch with a private part, and their lines."""
    named = [(i.module, i.line) for i in imports_of(source)]
    named += [
        (dotted(node), node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
    ]
    private = re.compile(r"torch(\.\w+)*\._(?!_)")
    longest = sorted({(name, line) for name, line in named if private.match(name)})
    return [x for x in longest if not any(y[0].startswith(x[0] + ".") for y in longest)]


def circles(found: Iterable[Source]) -> list[str]:
    """Files of one room that import each other in a circle, at load or for types only."""
    modules = {s.module: s for s in found}
    after: dict[str, set[str]] = {}
    for source in modules.values():
        names = [i.module for i in imports_of(source) if not i.lazy]
        names = [n if n in modules else n.rpartition(".")[0] for n in names]
        mine = {n for n in names if n in modules and modules[n].room == source.room}
        after[source.module] = mine - {source.module}
    while free := [m for m, names in after.items() if not names & {*after}]:
        for m in free:
            del after[m]
    while free := [m for m in after if not any(m in names for names in after.values())]:
        for m in free:
            del after[m]
    return sorted(modules[m].name for m in after)


def test_no_files_of_a_room_import_each_other_in_a_circle() -> None:
    """What several files need of each other's types stands in a file below all of them."""
    assert circles(sources()) == sorted(limits.CIRCLE)


def test_circles_are_found(tmp_path: Path) -> None:
    """By a type, through a package's name; what leads to a circle, or away, is not in it."""
    texts = {
        "above": "import lenz.ir.a",
        "a": "from lenz.ir.b import B",
        "b": "if TYPE_CHECKING:\n    from lenz.ir import a",
        "late": "def f():\n    import lenz.ir.above\nimport lenz.ir.below",
        "below": "import lenz.sym",
    }
    (tmp_path / "ir").mkdir()
    found = []
    for name, text in texts.items():
        path = tmp_path / "ir" / f"{name}.py"
        path.write_text(text + "\n")
        found.append(parse(path, tmp_path))
    assert circles(found) == ["ir/a.py", "ir/b.py"]


RUN_WITHOUT_COMPILER = """
import importlib, sys
allowed, lazy, modules = (text.split(",") for text in sys.argv[1:])

def within(name, packages):
    return any(name == p or name.startswith(p + ".") or p.startswith(name + ".") for p in packages)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in lazy or (name.startswith("lenz.") and not within(name, allowed)):
            raise ImportError(f"{name} is absent here")

sys.meta_path.insert(0, Absent())
for name in modules:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_the_runtime_loads_with_the_compiler_absent() -> None:
    loading = [s.module for s in sources() if s.name in limits.LOADING_FILES]
    modules = [s.module for s in sources() if s.room == "runtime"] + loading
    assert "lenz.runtime.store" in modules
    assert len(loading) == len(limits.LOADING_FILES)
    lists = ((*limits.LOADING_IMPORTS, *loading), limits.LAZY, modules)
    run = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_COMPILER, *(",".join(names) for names in lists)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


SAMPLE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import lenz.plan.build
from lenz import machine
from . import order
from ..machine.cpu.llvm import compile as c
if TYPE_CHECKING:
    from lenz.api import backend
def f():
    import llvmlite.binding as llvm
    importlib.import_module("lenz.cli")
"""


def test_every_form_of_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "schedule" / "sample.py"
    path.parent.mkdir()
    path.write_text(SAMPLE)
    sample = parse(path, tmp_path)
    seen = [i for i in imports_of(sample) if not i.module.startswith(("__", "typing"))]
    assert seen == [
        Import("lenz.plan.build", 4, False),
        Import("lenz.machine", 5, False),
        Import("lenz.schedule.order", 6, False),
        Import("lenz.machine.cpu.llvm.compile", 7, False),
        Import("lenz.api.backend", 9, False),
        Import("llvmlite.binding", 11, True),
        Import("lenz.cli", 12, True),
    ]
    assert [text.split(":")[1] for text in upward(sample)] == ["4", "5", "7", "9", "12"]


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("machine/cpu/sample.py", ["2"]),
        ("machine/cuda/sample.py", ["3"]),
        ("machine/sample.py", []),
        ("machine/cpu/loader.py", ["2", "3", "4", "5"]),
    ],
)
def test_machines_do_not_know_each_other(name: str, faults: list[str], tmp_path: Path) -> None:
    lines = ["cuda.triton", "cpu.llvm", "reads"]
    text = "\n".join(["", *(f"import lenz.machine.{x}" for x in lines), "import lenz.schedule", ""])
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert [x.split(":")[1] for x in upward(parse(path, tmp_path))] == faults
