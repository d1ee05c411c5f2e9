"""Print the table of schemes: ``python -m fmtsim.optim``."""

from fmtsim.optim.table import markdown

if __name__ == "__main__":
    print(markdown())
