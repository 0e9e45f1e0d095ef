"""State and the world outside: no hidden state, and few files that touch environment and disk."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from lenz.options import Options
from tests.arch import limits
from tests.arch.source import Source, dotted, parse, sources, with_depth

# Calls that make an object which can change.
MUTABLE = {
    "dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "deque", "Counter", "count",
    "cycle", "local", "ContextVar", "WeakValueDictionary", "WeakKeyDictionary", "WeakSet", "Lock",
    "RLock", "array", "SimpleNamespace", "MutableMapping",
}  # fmt: skip

CHANGES = {
    "append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert",
    "remove", "discard", "move_to_end",
}  # fmt: skip

# With one of these annotations mypy refuses every change.
READ_ONLY = re.compile(r"(Final\[)?(Mapping|Sequence|Set|AbstractSet|Collection|Iterable)\[")


def module_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is loaded, also inside of `if` and `try`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
                yield from module_statements(getattr(node, inner, []))


def is_mutable(value: ast.expr | None) -> bool:
    match value:
        case ast.Dict() | ast.List() | ast.Set() | ast.DictComp() | ast.ListComp() | ast.SetComp():
            return True
        case ast.Call():
            return dotted(value.func).split(".")[-1] in MUTABLE
        case _:
            return False


def changed_names(trees: list[ast.Module]) -> set[str]:
    """Names that some statement changes: `x[k] = v`, `del x[k]`, `x += y`, `x.append(v)`."""
    found = set()
    for node in (n for tree in trees for n in ast.walk(tree)):
        match node:
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                found.add(dotted(value).split(".")[-1])
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in CHANGES:
                found.add(dotted(value).split(".")[-1])
            case ast.AugAssign(target=target):
                found.add(dotted(target).split(".")[-1])
    return found


def is_data(value: ast.expr | None) -> bool:
    """True for a table that is only data: it is state only if something changes it."""
    return not isinstance(value, ast.Call) or dotted(value.func) in ("dict", "list", "set")


def state_of(source: Source, changed: set[str]) -> list[tuple[str, int]]:
    """Module-level names bound to objects that change, or that exist to be changed."""
    found = []
    for node in module_statements(source.tree.body):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign) and is_mutable(node.value):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and is_mutable(node.value):
            kind = ast.unparse(node.annotation).removeprefix("typing.")
            targets = [] if READ_ONLY.match(kind) else [node.target]
        else:
            continue
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        found += [(n, node.lineno) for n in names if n in changed or not is_data(node.value)]
    return [(name, line) for name, line in found if name != "__all__"]


def test_module_level_state_is_listed_with_its_reason() -> None:
    changed = changed_names([s.tree for s in sources()])
    found = [
        f"{s.name}:{line}: {name}"
        for s in sources()
        for name, line in state_of(s, changed)
        if name not in limits.STATE.get(s.name, {})
    ]
    advice = "these change: make them arguments, or list them in limits.STATE with the reason:"
    assert not found, "\n".join([advice, *found])


def test_no_listed_exception_is_out_of_date() -> None:
    by_name = {s.name: s for s in sources()}
    changed = changed_names([s.tree for s in sources()])
    for name, entries in limits.STATE.items():
        existing = [n for n, _ in state_of(by_name[name], changed)]
        assert set(entries) <= set(existing), name
    for name in limits.TORCH_PRIVATE:
        assert name in by_name, name


def test_no_function_rebinds_a_global() -> None:
    for source in sources():
        for node in ast.walk(source.tree):
            assert not isinstance(node, ast.Global), f"{source.name}:{node.lineno}: global"


def calls_of(source: Source) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def test_only_options_reads_the_environment() -> None:
    for source in sources():
        if source.name in limits.ENVIRONMENT_FILES:
            continue
        for node in ast.walk(source.tree):
            name = dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
            word = name.split(".")[-1]
            line = getattr(node, "lineno", 0)
            assert word not in ("environ", "environb", "getenv", "putenv", "expanduser"), (
                f"{source.name}:{line}: {name}"
            )


WRITES = {
    "write_text", "write_bytes", "mkdir", "makedirs", "unlink", "rename", "rmtree", "symlink",
    "mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "touch", "copyfile",
}  # fmt: skip


def is_write(name: str, call: ast.Call) -> bool:
    """True for calls that write to a disk.  `open` counts unless its mode is for reading."""
    last = name.split(".")[-1]
    if last == "open":
        mode = list(call.args[1:2]) + [k.value for k in call.keywords if k.arg == "mode"]
        return any(not isinstance(m, ast.Constant) or set("wax+") & set(str(m.value)) for m in mode)
    return last in WRITES or name in ("os.replace", "os.open", "os.write", "torch.save")


def test_few_files_write_to_the_disk() -> None:
    for source in sources():
        for name, call in calls_of(source):
            if is_write(name, call):
                assert source.name in limits.WRITING_FILES, f"{source.name}:{call.lineno}: {name}"


def test_few_files_run_text_as_code() -> None:
    for source in sources():
        for name, call in calls_of(source):
            if name in ("exec", "eval"):
                assert source.name in limits.EXEC_FILES, f"{source.name}:{call.lineno}: {name}"


def test_broad_excepts_have_a_reason() -> None:
    """`except Exception` without a comment on its line or in its body is silent about its why."""
    for source in sources():
        lines = source.text.splitlines()
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            where = f"{source.name}:{node.lineno}"
            assert node.type is not None, f"{where}: bare except"
            caught = ast.unparse(node.type)
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            if "Exception" in re.findall(r"\w+", caught) and not raises:
                shown = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                assert "#" in shown, f"{where}: `except {caught}` without a reason"
            assert not all(isinstance(n, ast.Pass) for n in node.body) or "#" in "\n".join(
                lines[node.lineno - 1 : node.end_lineno]
            ), f"{where}: silent except without a reason"


IGNORE = re.compile(
    r"#\s*(type:\s*ignore(\[[\w, -]+\])?|noqa(:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?)(?P<rest>.*)$"
)


def test_every_ignore_is_explained() -> None:
    found = []
    for source in sources():
        for n, line in enumerate(source.text.splitlines(), 1):
            if match := IGNORE.search(line):
                reason = re.sub(r"^[\s#:-]*", "", match["rest"])
                if len(reason) < 4 or not (match[2] or match[3]):
                    found.append(f"{source.name}:{n}: {line.strip()}")
    assert not found, "say why, behind the ignore:\n" + "\n".join(found)


def test_every_module_says_what_it_is_for() -> None:
    missing = [s.name for s in sources() if s.text.strip() and not ast.get_docstring(s.tree)]
    assert not missing


SAMPLE = """
A = {}
B: dict[str, int] = {}
C: Mapping[str, int] = {"a": 1}
D = (1, 2)
E, F = [], ()
G = H = itertools.count()
__all__ = ["A"]
if A:
    I = [n for n in D]
def f():
    J = {}
    A["x"] = B.pop("y")
    J[1] = C
K = {"a": 1}
"""


def test_state_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    sample = parse(path, tmp_path)
    elsewhere = ast.parse("from sample import I\nI.append(3)")
    changed = changed_names([sample.tree, elsewhere])
    assert [name for name, _ in state_of(sample, changed)] == ["A", "B", "G", "H", "I"]


def test_depth_counts_functions() -> None:
    tree = ast.parse("x = 1\ndef f():\n    y = 2\n    g = lambda: z\n")
    names = {n.id: d for n, d in with_depth(tree) if isinstance(n, ast.Name)}
    assert names == {"x": 0, "y": 1, "g": 1, "z": 2}


def test_every_option_is_read() -> None:
    """An option that nothing reads is a promise that nothing keeps."""
    read = {
        node.attr
        for s in sources()
        if s.name != "options.py"
        for node in ast.walk(s.tree)
        if isinstance(node, ast.Attribute) and dotted(node.value).endswith("options")
    }
    assert not [f.name for f in fields(Options) if f.name not in read]
