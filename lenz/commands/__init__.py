"""What some commands of `python -m lenz` do: `cli.py` reads their arguments and calls them."""
