#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The first process of the emulated machine: four RDMA devices, then /lab/job. When it ends, so does the machine.
set -eu
export PATH=/usr/sbin:/usr/bin:/busybox HOME=/root LANG=C.UTF-8 TERM=linux
export PYTHONPATH=/lab/site:/lab/tests PYTHONUNBUFFERED=1

# busybox's: there is no poweroff before it is installed.
trap 'echo "init ended with status $?"; /usr/bin/busybox poweroff -f' EXIT

/usr/bin/busybox --install -s /busybox
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
ln -s /proc/self/fd /dev/fd
for module in /lab/modules/*.ko; do
  insmod "$module"
done
# shellcheck disable=SC3045
ulimit -l unlimited
echo 1 >/proc/sys/kernel/panic_on_oops

# Both ends of a pair are in this machine, and still have to answer each other.
for name in all default; do
  echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter
  echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local
  echo 0 >/proc/sys/net/ipv6/conf/$name/accept_dad
done
ip link set lo up
subnet=1
for pair in a b; do
  ip link add "${pair}0" type veth peer name "${pair}1"
  for end in 0 1; do
    ip link set "$pair$end" mtu 4200 up
    ip address add "10.77.$subnet.$((end + 1))/24" dev "$pair$end"
    rdma link add "rxe$pair$end" type rxe netdev "$pair$end"
  done
  subnet=$((subnet + 1))
done
tries=0
until [ "$(rdma link | grep -c 'state ACTIVE')" = 4 ]; do
  tries=$((tries + 1))
  [ $tries -lt 300 ] || { rdma link; echo "the devices did not become ACTIVE"; exit 1; }
  sleep 0.1
done

cd /lab
# shellcheck source=/dev/null
. /lab/job
