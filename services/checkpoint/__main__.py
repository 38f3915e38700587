"""`python -m services.checkpoint --recipe FILE [--set KEY=VALUE]...`."""

from services.checkpoint.server import main

if __name__ == "__main__":
    main()
