"""The larger commands of `python -m lenz`: `cli.py` parses their arguments and calls them."""
