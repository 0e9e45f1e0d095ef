"""Compiled programs as files: made by the compiler, run by processes that do not import it."""
