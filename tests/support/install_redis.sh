#!/bin/sh
# Installs Debian's redis-server, which the registry tests start on a free port of their own.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    # The tests start their own server; the package's service must not.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server >/dev/null
else
    echo "redis-server is not installed and the tests need it: install it with your package manager" >&2
    exit 1
fi
