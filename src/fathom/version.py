"""The version of the package, on the lowest floor: saved configs carry it."""

__version__ = "0.1.0"
