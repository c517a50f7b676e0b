"""The `mixer` section: what attention reads from earlier layers. One file a method; importing this registers them."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
