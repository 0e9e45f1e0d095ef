"""Load and run compiled plans. The plan is the only part of the compiler that is imported."""
