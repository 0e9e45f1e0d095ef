"""Loading and running compiled plans.  Imports nothing of the compiler but its plan."""
