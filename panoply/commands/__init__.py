"""One file a command: `add` gives the command line its parser, examples and function.

A new command is a file here with `add(commands)` and a line in `cli.ORDER`.
"""
