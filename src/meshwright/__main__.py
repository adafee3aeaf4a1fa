"""`python -m meshwright`: the command as a module, which is how launchers start it in every rank."""

from meshwright.cli.main import run

if __name__ == "__main__":
    run()
