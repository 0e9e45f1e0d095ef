"""Speed and memory of lenz beside eager and the peer, torch's default backend.

Run `python -m benchmarks` (all groups), or name groups; `--quick` for a look in minutes.  On a
machine with a GPU, `python -m benchmarks.gpu`.  Nothing here is a test: numbers depend on the
machine and on what else it does.
"""
