"""Cases of create_container and create_host_config, the low-level API."""

import docker
from docker.types import DeviceRequest, LogConfig

from fixture import IMAGE, WORK
from tap import case, equal, raises, refused, within


@case
def host_binds(t):
    if not WORK:
        return
    within("/work ", t.host_output("cat /proc/mounts", binds={WORK: {"bind": "/work", "mode": "ro"}}))
    within("/work ", t.host_output("cat /proc/mounts", binds=[WORK + ":/work:rw"]))


@case
def host_volume_bind(t):
    v = t.volume()
    within("/data ", t.host_output("cat /proc/mounts", binds=[v.name + ":/data"]))


@case
def host_tmpfs(t):
    within("/mem tmpfs", t.host_output("cat /proc/mounts", tmpfs={"/mem": "size=1m,uid=1000"}))


@case
def host_tmpfs_list(t):
    within("/mem tmpfs", t.host_output("cat /proc/mounts", tmpfs=["/mem"]))


@case
def host_volumes_from(t):
    v = t.volume()
    c = t.create(volumes={v.name: {"bind": "/data", "mode": "rw"}})
    within("/data ", t.host_output("cat /proc/mounts", volumes_from=[c.id]))
    within("/data ", t.host_output("cat /proc/mounts", volumes_from=[c.name + ":ro"]))


@case
def host_memory(t):
    id = t.low(host_config=t.api.create_host_config(mem_limit="64m", memswap_limit="64m", mem_reservation="32m", mem_swappiness=60))
    got = t.api.inspect_container(id)["HostConfig"]
    equal((got["Memory"], got["MemoryReservation"]), (64 << 20, 32 << 20))


@case
def host_cpu(t):
    id = t.low(host_config=t.api.create_host_config(cpu_shares=256, cpu_period=100000, cpu_quota=50000, cpuset_cpus="0", cpuset_mems="0"))
    got = t.api.inspect_container(id)["HostConfig"]
    equal((got["CpuShares"], got["CpuQuota"], got["CpusetCpus"]), (256, 50000, "0"))


@case
def host_nano_cpus(t):
    id = t.low(host_config=t.api.create_host_config(nano_cpus=500000000))
    equal(t.api.inspect_container(id)["HostConfig"]["NanoCpus"], 500000000)


@case
def host_pids_limit(t):
    id = t.low(host_config=t.api.create_host_config(pids_limit=50))
    equal(t.api.inspect_container(id)["HostConfig"]["PidsLimit"], 50)


@case
def host_blkio_weight(t):
    t.low(host_config=t.api.create_host_config(blkio_weight=300))


@case
def host_oom(t):
    id = t.low(host_config=t.api.create_host_config(oom_score_adj=500))
    equal(t.api.inspect_container(id)["HostConfig"]["OomScoreAdj"], 500)


@case
def host_cap_drop_and_add(t):
    within("0000000000000000", t.host_output("grep CapEff /proc/self/status", cap_drop=["ALL"]))
    within("0000000000000001", t.host_output("grep CapEff /proc/self/status", cap_drop=["ALL"], cap_add=["CHOWN"]))


@case
def host_read_only(t):
    within("Read-only", t.host_output("sh -c 'touch /x 2>&1; true'", read_only=True))


@case
def host_dns(t):
    config = t.api.create_host_config(dns=["192.0.2.1"], dns_search=["example.com"], dns_opt=["ndots:3"])
    id = t.low("cat /etc/resolv.conf", host_config=config)
    got = t.api.inspect_container(id)["HostConfig"]
    equal([got[k] for k in ("Dns", "DnsSearch", "DnsOptions")], [["192.0.2.1"], ["example.com"], ["ndots:3"]])
    t.api.start(id)
    t.api.wait(id)
    within("search example.com", t.api.logs(id).decode())


@case
def host_extra_hosts(t):
    within("192.0.2.2", t.host_output("cat /etc/hosts", extra_hosts={"db": "192.0.2.2"}))


@case
def host_sysctls(t):
    equal(t.host_output("cat /proc/sys/net/ipv4/ip_forward", sysctls={"net.ipv4.ip_forward": "0"}), "0")


@case
def host_shm_size(t):
    within("size=1024k", t.host_output("grep /dev/shm /proc/mounts", shm_size="1m"))


@case
def host_ipc_private(t):
    t.host_output("true", ipc_mode="private")


@case
def host_ipc_none(t):
    t.host_output("true", ipc_mode="none")


@refused
def host_ipc_container(t):
    c = t.run(ipc_mode="shareable")
    t.host_output("true", ipc_mode="container:" + c.id)


@case
def host_security_opt(t):
    within("NoNewPrivs:\t1", t.host_output("grep NoNewPrivs /proc/self/status", security_opt=["no-new-privileges"]))


@case
def host_init(t):
    within("init", t.host_output("cat /proc/1/comm", init=True))


@case
def host_isolation_default(t):
    t.low(host_config=t.api.create_host_config(isolation="default"))


@case
def host_restart_policies(t):
    for policy in ({"Name": "no"}, {"Name": "always"}, {"Name": "unless-stopped"}, {"Name": "on-failure", "MaximumRetryCount": 2}):
        id = t.low("true", host_config=t.api.create_host_config(restart_policy=policy))
        equal(t.api.inspect_container(id)["HostConfig"]["RestartPolicy"]["Name"], policy["Name"])


@case
def host_network_none(t):
    equal(t.host_output("sh -c 'ls /sys/class/net | grep -v lo | grep -v tunl | grep -v sit | wc -l'", network_mode="none"), "0")


@case
def host_network_mode_bridge(t):
    t.host_output("true", network_mode="bridge")


@case
def host_network_mode_container(t):
    c = t.run()
    t.host_output("true", network_mode="container:" + c.id)


@case
def host_pid_mode_container(t):
    c = t.run("sleep 298")
    within("sleep", t.host_output("cat /proc/1/comm", pid_mode="container:" + c.id))


@refused
def host_links(t):
    c = t.run(name=t.name())
    id = t.low("true", host_config=t.api.create_host_config(links={c.name: "alias"}))
    equal(len(t.api.inspect_container(id)["HostConfig"]["Links"]), 1)


@case
def host_group_add(t):
    within("2000", t.host_output("id -G", group_add=[2000]))


@case
def host_userns_default(t):
    t.low(host_config=t.api.create_host_config(userns_mode=""))


@case
def host_port_bindings(t):
    id = t.low(ports=[1111, 2222], host_config=t.api.create_host_config(port_bindings={1111: 41111, 2222: None}, publish_all_ports=False))
    t.api.start(id)
    equal(t.api.port(id, 1111)[0]["HostPort"], "41111")


@case
def host_publish_all(t):
    id = t.low(ports=[1111], host_config=t.api.create_host_config(publish_all_ports=True))
    t.api.start(id)
    equal(int(t.api.port(id, 1111)[0]["HostPort"]) > 0, True)


@case
def host_log_config(t):
    id = t.low(host_config=t.api.create_host_config(log_config=LogConfig(type="local", config={"max-size": "1m"})))
    equal(t.api.inspect_container(id)["HostConfig"]["LogConfig"]["Type"], "local")


@case
def host_log_tag(t):
    t.low(host_config=t.api.create_host_config(log_config=LogConfig(type="json-file", config={"tag": "{{.Name}}"})))


@case
def host_log_labels(t):
    t.low(host_config=t.api.create_host_config(log_config=LogConfig(type="json-file", config={"labels": "a"})))


@case
def host_log_unknown(t):
    config = t.api.create_host_config(log_config={"type": "missing", "config": {}})
    raises(docker.errors.APIError, t.low, host_config=config)


@case
def host_storage_opt_empty(t):
    t.low(host_config=t.api.create_host_config(storage_opt={}))


@case
def host_cgroup_parent_empty(t):
    t.low(host_config=t.api.create_host_config(cgroup_parent=""))


@case
def host_runtime_default(t):
    t.low(host_config=t.api.create_host_config(runtime="runc"))


@case
def host_device_request_none(t):
    t.low(host_config=t.api.create_host_config(device_requests=[]))
    DeviceRequest(count=-1, capabilities=[["gpu"]])


@case
def host_lxc_and_devices_empty(t):
    t.low(host_config=t.api.create_host_config(devices=[], device_read_bps=[], device_cgroup_rules=[]))


@case
def create_environment_forms(t):
    id = t.low("sh -c 'echo $A$B'", environment=["A=1", "B=2"])
    t.api.start(id)
    t.api.wait(id)
    equal(t.api.logs(id), b"12\n")


@case
def create_entrypoint(t):
    id = t.low(["x"], entrypoint=["echo", "entry"])
    t.api.start(id)
    t.api.wait(id)
    equal(t.api.logs(id), b"entry x\n")


@case
def create_entrypoint_string(t):
    id = t.low("x", entrypoint="echo entry")
    t.api.start(id)
    t.api.wait(id)
    equal(t.api.logs(id), b"entry x\n")


@refused
def create_mac_address(t):
    id = t.low("cat /sys/class/net/eth0/address", mac_address="02:42:ac:11:65:43", host_config=t.api.create_host_config(network_mode="bridge"))
    t.api.start(id)
    t.api.wait(id)
    equal(t.api.logs(id), b"02:42:ac:11:65:43\n")


@case
def create_stop_timeout(t):
    id = t.low(stop_timeout=25)
    equal(t.api.inspect_container(id)["Config"]["StopTimeout"], 25)


@case
def create_volumes(t):
    id = t.low(volumes=["/data", "/more"])
    equal(len(t.api.inspect_container(id)["Mounts"]), 2)


@case
def create_volume_driver_local(t):
    t.low(volumes=["/data"], host_config=t.api.create_host_config(volume_driver="local"))


@case
def create_network_disabled(t):
    t.low("true", network_disabled=True)


@case
def create_networking_config(t):
    n = t.network()
    config = t.api.create_networking_config({n.name: t.api.create_endpoint_config(aliases=["alias"])})
    id = t.low(networking_config=config, host_config=t.api.create_host_config(network_mode=n.name))
    t.api.start(id)
    within("alias", t.api.inspect_container(id)["NetworkSettings"]["Networks"][n.name]["Aliases"])


@case
def create_healthcheck_none(t):
    id = t.low(healthcheck={"test": ["NONE"]})
    equal(t.api.inspect_container(id)["Config"]["Healthcheck"]["Test"], ["NONE"])


@case
def create_platform(t):
    equal(t.client.containers.run(IMAGE, "echo a", remove=True, platform="linux/amd64"), b"a\n")


@case
def create_image_by_id(t):
    id = t.client.images.get(IMAGE).id
    t.adopt(t.api.create_container(id, "true"))
    t.adopt(t.api.create_container(id.split(":")[1][:12], "true"))


@case
def create_image_without_tag(t):
    repository, tag = IMAGE.rsplit(":", 1)
    if tag == "latest":
        id = t.adopt(t.api.create_container(repository, "true"))["Id"]
        equal(t.api.inspect_container(id)["Config"]["Image"], repository)


@case
def create_stdin_once(t):
    c = t.create("cat", stdin_open=True)
    s = t.api.attach_socket(c.id, params={"stdin": 1, "stream": 1})
    c.start()
    s._sock.sendall(b"hello")
    s._sock.close()
    s.close()
    equal(c.id != "", True)


@case
def create_all_of_run(t):
    n, v = t.network(), t.volume()
    c = t.run(
        "sleep 300", cap_drop=["ALL"], cpu_count=0, cpu_percent=0, cpu_period=100000, cpu_quota=50000, cpu_shares=2,
        cpuset_cpus="0", domainname="example.com", entrypoint="", environment={"A": "b"}, extra_hosts={"x": "192.0.2.1"},
        group_add=["1000"], hostname="h", init=True, init_path=None, ipc_mode="private", kernel_memory=None, labels={"l": "m"},
        mem_limit="64m", mem_reservation="32m", memswap_limit="64m", name=t.name(), network=n.name, oom_kill_disable=False,
        pids_limit=64, platform="linux", ports={"80/tcp": None}, privileged=False, publish_all_ports=False, read_only=False,
        restart_policy={"Name": "on-failure", "MaximumRetryCount": 1}, shm_size="16m", stdin_open=True, stop_signal="SIGTERM",
        tmpfs={"/mem": ""}, tty=True, user="1000:1000", volumes={v.name: {"bind": "/data", "mode": "rw"}}, working_dir="/tmp")
    c.reload()
    equal(c.status, "running")
