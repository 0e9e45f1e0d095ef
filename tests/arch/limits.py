"""Every limit on the structure of lenz, in one place.

Raising a limit, or adding an exception, is a commit of its own with the reason in it.
"""

from __future__ import annotations

FILE_LINES = 500
FUNCTION_LINES = 60
CLASS_METHODS = 15

# Lines of code per room: no blanks, comments or docstrings. ruff holds lines at 100 columns, so
# that they cannot grow sideways. "." is what stands in lenz/ itself.
CODE_LINES = {
    ".": 2_784,
    "artifact": 794,
    "commands": 854,
    "debug": 1_518,
    "first_calls": 316,
    "frontend": 4_454,
    "ir": 4_111,
    "lower": 5_474,
    "machine": 5_821,
    "ops": 1_916,
    "opt": 1_656,
    "page": 442,
    "plan": 2_101,
    "runtime": 815,
    "schedule": 1_650,
    "sym": 1_101,
}
TOTAL_CODE_LINES = 35_807

# A room may import itself and rooms of lower rank.  Rooms of equal rank never import each other.
RANKS = {
    "errors": 0,
    "process": 0,
    "version": 0,
    "entry": 1,
    "options": 1,
    "target": 1,
    "private": 1,
    "records": 0,
    "remote": 2,
    "traits": 1,
    "trial": 1,
    "sym": 2,
    "ir": 3,
    "ops": 4,
    "debug": 5,
    "context": 6,
    "machines": 7,
    "kernels": 7,
    "frontend": 8,
    "lower": 8,
    "opt": 8,
    "schedule": 8,
    "runtime": 8,  # beside the compiler: what it may import is in RUNTIME_IMPORTS
    "machine": 9,
    "plan": 10,
    "keys": 10,
    "perf_map": 8,
    "loading": 11,
    "replay": 12,
    "respecialise": 13,
    "halves": 14,
    "recall": 15,
    "warm": 16,
    "pipeline": 16,
    "first_calls": 17,
    "artifact": 17,
    "api": 18,
    "page": 19,
    "explaining": 20,
    "commands": 21,
    "cli": 22,
    "__main__": 23,
    "__init__": 23,
}

# Files that import each other in a circle, also where an import is for types only: operators of a
# Sym build canonical ones, whose rules ask for bounds and factors of Syms.
CIRCLE = ("sym/divide.py", "sym/expr.py", "sym/polynomial.py", "sym/prove.py", "sym/recombine.py")

# The runtime runs with the compiler absent.
RUNTIME_IMPORTS = (
    "lenz.entry",
    "lenz.errors",
    "lenz.options",
    "lenz.private",
    "lenz.records",
    "lenz.remote",
    "lenz.sym",
    "lenz.ir.binary",
    "lenz.ir.expr",  # these are data
    "lenz.ir.graph",
    "lenz.ir.lexer",
    "lenz.ir.op",
    "lenz.ir.plan",
    "lenz.ir.syntax",
    "lenz.ir.tensor",
    "lenz.ir.dtype",
    "lenz.runtime",
)
# The halves of machines that load kernels stand beside the compiler in the same way.
LOADING_FILES = (
    "machine/cpu/host.py",
    "machine/cpu/loader.py",
    "machine/cuda/driver.py",
    "machine/cuda/graph.py",
    "machine/cuda/loader.py",
)
LOADING_IMPORTS = (
    *RUNTIME_IMPORTS,
    "lenz.machines",
    "lenz.target",
    "lenz.machine.cpu.llvm.compile",  # links too; imports llvmlite late
    "lenz.machine.cuda.driver",
    "lenz.machine.cuda.graph",
    "lenz.machine.cuda.triton.compile",  # the compiler's version, for keys; imports Triton late
    "lenz.machine.cuda.triton.pool",  # starts the compile server while the graph is captured
    "lenz.machine.cuda.triton.worker",
)

# Heavy packages, and the files that may import them inside of functions.
LAZY = ("llvmlite", "triton")
LAZY_FILES = (
    "machine/cpu/llvm/compile.py",
    "machine/cuda/triton/compile.py",
    "plan/native.py",
    "runtime/user_kernel.py",  # for what the user's own kernels take: Triton is there already
)

# Nobody imports these.
BANNED_IMPORTS = ("torch._inductor", "pickle", "marshal", "shelve", "dill", "cloudpickle")

# Private modules and functions of torch outside of frontend/, each with its reason.
TORCH_PRIVATE = {
    "artifact/specs.py": {
        "torch.utils._pytree": "torch.export describes arguments and results in its terms"
    },
    "artifact/loaded.py": {"torch.utils._pytree": "takes arguments apart as torch.export did"},
    "debug/precise.py": {
        "torch.utils._python_dispatch": "sees every op below autograd, which no public hook does",
        "torch._C._current_graph_task_id": "whether autograd's engine runs, which checks dtypes",
    },
    "commands/minimise.py": {
        "torch._functorch.fx_minifier": "torch's delta debugging of graphs has no public name"
    },
    "debug/counters.py": {"torch._dynamo.utils": "torch's counters, where its users look for them"},
    "debug/torch_logs.py": {"torch._logging": "the loggers behind TORCH_LOGS have no public door"},
    "lower/fallback.py": {"torch._ops": "the classes of operators have no public name"},
    "lower/user_kernel.py": {"torch._ops": "the classes of operators have no public name"},
    "lower/walk.py": {"torch._ops": "the classes of operators have no public name"},
    "page/guards.py": {
        "torch._dynamo.utils": "why torch recompiled, which it tells its logs alone",
        "torch._guards.TracingContext": "the conditions of the graph that is being compiled",
    },
    "runtime/executor.py": {
        "torch._C._dynamo.guards": "allocates a tensor in a tenth of the time",
        "torch._C.DispatchKey": "finds a higher-order op's function 30 us faster",
        "torch._C._AutoDispatchBelowAutograd": "what operators that call bodies use themselves",
        "torch._C._cuda_exchangeDevice": "0.1 us, where the public context manager takes 2 us",
        "torch._C._cuda_maybeExchangeDevice": "what the public context manager does at its end",
        "torch._C._cuda_getCurrentRawStream": "the driver's handle, without an object around it",
        "torch._C._get_dispatch_mode": "whether a mode makes fake tensors, where there is one",
        "torch._C._len_torch_dispatch_stack": "whether there is one: 40 ns in every call",
        "torch._C._TorchDispatchModeKey": "the name of that mode",
        "torch._C._storage_Use_Count": "how many tensors hold a memory, which nothing public tells",
    },
    "machine/cuda/graph.py": {
        "torch._C._cuda_beginAllocateCurrentThreadToPool": "a pool that frees nothing by itself",
        "torch._C._cuda_endAllocateToPool": "where MemPool calls cudaFree, which ends a capture",
        "torch._C._cuda_releasePool": "the same",
        "torch.cuda._sleep": "a node of a graph without memory, so that torch does not warn",
    },
    "runtime/graph.py": {
        "torch._higher_order_ops.triton_kernel_wrap": "the table in which graphs name GPU kernels"
    },
    "runtime/native.py": {
        "torch._C._dispatch_keys": "finds out where a tensor keeps them, for one comparison",
        "torch._C.DispatchKey": "the keys of autograd, below which library calls run",
        "torch._C.DispatchKeySet": "the bits of these keys",
        "torch._neg_view": "makes a tensor that native code must not take for a plain one",
    },
}

# Files that may read the environment, and files that may write to the disk.
ENVIRONMENT_FILES = ("options.py",)
WRITING_FILES = {
    "private.py": "the disk cache, debug folders and repros, in folders of this user alone",
    "runtime/store.py": "deletes old entries of the disk cache",
    "debug/trace.py": "makes debug folders",
    "perf_map.py": "names of kernels for `perf`, if an option asks",
    "debug/profile.py": "profiles and traces that the user asks for",
    "debug/values.py": "values that the user asks for, in a debug folder",
    "page/report.py": "reports that the user asks for",
    "commands/minimise.py": "a script that shows a fault, in a debug folder",
    "commands/doctor.py": "an empty file in the folder of the cache, which is deleted at once",
    "commands/upkeep.py": "bundles of the cache, where the user asks for them",
    "artifact/container.py": "artifacts, where the user asks for them",
    "artifact/show.py": "the results of an artifact, in a folder that the user names",
    "artifact/export.py": "a store for machine code, deleted when the artifact is made",
    "artifact/saved.py": "a store for machine code where there is no cache, likewise",
}

# Files that run text as code, and where they have it from.
EXEC_FILES = {
    "loading.py": "the Python source of a plan, printed just before",
    "machine/cuda/triton/compile.py": "Triton takes kernels as functions, just emitted",
}

# Module-level objects that change while the program runs.  There are four kinds: intern tables,
# memo tables of pure functions on interned objects, registries that imports fill, and kernels by
# number; and what guards the release of the first two.
INTERNED, MEMO, REGISTRY = "intern table", "memo of a pure function", "registry, filled by imports"
LISTED = "kernels by number, for graphs, whose ops take no objects; empty when the graphs are gone"
STATE = {
    "ir/op.py": {"_OPS": REGISTRY, "_ADDED": REGISTRY},
    "ir/expr.py": {"_TABLE": INTERNED, "_BUILDERS": REGISTRY, "_WALKS": MEMO},
    "ir/interned.py": {
        "_COUNTS": "who compiles, so that no table is emptied meanwhile",
        "_LOCK": "of the counts",
    },
    "lower/complex.py": {"_RULES": REGISTRY},
    "lower/registry.py": {"_BY_OVERLOAD": REGISTRY},
    "machines.py": {"_HALVES": REGISTRY},
    "ops/fold.py": {"_RULES": REGISTRY},
    "runtime/graph.py": {"_NUMBERS": LISTED, "_KERNELS": LISTED},
    "sym/expr.py": {
        "_INTS": INTERNED,
        "_VARS": INTERNED,
        "_ADDS": INTERNED,
        "_MULS": INTERNED,
        "_DIVISIONS": INTERNED,
        "_EXTREMES": INTERNED,
    },
}

# Words that say nothing about what a file or a class is for.
EMPTY_WORDS = ("util", "utils", "common", "base", "helper", "helpers", "misc", "stuff")
EMPTY_CLASS_WORDS = ("Manager", "Handler", "Helper", "Util")

# Words that no file of the repository holds, in two parts so that this file may be read as well.
MACHINE_WORDS = ("/wor" + "k/", "/roo" + "t/", "py" + "pi", "/hom" + "e/")

# Public names that several files define, with how many and why. A lowering has the name of its aten
# op and a scalar op that of its function, so the rooms of both are left out.
NAMED_AFTER_OPS = ("ops", "lower")
MACHINE_HALF = "the same part of each machine, which does not know the other"
GRAPH_AND_KERNEL = "the same of a graph and of a kernel"
COMMAND = "a subcommand of `python -m lenz`, by its name"
REPEATED_NAMES = {
    "Accumulator": (2, MACHINE_HALF),
    "Indices": (2, MACHINE_HALF),
    "Scan": (2, GRAPH_AND_KERNEL),
    "Sort": (2, GRAPH_AND_KERNEL),
    "Store": (2, "the statement of a kernel; the disk cache"),
    "Value": (2, "a value while a kernel is interpreted, and while it is emitted"),
    "Values": (2, MACHINE_HALF),
    "bodies_of": (2, GRAPH_AND_KERNEL),
    "build": (3, "makes what its room gives: FxProgram, Schedule, Plan"),
    "compile": (2, MACHINE_HALF),
    "constant": (2, MACHINE_HALF),
    "dedup": (2, "the same pass over FX graphs and over graphs of lenz"),
    "dtype_of": (2, "of a torch dtype; `ir/text.py` reads one, as all its functions `..._of`"),
    "explain": (2, "the function for users and its subcommand"),
    "export": (2, COMMAND),
    "forms": (2, MACHINE_HALF),
    "function": (2, MACHINE_HALF),
    "laid": (2, "`runtime/graph.py` has what plans call, as ops of FX graphs"),
    "legalise": (2, MACHINE_HALF),
    "load": (5, "an element of a tensor; plans, artifacts and the kernels of each machine"),
    "loss": (3, "asked of the machine; the schedule's own adds what holds for all"),
    "main": (3, "of three programs"),
    "map_bodies": (2, GRAPH_AND_KERNEL),
    "memory_type": (2, MACHINE_HALF),
    "read": (2, "the text of the IR; the file of an artifact"),
    "scattered": (2, MACHINE_HALF),
    "show": (2, "the text of the IR; the text of a size"),
    "verify": (2, "of the IR; " + COMMAND),
    "write": (2, "a file of the cache; an artifact"),
}

# Rooms whose output is text that has to be the same in every process.
DETERMINISTIC = ("sym", "ir", "ops", "lower", "opt", "schedule", "machine", "plan", "frontend")

# Files of these rooms that read a clock, of which no text depends.
CLOCK_FILES = {
    "machine/cuda/triton/worker.py": "how long the server lets a kernel take",
    "machine/cuda/tune/bench.py": "how long the kernels of a search take",
}

# Rooms that know scalar ops only as entries of the table.
NO_OP_NAMES = ("machine", "schedule", "opt", "plan", "runtime")
