"""Compiled programs as files: written by the compiler, run by processes that do not import it."""
