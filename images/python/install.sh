#!/bin/sh
# Makes /opt/environment from the list beside this script; run by the Dockerfile, as root, inside the base image.
# Wheels beside it (pip's own among them) are used alone, without a network; else the base's pip fetches packages.
set -eu
here=$(dirname "$0")
environment=/opt/environment

fail() { echo "install: $*" >&2; exit 1; }
command -v python3 >/dev/null || fail "the base image has no python3 on its PATH"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "the base image needs Python >= 3.11"
python3 -m venv --without-pip "$environment" || fail "the base image's Python lacks its venv module"
python=$environment/bin/python3

set -- install --no-input --disable-pip-version-check --no-cache-dir --root-user-action=ignore \
    --only-binary :all: --no-compile -r "$here/requirements.txt"
wheel=$(find "$here" -name 'pip-*.whl')
if [ -n "$wheel" ]; then
    "$python" "$wheel/pip" "$@" --no-index --find-links "$here"
else
    python3 -m pip --version >/dev/null 2>&1 || fail "there are no wheels to install from, and the base image has no pip"
    python3 -m pip --python "$python" "$@"
fi

# Bytecode that is never checked against its source: both lie in a read-only layer. The packages' own tests, a third of
# the time, are left out.
"$python" -I -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/tests/' "$environment/lib"
"$python" -I -B "$here/verify.py" "$here/requirements.txt" || fail "the packages were installed, but not all of them work"
