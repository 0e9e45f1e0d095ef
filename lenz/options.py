"""The options of the compiler: few, frozen, documented.  This is the only reader of `os.environ`.

`options=` of torch.compile overrides the environment variable `LENZ_<NAME>`, which overrides the
default below. `aside` declares those that do not change generated code; `Options.key` is the text
of all others, so that one that nobody set aside is in the keys.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from typing import Any, Literal, TypeAlias, get_args

from lenz.errors import UserError, near_names

PREFIX = "LENZ_"
Log: TypeAlias = Literal["graph", "ir", "schedule", "fusion", "code", "time"]
LOGS: tuple[str, ...] = get_args(Log)
# The variable of a folder, and its place without one: on Linux and on macOS.
FOLDERS = {
    "cache_dir": ("XDG_CACHE_HOME", ".cache", "Caches"),
    "debug_dir": ("XDG_STATE_HOME", ".local/state", "Application Support"),
}
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off", "")

# A user's pass: "module:function", and its keyword arguments.
Pass: TypeAlias = tuple[str, tuple[tuple[str, object], ...]]
PLAIN = (bool, int, float, str, type(None))
LEAST = {"cuda_graph_sizes": 1, "side_by_side": 1, "fuel": -1}  # of other numbers: 0
# What may hold a password in a URL: all up to an `@`, and what follows a `?`; all if both mix.
SECRET = re.compile(r".*[?#].*@.*|.*@|^redis://|[?#].*", re.DOTALL)


def option(default: Any, help: str, *, key: bool = True) -> Any:
    """Declare one option: its default, one sentence of help, and whether it changes code."""
    return field(default=default, metadata={"help": help, "key": key})


aside: Callable[[Any, str], Any] = partial(option, key=False)


def choices_of(kind: object) -> tuple[str, ...]:
    """Return the words that the type of an option, as text, allows; empty if it allows any."""
    return LOGS if kind == "tuple[Log, ...]" else tuple(re.findall(r"['\"](\w+)['\"]", str(kind)))


def redacted(name: str, value: object) -> str:
    """Return the value of an option as text for people: a server without its password."""
    return SECRET.sub("", f"{value}") or "its server" if name == "remote_cache" else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option of one compilation. `from_environment` builds it at the border."""

    fuse: bool = option(True, "Fuse loops with one another.")
    fuse_reductions: bool = option(True, "Fuse producers and epilogues into reductions.")
    inline: bool = option(True, "Recompute cheap values in their readers.")
    horizontal: bool = option(True, "Fuse independent loops that share reads.")
    side_by_side: int = option(
        32, "Most short kernels that one launch of a GPU runs; 1 joins none."
    )
    reuse_buffers: bool = option(True, "Reuse the memory of dead buffers.")
    emulate_rounding: bool = option(
        False, "Round between fused ops of half types where eager does."
    )
    eager_random: bool = option(False, "Draw eager's own random numbers, by calls outside kernels.")
    aligned: bool = option(
        True, "Assume that GPU tensors start at multiples of 16 bytes; recompile for others."
    )
    size_facts: bool = option(
        True,
        "On GPUs, assume that dynamic sizes are multiples of 8, or not large, if those of the first"
        " call are; recompile for others.",
    )
    autotune: bool = option(False, "Time several tiles for each GPU kernel; has no effect on CPUs.")
    fuel: int = option(-1, "Allow only this many optional rewrites, to find a bug; -1 allows all.")
    memory_budget: float | None = option(
        None,
        "Limit on the saved tensors of a training step: a fraction of the default, above 0 and"
        " up to 1, or bytes. The cheapest results are recomputed.",
    )
    save_as: Literal["float8_e5m2", "float8_e4m3fn"] | None = option(
        None, "Save activations of half types as 8-bit floats for backward: gradients are rounded."
    )
    passes: tuple[Pass, ...] = option(
        (),
        "Your functions that change each FX graph before it is lowered, in order: `module:name`, or"
        " a pair of that and keyword arguments.",
    )
    launch_groups: tuple[Pass, ...] = option(
        (), "Your functions that divide independent short kernels of a GPU among its launches."
    )
    native: bool = aside(True, "Run plans by native code between kernels, if possible.")
    cuda_graphs: Literal["off", "on", "auto"] = option(
        "off",
        "Replay plans of GPUs as CUDA graphs: `on` wherever a graph can hold them, `auto` where"
        " that is faster.",
    )
    cuda_graph_sizes: int = aside(8, "Sets of sizes that may have CUDA graphs at once; at least 1.")
    background: bool = aside(
        False,
        "Run graphs in eager at first, while another process compiles them into the disk cache.",
    )
    compare_eager: bool = aside(
        False,
        "Time each graph against eager in its first call, on copies of the arguments; the faster"
        " one runs from then on. Not with options that watch kernels, such as `nans`.",
    )
    verify: bool | Literal["kernels"] = aside(
        False, "Check the IR after every pass; `kernels` also checks what each kernel computes."
    )
    on_error: Literal["raise", "eager"] = aside(
        "eager",
        "What to do if lenz itself fails on a graph: raise, or warn and run the graph in eager.",
    )
    cache: bool = aside(True, "Keep compiled code on disk.")
    cache_dir: str | None = aside(
        None, "Folder of the disk cache; by default lenz in the user's cache folder."
    )
    cache_mb: int = aside(
        1024, "Most MiB of the disk cache; the entries that were not used for longest go first."
    )
    remote_cache: str | None = aside(
        None, "A Redis server behind the disk cache: redis://host:port/number."
    )
    remote_secret: str | None = aside(
        None, "File with the secret that signs the entries of the remote cache."
    )
    debug: bool = aside(False, "Write every stage of each graph to a folder.")
    debug_dir: str | None = aside(
        None, "Parent of debug folders and repros; by default lenz in the user's state folder."
    )
    progress: bool = aside(True, "Show progress on a terminal after 2 seconds of compilation.")
    profile: bool = aside(False, "Time each kernel and library call; tell when the process ends.")
    profile_output: str | None = aside(
        None,
        "File for the times of `profile`, in place of standard error: a table, or a trace for"
        " Chrome and Perfetto if the name ends in .json.",
    )
    profile_device_time: bool = aside(True, "Leave the time between kernels out of their GB/s.")
    ranges: Literal["off", "calls", "kernels"] = aside(
        "off", "Ranges of torch.profiler: of each call of a compiled graph, or of its kernels too."
    )
    perf_map: bool = aside(False, "Name CPU kernels for Linux `perf`, in /tmp/perf-PID.map.")
    debug_values: Literal["1", "save"] | None = aside(
        None, "Show the tensors around launches and calls: 1 prints them, save writes."
    )
    debug_kernels: str | None = aside(None, "Kernels and ops for `debug_values`, comma-separated.")
    nans: bool = aside(False, "Stop at the first kernel or call that makes a NaN from numbers.")
    logs: tuple[Log, ...] = aside((), "Stages to print to standard error, comma-separated.")

    @classmethod
    def from_environment(
        cls, overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
    ) -> Options:
        """Read `LENZ_*` variables, then `overrides`, and check the name and type of each.

        `environ` stands in for `os.environ` in tests. `cache_dir` is set in the result. Raises
        UserError for an unknown name (listing near names) or a value of the wrong type.
        """
        env = os.environ if environ is None else environ
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for variable in sorted(env):
            if not variable.startswith(PREFIX):
                continue
            name = variable[len(PREFIX) :].lower()
            if name not in known:
                hint = near_names(variable, [PREFIX + n.upper() for n in known])
                raise UserError(f"unknown environment variable {variable}", hint=hint)
            values[name] = _parse(variable, str(known[name].type), env[variable])
        for name, value in (overrides or {}).items():
            if name not in known:
                hint = near_names(name, known) if isinstance(name, str) else "names are strings"
                raise UserError(f"unknown option {name!r}", hint=hint)
            values[name] = value
        for name, value in values.items():
            values[name] = _checked(name, str(known[name].type), value)
        for name, places in FOLDERS.items():
            values[name] = os.path.expanduser(values.get(name) or _user_folder(env, *places))
        return cls(**values)

    def __repr__(self) -> str:
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return "\n".join(f"{name} = {redacted(name, value)}" for name, value in pairs)

    @property
    def watched(self) -> bool:
        """Whether graphs must be compiled in this process, to be watched as they run."""
        is_checked = self.nans or self.verify == "kernels" or self.perf_map
        return self.profile or is_checked or bool(self.debug_values) or self.ranges != "off"

    def key(self) -> str:
        """Return the text of all options that change code, for the key of a compiled graph."""
        keyed = [f.name for f in fields(self) if f.metadata["key"]]
        return " ".join(f"{name}={getattr(self, name)!r}" for name in keyed)


def _parse(variable: str, kind: str, text: str) -> object:
    """Turn the text of an environment variable into a value for an option of type `kind`."""
    text = text.strip()
    match kind:
        case str() if kind.startswith("bool"):
            if text.lower() in YES + NO:
                return text.lower() in YES
            if choices_of(kind):
                return text
            raise UserError(f"{variable}={text}: expected a truth value", hint="use 1 or 0")
        case "float | None" if text in ("", "None"):
            return None
        case "int" | "float | None":
            is_whole = kind == "int" or text.isdecimal()
            try:
                return int(text) if is_whole else float(text)
            except ValueError:
                wanted = "a whole number" if is_whole else "a number"
                raise UserError(f"{variable}={text}: expected {wanted}") from None
        case str() if kind.endswith("| None"):
            return text or None
        case _:
            return text


def _checked(name: str, kind: str, value: object) -> object:
    """Return `value` as the type the option holds, or raise a UserError that names the option."""
    choices = choices_of(kind)
    match kind, value:
        case str(), bool() if kind.startswith("bool"):
            return value
        case str(), None if kind.endswith("| None"):
            return value
        case "int", int() if not isinstance(value, bool):
            if value < (least := LEAST.get(name, 0)):
                raise UserError(f"option {name}: {value} is below {least}")
            return value
        case "float | None", int() | float() if not isinstance(value, bool):
            if not (0 < value <= 1 or (isinstance(value, int) and 1 < value < 2**63)):
                hint = "give a fraction of the default, such as 0.5, or a whole number of bytes"
                raise UserError(f"option {name}: {value} is not a budget", hint=hint)
            return value
        case "str | None", (str() | os.PathLike()) if "\0" not in os.fsdecode(value):
            return os.fsdecode(value) or None  # an empty path would be the working folder
        case "tuple[Log, ...]", (str() | tuple() | list()):
            return _words(name, choices, value)
        case "tuple[Pass, ...]", (str() | tuple() | list()):
            given = [w for w in value.split(",") if w] if isinstance(value, str) else value
            return tuple([_pass(name, x) for x in given])
        case _, str() if value in choices:
            return value
        case _, int() if str(int(value)) in choices:
            return str(int(value))
    truth, absent = ["True", "False"] * kind.startswith("bool"), ["None"] * kind.endswith("None")
    named = kind.replace("tuple[Pass, ...]", "a list of functions")
    expected = f"one of {', '.join([*truth, *choices, *absent])}" if choices else named
    raise UserError(f"option {name}: expected {expected}, got {redacted(name, value)}")


def _words(name: str, choices: tuple[str, ...], value: str | tuple[Any, ...] | list[Any]) -> object:
    """Return the words of `value` (a list, or text with commas), each of them in `choices`."""
    given = value.split(",") if isinstance(value, str) else list(value)
    words = tuple(w.strip() if isinstance(w, str) else w for w in given)
    for word in words:
        if word != "" and word not in choices:
            raise UserError(f"option {name}: unknown {word!r}", hint=near_names(str(word), choices))
    return tuple(c for c in choices if c in words)


def _pass(called: str, given: Any) -> Pass:
    """Return a pass as its name and plain arguments. A function stands for its name."""
    run, arguments = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, ())
    if callable(run):
        run = f"{getattr(run, '__module__', '')}:{getattr(run, '__qualname__', '')}"
    try:
        told: dict[Any, object] = dict(arguments)
    except (TypeError, ValueError):
        told = {"?": arguments}
    if not isinstance(run, str) or not re.fullmatch(r"[\w.]+:[\w.]+", run.strip()):
        hint = "write module:function, or give a function that a module defines"
        raise UserError(f"option {called}: {given!r} names no function", hint=hint)
    for name, value in told.items():
        if not (isinstance(name, str) and name.isidentifier() and isinstance(value, PLAIN)):
            hint = "arguments are numbers, texts, truth values or None, by name"
            raise UserError(f"option {called}: {run} gets {name}={value!r}", hint=hint)
    return run.strip(), tuple(sorted(told.items()))


def named_function(called: str, name: str) -> Callable[..., Any]:
    """Return the function "module:name" of an option; raises UserError if there is none."""
    module, _, path = name.partition(":")
    try:
        run = reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as e:
        raise UserError(f"option {called}: there is no {name}: {e}") from e
    if not callable(run):
        raise UserError(f"option {called}: {name} is a {type(run).__name__}, no function")
    return run


def _user_folder(env: Mapping[str, str], variable: str, default: str, mac: str) -> str:
    """Return `lenz` in a folder that the platform gives to this user."""
    home = os.path.expanduser("~")
    if sys.platform == "win32":
        root = env.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local")
    elif sys.platform == "darwin":
        root = os.path.join(home, "Library", mac)
    else:
        xdg = env.get(variable, "")
        # The XDG base directory specification tells us to ignore a path that is not absolute.
        root = xdg if os.path.isabs(xdg) else os.path.join(home, default)
    return os.path.join(root, "lenz")
