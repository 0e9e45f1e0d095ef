"""Inspect a compilation: logs, debug folders, repros, reports."""
