"""Schedule -> Plan: memory, lifetimes and calls as typed steps, and the readers of a plan."""

from lenz.plan.build import Given as Given
from lenz.plan.build import build as build
from lenz.plan.python import source as source
