"""`python -m mhcgen`: the command line."""

from mhcgen.cli import main

main()
