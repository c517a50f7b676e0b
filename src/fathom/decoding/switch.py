"""The one switch of this room: with `FAST = False` transformers' own loop runs everything, each prompt in one piece."""

FAST = True
