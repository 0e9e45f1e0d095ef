"""Schedule -> Plan: memory, lifetimes and calls as typed steps, and the readers of a plan."""
