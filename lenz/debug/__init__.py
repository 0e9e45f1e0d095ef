"""Looking at a compilation: logs, debug folders, repros, reports."""
