"""Support for methods in which every token takes as many steps as it needs. `stack.py` is their layer stack."""
