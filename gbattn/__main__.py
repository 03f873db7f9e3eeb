"""``python -m gbattn`` does what the program gbattn does. Written by hand."""

import sys

from gbattn.lab.command_line import main

if __name__ == "__main__":
    sys.exit(main())
