"""`python -m fathom.cli`: the command for launchers that start a module (torchrun, accelerate launch)."""

from fathom.cli import main

main()
