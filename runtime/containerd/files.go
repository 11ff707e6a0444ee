package containerd

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"github.com/bermhq/berm/runtime/containerd/network"
)

// etcFiles are the files of /etc that describe a container's name and network.
var etcFiles = []string{"hostname", "hosts", "resolv.conf"}

const hosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"

// writeFiles writes the etcFiles for a container without a network, and makes the directories that its
// image lacks.
func (c *creation) writeFiles() error {
	for i := range c.dirs {
		if err := os.Mkdir(c.place.file(dirName(i)), 0o755); err != nil { //nolint:gosec // as Docker makes them
			return err
		}
	}
	return errors.Join(
		c.writeFile("hostname", c.hostname()+"\n"),
		c.writeFile("hosts", hosts+"127.0.0.1\t"+c.hostname()+"\n"),
		c.writeFile("resolv.conf", ""),
	)
}

// writeNetworkFiles rewrites hosts and resolv.conf once the container is on a network. It does so in
// place, as the files may be mounted by then.
func (c *creation) writeNetworkFiles(e network.Endpoint) error {
	err := c.writeFile("hosts", hosts+e.IP+"\t"+c.hostname()+"\n")
	if e.Internal || err != nil {
		return err
	}
	resolv, err := hostResolvConf("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
	if err != nil {
		return err
	}
	return c.writeFile("resolv.conf", resolv)
}

// dirName names the host's directory behind the i-th directory that the image lacks.
func dirName(i int) string { return fmt.Sprintf("dir-%d", i) }

func (c *creation) writeFile(name, text string) error {
	return os.WriteFile(c.place.file(name), []byte(text), 0o644) //nolint:gosec // every user in the container reads it
}

// hostResolvConf returns the first of the files that names a server that a container can reach, too. A
// resolver on the host's loopback is none. Without such a file, the text is empty.
func hostResolvConf(files ...string) (string, error) {
	for _, file := range files {
		b, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read the host's name servers: %w", err)
		}
		var out strings.Builder
		usable := false
		for line := range strings.Lines(string(b)) {
			fields := strings.Fields(line)
			if len(fields) < 2 {
				continue
			}
			switch fields[0] {
			case "nameserver":
				addr, err := netip.ParseAddr(fields[1])
				if err != nil || addr.IsLoopback() || !addr.Is4() { // there is no IPv6 in containers
					continue
				}
				usable = true
			case "search", "domain", "options":
			default:
				continue
			}
			out.WriteString(strings.Join(fields, " ") + "\n")
		}
		if usable {
			return out.String(), nil
		}
	}
	return "", nil
}
