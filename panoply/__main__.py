"""`python -m panoply` is the command `panoply`."""

from panoply.cli import main

main()
