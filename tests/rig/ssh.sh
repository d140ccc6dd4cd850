#!/bin/sh
# What launchers call for ssh, on the login host: ssh.sh [options] HOST COMMAND...
# As with ssh, the command gets a fresh environment. C10D_TEST_COMMAND passes, so that who kills a job finds the
# launcher's helpers by it (see harness/marks.py). TMPDIR is a host's own, as Open MPI's helpers take names there that
# differ by no more than their process id. This file runs as a copy in the rig's folder.
while case $1 in -*) true ;; *) false ;; esac; do shift; done
folder=${0%/*} host=$1
shift
read -r machine_pid pid <"$folder/$host.pid" || exit 255
mkdir -p "$folder/$host.tmp"
exec nsenter -t "$pid" -n -u -i -m -p env -i HOME=/ PATH=/usr/local/bin:/usr/bin:/bin TMPDIR="$folder/$host.tmp" \
    C10D_TEST_COMMAND="$C10D_TEST_COMMAND" sh -c "$*"
