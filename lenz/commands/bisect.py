"""`python -m lenz bisect`: the first graph, pass, rewrite or kernel that makes a program wrong.

A program is wrong if lenz raises, if the process dies or hangs, or if a result is farther from
float64 than twice eager. Each probe halves what is left, in a process of its own: the graphs in the
order of compilation, the stages of one graph by the interpreter, and then the rewrites of one stage
or the launches of the schedule.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt

from lenz.commands.minimise import minimise
from lenz.commands.probe import ALL, STAGES, Judged, Outcome, Probe
from lenz.errors import UserError
from lenz.process import ask


def halve(good: int, bad: int, is_bad: Callable[[int], object]) -> int:
    """The number next to a good one that is bad, between a good one and a bad one."""
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if is_bad(middle) else (middle, bad)
    return bad


class Bisection(Judged):
    """The search in one program, in the last graph that its probe compiles."""

    def staged(self, stage: str, fuel: int = ALL) -> Outcome:
        """The graph after a stage, by the interpreter; as code if the interpreter cannot run it."""
        found = self.run(stage=stage, fuel=fuel)
        is_told = found.kind != "unknown" and not found.what.startswith("hangs")
        return found if is_told else self.run(stage=stage, fuel=fuel, given=0)

    def rewrite(self, low: int, high: int, run: Callable[[int], Outcome]) -> tuple[int, str]:
        """The first bad one of some rewrites, and its name; 0 if they are not to blame."""
        if high <= low or run(low).kind or not run(high).kind:
            return 0, ""
        n = halve(low, high, lambda n: run(n).kind)
        return n, f", rewrite {n}: {run(n).rewrite or 'the one after ' + run(n - 1).rewrite}"

    def culprit(self) -> tuple[str, list[str], str]:
        """What is wrong in the graph: its name, lines of IR, and the user's line."""

        def at(k: int) -> Outcome:
            return self.staged(STAGES[k])

        if not (last := at(len(STAGES) - 1)).kind:
            return self.launch(last.used)
        k = 0 if at(0).kind else halve(0, len(STAGES) - 1, lambda k: at(k).kind)
        before, after = at(k - 1) if k else Outcome(), at(k)
        run = partial(self.staged, STAGES[k])
        # A process that died has not told how many rewrites there were.
        n, name = self.rewrite(before.used, after.used or before.used + 1000, run)
        if n:
            before, after = run(n - 1), run(n)
        if after.kind == "raises":
            return f"the stage {STAGES[k]}{name}", [after.lines[0][0]], after.lines[0][1]
        return f"the stage {STAGES[k]}{name}", *(changed(before, after) if k else ([], ""))

    def launch(self, low: int) -> tuple[str, list[str], str]:
        """The last wrong kernel, or the plan if it is none. `low` rewrites are right."""
        kernels, right = self.run(given=0), self.run(given=ALL)
        if kernels.kind in ("", "unknown") or not right.lines:
            title = kernels.kind and f"a kernel or the plan: {kernels.what}"
            return title or "the plan; its kernels are right", [], ""
        n, name = self.rewrite(low, right.used, lambda n: self.run(fuel=n))
        if right.kind:
            both = [self.run(fuel=k, given=ALL) for k in (n - 1, n)]
            return f"the schedule{name}", *(changed(*both) if n else ([], ""))
        k = halve(len(right.lines), 0, lambda n: self.run(given=n).kind)
        text, where = right.lines[k]
        title = f"kernel {text.split('@')[1].split()[0]}, launch {k + 1} of {len(right.lines)}"
        return f"{title}{name.replace(',', ', since', 1)}", text.rstrip().splitlines(), where


def changed(old: Outcome, new: Outcome) -> tuple[list[str], str]:
    """The lines of IR that differ, marked with - and +, and the user's line of the first."""
    before, after = [text for text, _ in old.lines], [text for text, _ in new.lines]
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")]
    told = [x for x in lines if x[:3] not in ("---", "+++") and x[:2] != "@@"]
    return told, next((where for text, where in new.lines if where and text not in before), "")


def bisected(file: str, function: str, arguments: Sequence[str], seconds: float) -> int:
    """Find what is wrong with a program under lenz, and print it.

    A run may take `seconds`, and making the graph small about as long. Returns 0 if nothing is
    wrong, 1 if something is, 2 if the program fails in eager. Raises UserError if the file or the
    function is missing.
    """
    search = Bisection(program := Probe(file, function, (*arguments,)), seconds)
    if why := search.begin():
        if why.startswith("UserError: "):  # the file or the function is missing
            raise UserError(why.removeprefix("UserError: "))
        print(f"The program itself fails in eager.\n{why}".rstrip())
        return 2
    if not (whole := search.run()).kind:
        print(f"Nothing is wrong in {len(whole.graphs)} graphs: {whole.what or search.why}.")
        return 0
    if whole.error > 0:  # the interpreter may round less well than compiled code
        search.most = max(search.most, sqrt(search.most * min(whole.error, 1.0)))
    captured = search.run(last=0)
    if captured.kind:
        print(f"It is wrong before lenz compiles: {captured.what}. Try backend='aot_eager'.")
        return 1
    last = halve(0, len(captured.graphs), lambda n: search.run(last=n).kind)
    search.program = replace(program, last=last)
    fault, title = search.run(), captured.graphs[last - 1]
    print(f"{title}, of {len(captured.graphs)} graphs, is the first bad one: {fault.what}")
    name, lines, where = search.culprit()
    told = [f"    {text[:300]}" for text in lines if text][:12]
    print("\n".join([f"The fault is in {name}", *told, *([f"    at {where}"] if where else [])]))
    made, why = ask(minimise, search.program, fault, seconds, seconds=5 * seconds)
    print(made or f"The graph is not made smaller: {why.strip().splitlines()[-1]}")
    return 1
