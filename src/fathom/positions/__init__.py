"""The `positions` section: how queries and keys learn where their tokens stand.

One file a method. Importing this package registers every method in it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
