"""Runs the checkout without installing it: `python cli.py emit --streams 4 --fuse pre`."""

from mhcgen.cli import main

main()
