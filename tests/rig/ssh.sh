#!/bin/sh
# What launchers call for ssh, on the login host: ssh.sh [options] HOST COMMAND...
# As with ssh, the command gets a fresh environment. C10D_TEST_COMMAND passes, so that who kills a job finds the
# launcher's helpers by it (see harness/marks.py). This file runs as a copy in the rig's folder.
while case $1 in -*) true ;; *) false ;; esac; do shift; done
read -r machine_pid pid <"${0%/*}/$1.pid" || exit 255
shift
exec nsenter -t "$pid" -n -u -i -m -p env -i HOME=/ PATH=/usr/local/bin:/usr/bin:/bin \
    C10D_TEST_COMMAND="$C10D_TEST_COMMAND" sh -c "$*"
