"""Say in one sentence what is wrong with this Python, if it cannot make the book's environment.

Written so that every Python since 2.7 can read it: an old one is what it must be able to refuse.
"""

import sys

version = "%d.%d" % sys.version_info[:2]
if version not in ("3.11", "3.12", "3.13"):
    sys.exit(
        "gbattn is tested on Python 3.11, 3.12 and 3.13, and %s is Python %s: "
        "name another, for example with `make book PYTHON=python3.12`." % (sys.executable, version)
    )

try:
    import ensurepip  # noqa: F401  Debian packs it apart from Python, and venv without it
    import venv  # noqa: F401
except ImportError:
    sys.exit(
        "This Python cannot make virtual environments: install the missing part first "
        "(on Debian and Ubuntu: `apt-get install python%s-venv`)." % version
    )
