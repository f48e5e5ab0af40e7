#!/bin/sh
# Makes /opt/toolhost from the sources in $1; run by the Dockerfile, as root, inside the base image.
# Wheels beside this script (pip's own among them) are used alone, without a network; else the base's pip fetches the rest.
set -eu
here=$(dirname "$0")
source=$1
environment=/opt/toolhost
extras=harmony,loop,gateway,exa,fast

fail() { echo "install: $*" >&2; exit 1; }
command -v python3 >/dev/null || fail "the base image has no python3 on its PATH"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "the base image needs Python >= 3.11"
python3 -m venv --without-pip "$environment" || fail "the base image's Python lacks its venv module"
python=$environment/bin/python3

set -- install --no-input --disable-pip-version-check --no-cache-dir --root-user-action=ignore --no-compile
wheel=$(find "$here" -name 'pip-*.whl')
if [ -n "$wheel" ]; then
    "$python" "$wheel/pip" "$@" --no-index --find-links "$here" "$source[$extras]"
else
    python3 -m pip --version >/dev/null 2>&1 || fail "there are no wheels to install from, and the base image has no pip"
    python3 -m pip --python "$python" "$@" "$source[$extras]"
fi
"$python" -I -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/tests/' "$environment/lib"
"$environment/bin/toolhost" --version
