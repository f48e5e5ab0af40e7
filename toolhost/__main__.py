"""`python -m toolhost`."""

from toolhost.cli import main

if __name__ == "__main__":
    main()
