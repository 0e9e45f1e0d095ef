"""The demo, `python -m lenz demo`: real models on real data, through eager and through lenz."""

from lenz.demo.run import demo as demo
