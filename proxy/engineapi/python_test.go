package engineapi

import (
	"os/exec"
	"testing"

	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

// pythonRuns is what users of the Python client do.
const pythonRuns = `
import docker, sys
c = docker.DockerClient(base_url=sys.argv[1], version="auto")
out = c.containers.run(IMAGE, ["sh", "-c", "echo $A; id -u"], environment={"A": "1"}, remove=True, user="1000", mem_limit="64m", tmpfs={"/t": "size=1m"},
    healthcheck={"test": ["CMD", "true"]}, ulimits=[docker.types.Ulimit(name="nofile", soft=100, hard=200)], labels=["x"], cap_drop=["ALL"], read_only=True,
    log_config=docker.types.LogConfig(type="json-file", config={"max-size": "1m"}), volumes={"py-vol": {"bind": "/v", "mode": "rw"}, DIR + "/a": {"bind": "/a", "mode": "ro"}})
assert out == b"1\n1000\n", out
n = c.networks.create("py-net", internal=True)
ct = c.containers.run(IMAGE, "sleep 600", detach=True, network="py-net", name="py-1", ports={"80/tcp": ("127.0.0.1", None)}, restart_policy={"Name": "on-failure", "MaximumRetryCount": 1},
    mounts=[docker.types.Mount("/m", "py-vol"), docker.types.Mount("/b", DIR + "/a", type="bind", read_only=True)], init=True, stdin_open=True, tty=True, working_dir="/", hostname="h")
ct.update(mem_limit="80m", memswap_limit="80m")
ct.restart(timeout=0)
ct.reload()
assert ct.attrs["HostConfig"]["Memory"] == 80 << 20
assert list(ct.attrs["NetworkSettings"]["Networks"]) == ["py-net"], ct.attrs["NetworkSettings"]
for wish in ({"privileged": True}, {"volumes": ["/etc:/x"]}, {"pid_mode": "host"}, {"network_mode": "host"}, {"devices": ["/dev/null"]}, {"volumes_from": ["py-1"]}, {"links": {"py-1": "x"}}):
    try:
        c.containers.create(IMAGE, "true", **wish)
    except docker.errors.APIError as e:
        assert e.status_code == 403 and "denied by policy" in e.explanation, e
    else:
        raise AssertionError(wish)
try:
    c.containers.create("berm.local/missing")
except docker.errors.ImageNotFound:
    pass
ct.remove(force=True)
n.remove()
c.volumes.get("py-vol").remove()
print("done")
`

func TestClientsPython(t *testing.T) {
	if err := exec.CommandContext(t.Context(), "python3", "-c", "import docker").Run(); err != nil {
		private.Lacking(t, "python", err)
	}
	host, direct := testEngine(t)
	dir := workDir(t)
	noError(t, exec.CommandContext(t.Context(), "mkdir", dir+"/a").Run())
	d := doorTo(t, host, workRules(dir))
	left := sweepOwn(t, direct, d)
	address := d.listen(Caller{Name: "python", Tenant: "python"})
	script := "IMAGE = \"" + testImage + "\"\nDIR = \"" + dir + "\"\n" + pythonRuns
	out, err := exec.CommandContext(t.Context(), "python3", "-c", script, address).CombinedOutput()
	if err != nil || string(out) != "done\n" {
		t.Errorf("%v: %s", err, out)
	}
	if all := left(); err == nil && len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}
