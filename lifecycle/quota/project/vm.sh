#!/bin/bash
# Runs this package's tests, those of the quotas, and those of a whole server with
# containerd, as root in a virtual machine, on file systems with project quotas, which few
# kernels and hosts have. `make quota-vm` calls it, after it has installed what it takes.
# That takes five to ten minutes, as all of it is emulated. It leaves nothing behind.
set -euo pipefail

cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt-get drops its privileges
for package in lifecycle/quota/project lifecycle/quota cmd/e2e; do
	(cd "../../../$package" && CGO_ENABLED=0 ${GO:-go} test -c -ldflags '-s -w' -o "$work/root/${package##*/}.test" .)
done
cp ../../../bin/berm "$work/root/berm"
cd "$work"
mkdir -p root/{bin,proc,sys,dev,tmp,run,ext4,xfs,counted,plain} boot/{bin,dev,modules,root}

# Debian's kernel is unpacked, not installed.
apt-get download -qq "$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ { print $2; exit }')"
dpkg -x linux-image-*.deb kernel
version=$(ls kernel/lib/modules)
/sbin/depmod -b kernel "$version"
/sbin/modprobe -d kernel -S "$version" --show-depends -a virtio_pci virtio_blk quota_v2 ext4 xfs overlay |
	awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >modules
n=100
while read -r module; do cp "$module" "boot/modules/$((n++)).ko"; done <modules

# It boots into a disk with the programs that a private containerd takes, and their libraries.
PATH=$PATH:/usr/sbin:/sbin
for program in containerd containerd-shim-runc-v2 ctr runc iptables ip; do
	path=$(command -v "$program")
	ldd "$path" | grep -o '/[^ ]*' | xargs cp -L --parents -t root "$path"
done
for plugins in /opt/cni/bin /usr/lib/cni /usr/libexec/cni; do test ! -d "$plugins" || cp -r --parents "$plugins" root; done
tee boot/bin/busybox <"$(command -v busybox)" >root/bin/busybox
cat >boot/init <<'END'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
for m in /modules/*.ko; do /bin/busybox insmod "$m"; done
/bin/busybox mount -t ext4 /dev/vda /root
exec /bin/busybox switch_root /root /init
END
cat >root/init <<'END'
#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/bin
/bin/busybox --install -s /bin
mount -t proc none /proc && mount -t sysfs none /sys && mount -t devtmpfs none /dev && mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/shm
ip link set lo up
uname -r
mount -t ext4 -o prjquota /dev/vdb /ext4 && mount -t xfs -o prjquota /dev/vdc /xfs &&
	mount -t ext4 /dev/vdd /plain && mount -t xfs -o pqnoenforce /dev/vde /counted && (
	export BERM_PROJECT_DIR BERM_PROJECT_LACKING=/plain:/counted:/tmp BERM_REQUIRE=containerd BERM_BIN=/berm
	for BERM_PROJECT_DIR in /ext4 /xfs; do
		for package in project quota e2e; do
			echo "$package on $BERM_PROJECT_DIR"
			"/$package.test" -test.v -test.run '^TestKernel' -test.timeout 20m || exit
		done
	done
	echo quota-vm: passed
)
poweroff -f
END
chmod 755 {boot,root}/{init,bin/busybox}
(cd boot && find . | busybox cpio -o -H newc) >initrd 2>cpio.log

for disk in vda vdb vdc vdd vde; do truncate -s 512M "$disk"; done
truncate -s 2G vda
/sbin/mkfs.ext4 -q -d root vda
/sbin/mkfs.ext4 -q -O project,quota vdb
/sbin/mkfs.xfs -q vdc
/sbin/mkfs.ext4 -q -O project,quota vdd
/sbin/mkfs.xfs -q vde
disks=()
for disk in vda vdb vdc vdd vde; do disks+=(-drive "file=$disk,format=raw,if=virtio,cache=unsafe"); done
timeout 40m qemu-system-x86_64 -M q35 -accel tcg -cpu max -smp 2 -m 2048 -nographic -no-reboot -nic none "${disks[@]}" \
	-kernel kernel/boot/vmlinuz-* -initrd initrd -append 'console=ttyS0 quiet panic=-1' </dev/null | tee console
grep -q '^quota-vm: passed' console
