#!/bin/bash
# Runs this package's tests, and those of the ceilings, as root in a virtual machine, on file systems with project
# quotas, which few kernels and hosts have. `make quota-vm` calls it, after it has
# installed what it takes. It leaves nothing behind.
set -euo pipefail

cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt-get drops its privileges
for package in project ceiling; do CGO_ENABLED=0 ${GO:-go} test -c -o "$work/root/$package.test" "../$package"; done
cd "$work"
mkdir -p root/{bin,proc,sys,dev,tmp,modules,ext4,xfs,counted,plain}

# Debian's kernel is unpacked, not installed.
apt-get download -qq "$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')"
dpkg -x linux-image-*.deb kernel
version=$(ls kernel/lib/modules)
/sbin/depmod -b kernel "$version"
/sbin/modprobe -d kernel -S "$version" --show-depends -a virtio_pci virtio_blk quota_v2 xfs |
	awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >modules
n=100
while read -r module; do cp "$module" "root/modules/$((n++)).ko"; done <modules

cp /bin/busybox root/bin/
cat >root/init <<'END'
#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc none /proc && mount -t sysfs none /sys && mount -t devtmpfs none /dev
mkdir -p /dev/shm
for m in /modules/*.ko; do insmod "$m"; done
uname -r
mount -t ext4 -o prjquota /dev/vda /ext4 && mount -t xfs -o prjquota /dev/vdb /xfs &&
	mount -t ext4 /dev/vdc /plain && mount -t xfs -o pqnoenforce /dev/vdd /counted && (
	for dir in /ext4 /xfs; do
		echo "on $dir"
		BERM_PROJECT_DIR=$dir BERM_PROJECT_LACKING=/plain:/counted:/tmp /project.test -test.v -test.run Kernel -test.timeout 2m || exit
		BERM_PROJECT_DIR=$dir /ceiling.test -test.v -test.run Kernel -test.timeout 2m || exit
	done
	echo quota-vm: passed
)
poweroff -f
END
chmod 755 root/init
(cd root && find . | busybox cpio -o -H newc) >initrd 2>cpio.log

for disk in vda vdb vdc vdd; do truncate -s 512M "$disk"; done
/sbin/mkfs.ext4 -q -O project,quota vda
/sbin/mkfs.ext4 -q -O project,quota vdc
/sbin/mkfs.xfs -q vdb
/sbin/mkfs.xfs -q vdd
disks=()
for disk in vda vdb vdc vdd; do disks+=(-drive "file=$disk,format=raw,if=virtio,cache=unsafe"); done
timeout 5m qemu-system-x86_64 -M q35 -accel tcg -cpu max -m 1024 -nographic -no-reboot -nic none "${disks[@]}" \
	-kernel kernel/boot/vmlinuz-* -initrd initrd -append 'console=ttyS0 quiet panic=-1' </dev/null | tee console
grep -q '^quota-vm: passed' console
