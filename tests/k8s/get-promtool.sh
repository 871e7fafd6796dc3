#!/bin/sh
# Put promtool at the path $1: the one that is installed, or that of Debian's package, unpacked and not installed.
set -eu

if found=$(command -v promtool); then
    ln -sf "$found" "$1"
    exit
fi
if ! command -v apt-get >/dev/null; then
    echo "promtool is not installed and there is no apt-get to fetch it with: the alerts will NOT be tried" >&2
    exit
fi
mkdir -p "$(dirname "$1")"
destination=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
cd "$directory"
mkdir -p lists/partial cache/archives/partial unpacked
# With lists of its own nobody needs to be root, and those of the machine stay as they are.
own="-o Dir::State::Lists=$directory/lists -o Dir::Cache=$directory/cache -o APT::Sandbox::User="
apt-get -qq download prometheus 2>/dev/null || { apt-get -qq $own update && apt-get -qq $own download prometheus; }
dpkg-deb --extract prometheus_*.deb unpacked
cp unpacked/usr/bin/promtool "$destination"
