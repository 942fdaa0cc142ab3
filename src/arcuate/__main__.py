"""Run the command line: `python -m arcuate`."""

from arcuate.cli import main

if __name__ == "__main__":  # a child process on a platform without fork imports this module again
    main()
