"""The version of lenz, which artifacts and the package carry."""

__version__ = "0.1.0"
