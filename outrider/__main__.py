"""The command `outrider`, also available as `python -m outrider`."""

from __future__ import annotations

import sys

from outrider.installation import check_packages

EXIT_NO_START = 2


def main() -> int:
    try:
        check_packages()
    except ImportError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_NO_START
    from deploy.cli.main import main  # only after the check

    return main()


if __name__ == "__main__":
    sys.exit(main())
