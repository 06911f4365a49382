#!/bin/sh
# Installs redis-server, which the tests start on a free port of their own, and openssl, which makes their certificates.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    # The tests start their own server; the package's service must not.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server openssl >/dev/null
else
    echo "the tests need redis-server and openssl: install them with your package manager" >&2
    exit 1
fi
