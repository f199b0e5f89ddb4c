#!/bin/sh
# Prints the path of a Python 3.12 or 3.13 that can create virtual environments, or says what to
# install and exits with 3. $PYTHON, when set, is the only candidate. A candidate counts only if it
# runs: a version manager's stub for a version that is not active exits with an error.

probe='
import sys
if sys.version_info[:2] not in ((3, 12), (3, 13)):
    sys.exit(1)
import ensurepip, venv
print(getattr(sys, "_base_executable", "") or sys.executable)
'

# Prints the interpreter behind the command "$@" if it fits.
try() {
    found=$("$@" -I -c "$probe" 2>/dev/null </dev/null) && [ -x "$found" ] && printf '%s\n' "$found"
}

# Every match on PATH, not only the first: a stub may stand before a working interpreter.
on_path() {
    rest=$PATH:
    while [ -n "$rest" ]; do
        folder=${rest%%:*}
        rest=${rest#*:}
        if [ -x "${folder:-.}/$1" ] && try "${folder:-.}/$1"; then return 0; fi
    done
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a working Python 3.12 or 3.13 with the venv module." \
        "Point it at one, or unset it." >&2
    exit 3
fi

for name in python3.12 python3.13 python3 python; do
    on_path "$name" && exit 0
done
for version in 3.12 3.13; do
    for candidate in "${PYENV_ROOT:-${HOME:-/root}/.pyenv}/versions/$version"*/bin/python; do
        [ -x "$candidate" ] && try "$candidate" && exit 0
    done
done
for version in 3.12 3.13; do
    if command -v uv >/dev/null 2>&1; then
        candidate=$(uv python find --no-project "$version" 2>/dev/null) && try "$candidate" && exit 0
    fi
    if command -v py >/dev/null 2>&1; then
        try py "-$version" && exit 0
    fi
done
echo "Python 3.12 or 3.13 with the venv module was not found: install one (Debian and Ubuntu:" \
    "apt install python3.12-venv; pyenv install 3.12; or uv python install 3.12)" \
    "or set PYTHON to its path." >&2
exit 3
