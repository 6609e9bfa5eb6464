"""Add to each `name==version` line of stdin the hashes of all files of that release; run by scripts/lock.sh.

Nothing is resolved: it serves lists that are installed with --no-deps, where a resolver would add or refuse packages.
Needs pip-tools.
"""

import sys

from pip._internal.req.constructors import install_req_from_line
from piptools.repositories import PyPIRepository


def main() -> None:
    repository = PyPIRepository([], cache_dir=sys.argv[1])
    pins = [line.split("#")[0].strip() for line in sys.stdin]
    for pin in sorted(filter(None, pins), key=str.lower):
        with repository.allow_all_wheels():
            hashes = sorted(repository.get_hashes(install_req_from_line(pin)))
        if not hashes:
            sys.exit(f"lock: {pin} has no files; correct the version")
        print(" \\\n    ".join([pin, *(f"--hash={digest}" for digest in hashes)]))


if __name__ == "__main__":
    main()
