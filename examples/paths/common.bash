# What these paths share: a temporary folder, an installation, and a server that ends with the script.
# To be sourced from the root of the repository, in a shell with `set -euo pipefail`.

work=$(mktemp -d)
server="" # process of eeserve
load=""   # process that sends requests

clean_up() {
    for process in $load $server; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap clean_up EXIT

title() { printf '\n== %s (after %d s)\n' "$1" "$SECONDS"; }

fail() {
    echo "FAILED: $1" >&2
    for log in "$work"/*.log; do
        [ -f "$log" ] && { echo "--- $log" >&2; tail -n 20 "$log" >&2; }
    done
    exit 1
}

copy_source() { # copy_source FOLDER: the repository, without what is built in it
    mkdir "$1"
    tar --exclude=./.git --exclude=./.venv --exclude=./build -cf - . | tar -xf - -C "$1"
}

# Install with further packages, unless $PYTHON names a python that has all. Sets $PYTHON, $commands.
install_offramp() {
    title "Install"
    if [ -z "${PYTHON:-}" ]; then
        python3 -m venv "$work/venv"
        PYTHON=$work/venv/bin/python
        # pip builds in the folder that it installs from: a copy keeps this one clean. In a clone of
        # your own, `pip install '.[compile]' -c constraints.txt` is all.
        copy_source "$work/source"
        "$PYTHON" -m pip install --quiet "$work/source[compile]" -c constraints.txt
        if [ $# -gt 0 ]; then "$PYTHON" -m pip install --quiet "$@"; fi
    fi
    # An absolute path, without following links: the python of a virtual environment is one.
    commands=$(cd "$(dirname "$PYTHON")" && pwd)
    PYTHON=$commands/$(basename "$PYTHON")
    [ -x "$commands/eeserve" ] || fail "$commands has no eeserve; expected it next to $PYTHON"
}

# Wait for the server's end. Status 0: all requests were answered.
stopped() {
    local code=0
    wait "$server" || code=$?
    server=""
    [ "$code" = 0 ] || fail "eeserve ended with status $code"
}
