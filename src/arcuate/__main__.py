"""."""

from arcuate.cli import main

main()
