"""Run the command line: `python -m arcuate`."""

from arcuate.cli import main

main()
