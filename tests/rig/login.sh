#!/bin/sh -e
# The first process of a rig, in namespaces of its own: makes the switch and the hosts, then waits for the end of
# its standard input. See hosts.py.
#
#   login.sh FOLDER PREFIX BITS HOST...
#
# Addresses are PREFIX1 (the login host's), PREFIX2, ... in networks of so many BITS.
#
# A host's file HOST.pid has its first process as two PIDs: the machine's, and the rig's. Both can be read only
# while the machine's /proc is mounted, which is why the rig mounts its own later.
here=${0%/*} folder=$1 prefix=$2 bits=$3; shift 3
# Usable at once: no host waits to hear whether an address is taken.
case $prefix in *:*) nodad=nodad ;; *) nodad= ;; esac
while read -r key machine_pid rest; do [ "$key" != NSpid: ] || break; done </proc/self/status

mount --bind "$folder/hosts" /etc/hosts
ip link set lo up
ip link add switch type bridge
# shellcheck disable=SC2086
ip addr add "${prefix}1/$bits" dev switch $nodad
ip link set switch up
for name; do
    unshare --net --uts --ipc --mount --pid --fork --kill-child=KILL \
        "$here/host.sh" "$folder" "$name" </dev/null >"$folder/$name.log" 2>&1 &
done
for name; do
    tries=0
    until [ -e "$folder/$name.pid" ]; do
        tries=$((tries + 1))
        if [ $tries -gt 500 ]; then cat "$folder/$name.log"; exit 1; fi
        sleep 0.01
    done
done

mount -t proc proc /proc
echo login >/proc/sys/kernel/hostname
last=1
for name; do
    read -r _ pid <"$folder/$name.pid"
    last=$((last + 1))
    ip link add "$name" type veth peer name eth0 netns "$pid"
    ip link set "$name" master switch up
    # shellcheck disable=SC2086
    nsenter -t "$pid" -n ip addr add "$prefix$last/$bits" dev eth0 $nodad
    nsenter -t "$pid" -n ip link set eth0 up
done

echo "ready $machine_pid"
cat >/dev/null  # the shell, waiting for it, reaps orphans as well
rm -rf "$folder"
