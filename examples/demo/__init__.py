"""The demo, `make demo`: real models on real data, through eager and through lenz."""
