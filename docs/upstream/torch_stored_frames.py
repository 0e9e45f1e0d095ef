"""torch's store of compiled frames returns wrong numbers, and cannot compile a frame again.

    TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) TORCH_CACHING_PRECOMPILE=1 python torch_stored_frames.py

The first process stores three frames for tensors of size 2; the second one loads them:

- `scaled` reads a number from a class. Stored guards on what a module or class holds are built from
  its value in the second process, so they hold there, and the graph has the number of the first.
- `applied` calls a function. Guards on the identity of functions are dropped.
- `counted` is compiled again for size 3, which raises `AssertionError: Name '__builtins_dict___0'
  already exists in scope`: globals are numbered from 0 in each process, and loaded frames have
  installed theirs.
"""

import os
import subprocess
import sys

import torch
from torch._dynamo.package import DynamoCache

is_second = len(sys.argv) > 1
act = torch.cos if is_second else torch.sin


class Config:
    scale = float(os.environ.get("SCALE", "2"))


def scaled(x):
    return x * Config.scale


def applied(x):
    return act(x)


def counted(x):
    return x * max(1, len(x))


def store(gm, inputs):  # what a backend does whose graphs torch can pickle
    DynamoCache.record_eager_backend(gm._backend_id, gm)
    return gm


if __name__ == "__main__":
    x = torch.ones(2)
    for f in scaled, applied, counted:
        run = torch.compile(f, backend=store)
        print(f.__name__, "right" if torch.equal(run(x), f(x)) else "wrong")
    if not is_second:
        torch.compiler.save_cache_artifacts()
        command = [sys.executable, __file__, "second"]
        sys.exit(subprocess.call(command, env=os.environ | {"SCALE": "3"}))
    run(torch.ones(3))
