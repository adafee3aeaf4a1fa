"""Room `cli` (level 8): one thin file per command. A file `X.py` with a function `X_command` is the command `X`."""
