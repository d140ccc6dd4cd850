#!/bin/sh -e
# The first process of a host. Its last wait reaps orphans as well. See hosts.py.
#
#   host.sh FOLDER HOST
folder=$1 name=$2
while read -r key machine_pid pid rest; do [ "$key" != NSpid: ] || break; done </proc/self/status
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat /proc/sys/kernel/random/uuid >"$folder/$name.boot_id"
mount --bind "$folder/$name.boot_id" /proc/sys/kernel/random/boot_id
[ ! -e "$folder/$name.hosts" ] || mount --bind "$folder/$name.hosts" /etc/hosts
echo "$name" >/proc/sys/kernel/hostname
ip link set lo up
echo "$machine_pid $pid" >"$folder/$name.new"
mv "$folder/$name.new" "$folder/$name.pid"
sleep infinity &
wait
