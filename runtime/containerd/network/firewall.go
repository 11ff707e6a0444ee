package network

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/runtime"
)

// ruleTables are the tables in the order in which they are filled. mangle, which drops, comes first.
var ruleTables = []string{"mangle", "nat", "filter"}

// tableRules are the rules of one network in one table of iptables: those of its own chain, and the
// jumps to that chain from the built-in ones. Each is written as iptables-save prints it, so that the
// two can be compared.
type tableRules struct {
	jumps []string // each "-A CHAIN …"
	rules []string // each "-A BERM-… …"
}

// networkRules are a network's rules by table.
//
// Packets are dropped in mangle, which comes before filter. In filter, other programs put
// their rules in front: at each start Docker takes the front of FORWARD, and lets its
// containers go anywhere. The rules in filter accept what Docker's policy for FORWARD would
// drop. They repeat the drops, so a network stays closed if someone flushes one table. IPv6
// has no rules. It is disabled on the bridges and in the containers' namespaces, so the host
// has no address there and forwards nothing. Isolated ports of a bridge carry no protocol to
// each other.
func networkRules(n *network) map[string]tableRules {
	forward := func(pass string) tableRules {
		t := tableRules{jumps: []string{
			fmt.Sprintf("-A FORWARD -i %s -j %s", n.Bridge, n.chain()),
			fmt.Sprintf("-A FORWARD -o %s -j %s", n.Bridge, n.chain()),
		}}
		add := func(match, verdict string) {
			t.rules = append(t.rules, fmt.Sprintf("-A %s%s -j %s", n.chain(), match, verdict))
		}
		add(fmt.Sprintf(" ! -s %s -i %s", n.Subnet, n.Bridge), "DROP") // a forged sender
		within := pass
		if n.Isolated {
			within = "DROP" // by way of the gateway, too
		}
		add(fmt.Sprintf(" -i %[1]s -o %[1]s", n.Bridge), within)
		if n.Internal {
			t.jumps = append(t.jumps, fmt.Sprintf("-A INPUT -i %s -j %s", n.Bridge, n.chain()))
			add(" -i "+n.Bridge+" -m conntrack --ctstate ESTABLISHED", pass) // answers to the host, as only the host can ask
			add("", "DROP")
			return t
		}
		add(" -i "+n.Bridge, pass) // to another network of ours: its own chain drops it
		add(" -o "+n.Bridge+" -m conntrack --ctstate RELATED,ESTABLISHED", pass)
		add("", "DROP")
		return t
	}
	rules := map[string]tableRules{"mangle": forward("RETURN"), "filter": forward("ACCEPT")}
	if !n.Internal {
		rules["nat"] = tableRules{
			jumps: []string{fmt.Sprintf("-A POSTROUTING -s %s -j %s", n.Subnet, n.chain())},
			rules: []string{fmt.Sprintf("-A %s ! -o %s -j MASQUERADE", n.chain(), n.Bridge)},
		}
	}
	return rules
}

// firewall is the output of iptables-save: the chains of each table, and its rules in order.
type firewall map[string]*firewallTable

type firewallTable struct {
	chains map[string]bool
	rules  []string // each "-A CHAIN …"
}

func parseFirewall(save []byte) firewall {
	fw := make(firewall)
	table := new(firewallTable)
	for line := range strings.Lines(string(save)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = &firewallTable{chains: make(map[string]bool)}
			fw[line[1:]] = table
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			table.chains[name] = true
		case strings.HasPrefix(line, "-A "):
			table.rules = append(table.rules, line)
		}
	}
	return fw
}

// of returns the rules of one of Berm's chains in a table, and the jumps to it. Front is false
// if a jump comes after another program's rule.
func (fw firewall) of(table, chain string) (found tableRules, front bool) {
	t := fw[table]
	if t == nil {
		return found, true
	}
	front = true
	others := make(map[string]bool) // built-in chains that had another program's rule so far
	for _, rule := range t.rules {
		builtin := strings.Fields(rule)[1]
		switch {
		case builtin == chain:
			found.rules = append(found.rules, rule)
		case strings.HasSuffix(rule, " -j "+chain):
			found.jumps = append(found.jumps, rule)
			front = front && !others[builtin]
		case !strings.Contains(rule, " -j "+chainPrefix):
			others[builtin] = true
		}
	}
	return found, front
}

// restore returns the input of iptables-restore that sets a network's rules to the wanted ones.
// Nil wants none. The input is empty if nothing has to change. Each table changes in one step.
func (fw firewall) restore(chain string, wanted map[string]tableRules) []byte {
	var out bytes.Buffer
	for _, table := range ruleTables {
		found, front := fw.of(table, chain)
		there := fw[table] != nil && fw[table].chains[chain]
		want, wants := wanted[table]
		slices.Sort(found.jumps)
		sorted := slices.Sorted(slices.Values(want.jumps))
		if there == wants && front && slices.Equal(found.jumps, sorted) && slices.Equal(found.rules, want.rules) {
			continue
		}
		fmt.Fprintf(&out, "*%s\n:%s - [0:0]\n", table, chain) // makes the chain, or empties it
		for _, rule := range found.jumps {
			fmt.Fprintf(&out, "-D%s\n", rule[2:])
		}
		for _, rule := range want.jumps {
			builtin, match, _ := strings.Cut(rule[3:], " ")
			fmt.Fprintf(&out, "-I %s 1 %s\n", builtin, match)
		}
		for _, rule := range want.rules {
			fmt.Fprintf(&out, "%s\n", rule)
		}
		if !wants {
			fmt.Fprintf(&out, "-X %s\n", chain)
		}
		out.WriteString("COMMIT\n")
	}
	return out.Bytes()
}

// readFirewall reads all rules. It must run on the host's side (onHost).
func readFirewall(ctx context.Context) (firewall, error) {
	out, err := iptables(ctx, nil, "iptables-save")
	if err != nil {
		return nil, err
	}
	return parseFirewall(out), nil
}

// setRules sets a network's rules; nil removes them. It must run on the host's side (onHost).
func setRules(ctx context.Context, chain string, wanted map[string]tableRules) error {
	// The change fails if another program has removed a rule since.
	var err error
	for range 3 {
		var fw firewall
		if fw, err = readFirewall(ctx); err != nil {
			return err
		}
		change := fw.restore(chain, wanted)
		if len(change) == 0 {
			return nil
		}
		if _, err = iptables(ctx, change, "iptables-restore", "--noflush", "--wait=5"); err == nil || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// iptables runs a program of that package in this thread's network namespace.
func iptables(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	path, err := FindProgram(program)
	if err != nil {
		return nil, runtime.Precondition("the program %s, of the package iptables, isn't installed: networks need it", program)
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	// A program that is started at the same time may inherit the pipes for a moment.
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"} // Berm's has secrets
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(stderr.Bytes()[:min(stderr.Len(), 1<<10)]))
	}
	return stdout.Bytes(), nil
}

// FindProgram looks a program up in PATH, and then in the usual directories of administrators'
// programs and of containerd's.
func FindProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/opt/containerd/bin"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(filepath.Join(dir, name))
	}
	return path, err
}
