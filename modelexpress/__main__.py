"""`python -m modelexpress` is the `modelexpress` command."""

from modelexpress.cli import main

if __name__ == "__main__":
    main()
