# docker run and create with their flags.

### run
same "$(docker run $IMAGE echo hello)" hello
### run --rm
same "$(docker run --rm $IMAGE echo hello)" hello
same "$(docker ps -aq)" ""
### run with an exit code
docker run --rm $IMAGE sh -c 'exit 7' || same $? 7
### run of a missing program
docker run --rm $IMAGE nosuch || same $? 127
### run of what isn't a program
docker run --rm $IMAGE /etc/passwd || same $? 126
### run -d
id=$(docker run -d $IMAGE sleep 100)
same "$(docker ps -q --no-trunc)" "$id"
### run -i
same "$(echo typed | docker run -i --rm $IMAGE cat)" typed
### run -t
has "$(docker run -t --rm $IMAGE sh -c 'test -t 1 && echo terminal')" terminal
### run -it
has "$(script -qec "docker run -it --rm $IMAGE sh -c 'test -t 0 && echo terminal'" /dev/null)" terminal
### run -a stdout
same "$(docker run --rm -a stdout $IMAGE sh -c 'echo out; echo err >&2')" out
### run -a stderr
same "$(docker run --rm -a stderr $IMAGE sh -c 'echo out; echo err >&2' 2>&1)" err
### run --name
docker run -d --name mine $IMAGE sleep 100
same "$(docker ps --format '{{.Names}}')" mine
### run --name of another
up mine
has "$(fails docker run --name mine $IMAGE true)" "already in use"
### run -e
same "$(docker run --rm -e A=b -e C="d e" $IMAGE sh -c 'echo $A $C')" "b d e"
### run -e from the environment
export FROM_HERE=yes
same "$(docker run --rm -e FROM_HERE $IMAGE sh -c 'echo $FROM_HERE')" yes
### run --env-file
printf 'A=b\n# no\nC=d\n' >env
same "$(docker run --rm --env-file env $IMAGE sh -c 'echo $A$C')" bd
### run -w
same "$(docker run --rm -w /tmp/deep $IMAGE pwd)" /tmp/deep
### run -u
same "$(docker run --rm -u 1000:1000 $IMAGE id -u)" 1000
### run -u by name
same "$(docker run --rm -u nobody $IMAGE id -un)" nobody
### run --group-add
has "$(docker run --rm --group-add 4242 $IMAGE id -G)" 4242
### run -h
same "$(docker run --rm -h box $IMAGE hostname)" box
### run --domainname
same "$(docker run --rm -h box --domainname example.org $IMAGE hostname -f)" box.example.org
### run --entrypoint
same "$(docker run --rm --entrypoint echo $IMAGE hello)" hello
### run --entrypoint of nothing
same "$(docker run --rm --entrypoint '' $IMAGE echo hello)" hello
### run --label
docker run -d --label a=b --label c $IMAGE sleep 100
same "$(docker ps --filter label=a=b --filter label=c --format '{{.Label "a"}}')" b
### run --label-file
echo a=b >labels
docker run -d --label-file labels $IMAGE sleep 100
same "$(docker ps --filter label=a=b -q | wc -l)" 1
### run has the labels that were given, and no more
docker run -d --name mine --label a=b $IMAGE sleep 100
same "$(field mine '{{json .Config.Labels}}')" '{"a":"b"}'
### run --cidfile
docker run -d --cidfile id $IMAGE sleep 100
same "$(docker ps -q --no-trunc)" "$(cat id)"
### run --detach-keys
up mine --detach-keys ctrl-a
### run --read-only
docker run --rm --read-only $IMAGE sh -c '! touch /x'
### run --read-only with --tmpfs
docker run --rm --read-only --tmpfs /run $IMAGE touch /run/x
### run --tmpfs with options
has "$(docker run --rm --tmpfs /data:rw,noexec,nosuid,size=8m,mode=1777 $IMAGE mount)" "size=8192k"
### run --shm-size
has "$(docker run --rm --shm-size 32m $IMAGE df -m /dev/shm)" 32
### run --init
has "$(docker run --rm --init $IMAGE cat /proc/1/cmdline)" init
### run --memory
up mine -m 64m
same "$(field mine '{{.HostConfig.Memory}}')" 67108864
### run --memory-swap
up mine -m 64m --memory-swap 64m
### run --memory-reservation
up mine -m 64m --memory-reservation 32m
### run --memory-swappiness
docker run --rm --memory-swappiness 0 $IMAGE true
### run --cpus
up mine --cpus 0.5
same "$(field mine '{{.HostConfig.NanoCpus}}')" 500000000
### run --cpu-shares
up mine --cpu-shares 512
same "$(field mine '{{.HostConfig.CpuShares}}')" 512
### run --cpu-period and --cpu-quota
up mine --cpu-period 100000 --cpu-quota 50000
### run --cpuset-cpus
up mine --cpuset-cpus 0
### run --pids-limit
up mine --pids-limit 50
same "$(field mine '{{.HostConfig.PidsLimit}}')" 50
### run --blkio-weight
docker run --rm --blkio-weight 300 $IMAGE true
### run --oom-kill-disable [policy]
docker run --rm -m 64m --oom-kill-disable $IMAGE true
### run --oom-score-adj
docker run --rm --oom-score-adj 500 $IMAGE grep 500 /proc/self/oom_score_adj
### run --ulimit nofile
same "$(docker run --rm --ulimit nofile=1000:2000 $IMAGE sh -c 'ulimit -n')" 1000
### run --ulimit nproc
docker run --rm --ulimit nproc=100 $IMAGE true
### run --ulimit core
same "$(docker run --rm --ulimit core=0 $IMAGE sh -c 'ulimit -c')" 0
### run --ulimit memlock
docker run --rm --ulimit memlock=65536 $IMAGE true
### run --ulimit stack
docker run --rm --ulimit stack=8388608 $IMAGE true
### run --cap-drop
docker run --rm --cap-drop CHOWN $IMAGE sh -c '! chown nobody /tmp'
### run --cap-drop ALL
has "$(docker run --rm --cap-drop ALL $IMAGE grep CapEff /proc/self/status)" 0000000000000000
### run --cap-drop ALL --cap-add
docker run --rm --cap-drop ALL --cap-add CHOWN $IMAGE chown nobody /tmp
### run --cap-add of a default capability
docker run --rm --cap-add NET_BIND_SERVICE $IMAGE true
### run --cap-add SYS_ADMIN [policy]
docker create --cap-add SYS_ADMIN $IMAGE
### run --privileged [policy]
docker create --privileged $IMAGE
### run --device [policy]
docker create --device /dev/null:/dev/x $IMAGE
### run --pid host [policy]
docker create --pid host $IMAGE
### run --ipc host [policy]
docker create --ipc host $IMAGE
### run --uts host [policy]
docker create --uts host $IMAGE
### run --network host [policy]
docker create --network host $IMAGE
### run --userns host [policy]
docker create --userns host $IMAGE
### run --cgroup-parent [policy]
docker create --cgroup-parent /x $IMAGE
### run -v of the host's files [policy]
docker create -v /etc:/x $IMAGE
### run --security-opt seccomp=unconfined [policy]
docker create --security-opt seccomp=unconfined $IMAGE
### run --volume-driver [policy]
docker create --volume-driver local --mount type=volume,source=vol,target=/x,volume-opt=type=none,volume-opt=o=bind,volume-opt=device=/etc $IMAGE
### run --security-opt no-new-privileges
docker run --rm --security-opt no-new-privileges $IMAGE grep 'NoNewPrivs.*1' /proc/self/status
### run --security-opt no-new-privileges:true
docker run --rm --security-opt no-new-privileges:true $IMAGE true
### run --ipc private
docker run --rm --ipc private $IMAGE true
### run --ipc none
docker run --rm --ipc none $IMAGE true
### run --ipc shareable and container: [policy]
up one --ipc shareable
docker run --rm --ipc container:one $IMAGE true
### run --pid container:
up one
has "$(docker run --rm --pid container:one $IMAGE ps)" "sleep 1000"
### run --network container:
up one -h together
same "$(docker run --rm --network container:one $IMAGE hostname)" together
### run --network none
same "$(docker run --rm --network none $IMAGE ls /sys/class/net | tr -d '\n')" lo
### run --network bridge
docker run --rm --network bridge $IMAGE true
### run --network default
docker run --rm --network default $IMAGE true
### run --network of one's own
docker network create net
docker run --rm --network net $IMAGE ip addr show eth0
### run --network-alias
docker network create net
up one --network net --network-alias other
docker run --rm --network net $IMAGE nslookup other 127.0.0.11
### run --network with options
docker network create net
up one --network name=net,alias=other
docker run --rm --network net $IMAGE nslookup other 127.0.0.11
### run --ip
docker network create --subnet 10.99.1.0/24 net
up one --network net --ip 10.99.1.77
same "$(field one '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}')" 10.99.1.77
### run --mac-address [policy]
docker run --rm --mac-address 02:42:ac:11:00:99 $IMAGE ip link show eth0
### run --dns
up one --dns 192.0.2.1 --dns-search example.org --dns-option ndots:2
same "$(field one '{{index .HostConfig.Dns 0}}')" 192.0.2.1
has "$(docker exec one cat /etc/resolv.conf)" example.org ndots:2
### run --add-host
has "$(docker run --rm --add-host name:192.0.2.7 $IMAGE cat /etc/hosts)" 192.0.2.7
### run --add-host with host-gateway
docker run --rm --add-host host.docker.internal:host-gateway $IMAGE grep host.docker.internal /etc/hosts
### run --link on the default network [policy]
up one
docker run --rm --link one:other $IMAGE grep other /etc/hosts
### run --link on a network of one's own
docker network create net
up one --network net
docker run --rm --network net --link one:other $IMAGE nslookup other 127.0.0.11
### run -p
up one -p 18080:80
has "$(docker port one)" "80/tcp -> 0.0.0.0:18080"
### run -p on loopback
up one -p 127.0.0.1:18080:80
same "$(docker port one 80)" 127.0.0.1:18080
### run -p of any port
up one -p 80
has "$(docker port one 80/tcp)" 0.0.0.0:
### run -p of UDP
up one -p 18053:53/udp
has "$(docker port one)" 53/udp
### run -p of a range
up one -p 18080-18082:80-82
has "$(docker port one)" 18081
### run -p reaches the container
docker run -d --name one -p 127.0.0.1:18080:80 $IMAGE sh -c 'mkdir /w && echo found >/w/index.html && httpd -f -p 80 -h /w'
eventually sh -c 'busybox wget -qO- http://127.0.0.1:18080/ | grep found'
### run -P
up one -P --expose 81
has "$(docker port one)" 81/tcp
### run --expose
up one --expose 80 --expose 90-92/udp
has "$(field one '{{json .Config.ExposedPorts}}')" 80/tcp 91/udp
### run -v of a directory
echo text >file
same "$(docker run --rm -v "$PWD:/data" $IMAGE cat /data/file)" text
### run -v read-only
docker run --rm -v "$PWD:/data:ro" $IMAGE sh -c '! touch /data/x'
### run -v of a file
echo text >file
same "$(docker run --rm -v "$PWD/file:/etc/config" $IMAGE cat /etc/config)" text
### run -v of a file, read-only
echo text >file
docker run --rm -v "$PWD/file:/etc/config:ro" $IMAGE sh -c 'cat /etc/config && ! echo >/etc/config'
### run -v of a missing directory
docker run --rm -v "$PWD/new/deep:/data" $IMAGE touch /data/x
test -f new/deep/x
### run -v with propagation
docker run --rm -v "$PWD:/data:rprivate" $IMAGE true
### run -v with z
docker run --rm -v "$PWD:/data:z" $IMAGE true
### run -v of a named volume
docker run --rm -v vol:/data $IMAGE touch /data/x
docker run --rm -v vol:/data $IMAGE test -f /data/x
### run -v of a named volume, nocopy
docker run --rm -v vol:/etc:nocopy $IMAGE sh -c '! test -f /etc/passwd'
### run -v of a named volume is filled
docker run --rm -v vol:/etc $IMAGE test -f /etc/passwd
### run -v of an anonymous volume
up one -v /data
same "$(docker volume ls -q | wc -l)" 1
### run -v of one below another
mkdir -p app
docker run --rm -v "$PWD/app:/app" -v /app/node_modules $IMAGE touch /app/node_modules/x
### run -v of a file below another
mkdir -p app
echo text >config
same "$(docker run --rm -v "$PWD/app:/app" -v "$PWD/config:/app/config" $IMAGE cat /app/config)" text
### run -v of a directory and a volume below it
mkdir -p app
docker run --rm -v "$PWD/app:/app" -v vol:/app/cache $IMAGE touch /app/cache/x
### run -v of a volume and a tmpfs below it [policy]
docker run --rm -v vol:/app --tmpfs /app/tmp $IMAGE touch /app/tmp/x
### run --volumes-from
up one -v vol:/data
docker run --rm --volumes-from one $IMAGE touch /data/x
### run --volumes-from, read-only
up one -v vol:/data
docker run --rm --volumes-from one:ro $IMAGE sh -c '! touch /data/x'
### run --volumes-from with a directory
up one -v "$PWD:/data"
docker run --rm --volumes-from one $IMAGE touch /data/x
test -f x
### run --mount of a directory
echo text >file
same "$(docker run --rm --mount type=bind,source="$PWD",target=/data,readonly $IMAGE cat /data/file)" text
### run --mount of a missing directory
has "$(fails docker run --rm --mount type=bind,source="$PWD/nosuch",target=/data $IMAGE true)" "does not exist"
### run --mount with propagation
docker run --rm --mount type=bind,source="$PWD",target=/data,bind-propagation=rprivate $IMAGE true
### run --mount of a file
echo text >file
same "$(docker run --rm --mount type=bind,src="$PWD/file",dst=/etc/config,ro $IMAGE cat /etc/config)" text
### run --mount of a volume
docker run --rm --mount type=volume,source=vol,target=/data $IMAGE touch /data/x
### run --mount of a volume with nocopy and a label
docker run --rm --mount type=volume,source=vol,target=/etc,volume-nocopy,volume-label=a=b $IMAGE true
### run --mount of an anonymous volume
docker run --rm --mount type=volume,target=/data $IMAGE touch /data/x
### run --mount of a tmpfs
docker run --rm --mount type=tmpfs,destination=/data,tmpfs-size=8m,tmpfs-mode=1770 $IMAGE touch /data/x
### run --log-driver none
up one --log-driver none
has "$(fails docker logs one)" "does not support reading"
### run --log-driver local
docker run -d --name one --log-driver local $IMAGE echo said
eventually logged one said
### run --log-opt
up one --log-opt max-size=1m --log-opt max-file=3
same "$(field one '{{index .HostConfig.LogConfig.Config "max-size"}}')" 1m
### run --log-opt tag
docker run --rm --log-opt tag='{{.Name}}' $IMAGE true
### run --log-opt compress and labels
docker run --rm --log-opt max-size=1m --log-opt max-file=2 --log-opt compress=true --log-opt labels=a $IMAGE true
### run --log-opt env [policy]
docker run --rm --log-opt env=B $IMAGE true
### run --log-opt mode
docker run --rm --log-opt mode=non-blocking --log-opt max-buffer-size=1m $IMAGE true
### run --restart on-failure
docker run -d --name one --restart on-failure:2 $IMAGE false
eventually sh -c 'docker inspect -f "{{.RestartCount}}" one | grep 2'
### run --restart always
up one --restart always
same "$(field one '{{.HostConfig.RestartPolicy.Name}}')" always
### run --restart unless-stopped
up one --restart unless-stopped
### run --stop-signal and --stop-timeout
up one --stop-signal SIGKILL --stop-timeout 1
docker stop one
### run --health-cmd
docker run -d --name one --health-cmd 'test -e /ok' --health-interval 1s --health-timeout 1s --health-retries 2 --health-start-period 1s $IMAGE sh -c 'touch /ok; sleep 1000'
eventually sh -c 'docker ps --filter health=healthy -q | grep .'
### run --no-healthcheck
up one --no-healthcheck
### run --sysctl
same "$(docker run --rm --sysctl net.core.somaxconn=777 $IMAGE cat /proc/sys/net/core/somaxconn)" 777
### run --sysctl that isn't listed [policy]
docker create --sysctl kernel.msgmnb=65536 $IMAGE
### run --runtime runc
docker run --rm --runtime runc $IMAGE true
### run --isolation default
docker run --rm --isolation default $IMAGE true
### run --pull never
docker run --rm --pull never $IMAGE true
### run --pull missing
docker run --rm --pull missing $REGISTRY/hello:1 true
### run --pull always
docker run --rm --pull always $REGISTRY/hello:1 true
### run --platform
docker run --rm --platform linux/amd64 $IMAGE true
### run --annotation [policy]
docker run --rm --annotation a=b $IMAGE true
### run --cgroupns private
docker run --rm --cgroupns private $IMAGE true
### run --disable-content-trust
docker run --rm --disable-content-trust $IMAGE true
### run --sig-proxy
docker run --rm --sig-proxy=false $IMAGE true
### run --quiet
docker run --rm --quiet $IMAGE true
### run --storage-opt [policy]
docker create --storage-opt size=1G $IMAGE
### run --gpus [policy]
docker create --gpus all $IMAGE
### run of an image that pulls
has "$(docker run --rm $REGISTRY/hello:1 echo hello 2>&1)" hello
### run of an image that isn't there
has "$(fails docker run --rm $REGISTRY/nosuch:1 true)" nosuch
### run of an image by ID
docker run --rm "$(docker images -q $IMAGE)" true
### run of an image by a full ID
docker run --rm "$(docker inspect -f '{{.Id}}' $IMAGE)" true
### run of an image whose name is all hex digits
docker run --rm cafe true
docker run --rm deadbeef:latest true
### run shows the image as it was asked for
for ref in busybox busybox:latest docker.io/library/busybox "$(docker image inspect -f '{{.Id}}' $IMAGE)"; do
	docker create --name one "$ref"
	same "$(field one '{{.Config.Image}}')" "$ref"
	docker rm one
done
### run of an image without a tag
docker run --rm busybox true
same "$(docker create --name one busybox && field one '{{.Config.Image}}' | tail -1)" "$(docker ps -aq --no-trunc)
busybox" || same "$(field one '{{.Config.Image}}')" busybox
### run of an image with docker.io
docker run --rm docker.io/library/busybox:latest true
### create and start
docker create --name one $IMAGE echo hello
same "$(docker start -a one)" hello
### create with everything usual
docker network create net
docker create --name one --network net -p 127.0.0.1::80 -v vol:/data -v "$PWD:/work:ro" -e A=b -w /work -u 1000 --restart unless-stopped --label a=b --health-cmd true -m 128m --cpus 1 --init -it $IMAGE sh
docker start one
same "$(docker exec one sh -c 'echo $A; pwd; id -u' | tr '\n' ' ')" "b /work 1000 "
