"""`python -m services.cli`: the `millrace` script where it is not on the path."""

from services.cli.app import main

if __name__ == "__main__":
    main()
