"""`python -m fathom`: the command for launchers that start a module (torchrun, accelerate launch)."""

from fathom_cli import main

main()
