#!/bin/sh
# Makes sure that the folder $1 is a virtual environment of Python 3.12 or 3.13 with pip. One that
# already fits is kept as it is; one that does not is replaced.
set -eu
venv=$1
fits='import sys, pip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))'
if "$venv/bin/python" -I -c "$fits" 2>/dev/null; then exit 0; fi
python=$(sh "$(dirname "$0")/find_python.sh")
echo "Creating $venv with $python"
"$python" -m venv --clear "$venv"
