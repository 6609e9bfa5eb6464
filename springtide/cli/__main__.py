"""`python -m springtide.cli` is `springtide`."""

from springtide.cli import main

if __name__ == "__main__":
    main()
