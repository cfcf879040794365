"""The `ktk` command, also as `python -m ktk`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an error that ktk foresaw is one sentence and not a traceback."""
    from ktk.cli import app
    from ktk.errors import BackendError, CheckpointError

    try:
        app(prog_name="ktk")
    except (BackendError, CheckpointError) as error:
        sys.exit(f"ktk: {error}")


if __name__ == "__main__":
    main()
