"""Methods in which a token runs through the layers as often as it needs: `stack.py` is the layer stack for them."""
