package config

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// systemdScheme begins the address of a socket that systemd passes, by its name.
const systemdScheme = "systemd:"

// socketPattern is a part of what systemd takes for FileDescriptorName=.
var socketPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.@-]{0,254}$`)

// Passed tells whether an address is that of a socket that systemd passes.
func Passed(address string) bool { return strings.HasPrefix(address, systemdScheme) }

// passed checks the name of a socket.
func (p *problems) passed(key, name string) {
	p.unless(socketPattern.MatchString(name), key, "want systemd: and a socket's name of letters, digits, '_', '.', '@' and '-', not %q", name)
}

// Bound returns the configuration with sockets' addresses in place of their names, and validates it
// again. Sockets maps names to addresses, for TCP as host:port. Bound fails if it lacks a name of
// the configuration, or has a further one.
func (c *Config) Bound(sockets map[string]string) (*Config, error) {
	out := *c
	out.EngineAPI.Listeners = slices.Clone(c.EngineAPI.Listeners)
	var p problems
	left := maps.Clone(sockets)
	bind := func(key string, address *string, tcp string) {
		name, ok := strings.CutPrefix(*address, systemdScheme)
		if !ok {
			return
		}
		to, ok := sockets[name]
		p.unless(ok, key, "systemd has passed no socket of the name %s; a .socket unit gives it with FileDescriptorName=", name)
		delete(left, name)
		if *address = to; !strings.HasPrefix(to, "unix://") {
			*address = tcp + to
		}
	}
	bind("http.listen", &out.HTTP.Listen, "")
	for i := range out.EngineAPI.Listeners {
		bind(fmt.Sprintf("engine_api.listeners[%d].address", i), &out.EngineAPI.Listeners[i].Address, "tcp://")
	}
	for _, name := range slices.Sorted(maps.Keys(left)) {
		p = append(p, fmt.Errorf("systemd has passed the socket %s, and no address of the configuration is %s%s", name, systemdScheme, name))
	}
	if len(p) == 0 {
		p = out.validate()
	}
	if len(p) > 0 {
		return nil, errors.Join(p...)
	}
	return &out, nil
}
