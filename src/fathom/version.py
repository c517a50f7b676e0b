"""The version of the package, on the lowest floor: saved configs carry it."""

__version__ = "0.2.0"
