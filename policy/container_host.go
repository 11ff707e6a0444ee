package policy

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	maxPorts     = 128
	maxDNS       = 32 // servers, options, domains and hosts, of each
	loopback     = "127.0.0.1"
	logFiles     = 3 // of one log, unless the request says
	maxLogFiles  = 100
	minLogBytes  = 64 << 10 // of one file
	maxLogBuffer = 4 << 20
	maxBytes     = 1 << 50 // that can be given; with maxLogFiles of them within 64 bits
)

// ports judges the ports that are published on the host.
func (j *containerJudge) ports(asked []ContainerPort) {
	if j.tooMany(rulePortSyntax, "HostConfig.PortBindings", len(asked), maxPorts, "there are %d ports") {
		return
	}
	low, high, _ := parsePortRange(j.api.PortRange)
	for _, p := range asked {
		host, end := strconv.Itoa(p.HostPort), max(p.HostPort, p.HostEnd)
		if p.HostEnd != 0 {
			host += "-" + strconv.Itoa(p.HostEnd)
		}
		shown := fmt.Sprintf("%s:%s:%d/%s", p.HostIP, host, p.Port, p.Protocol)
		if p.HostPort < 0 || end > 65535 || p.HostEnd != 0 && (p.HostPort == 0 || p.HostEnd < p.HostPort) || p.Port < 1 || p.Port > 65535 || !slices.Contains([]string{"tcp", "udp", "sctp"}, p.Protocol) {
			j.invalid(rulePortSyntax, p.Field, shown, "ports up to 65535, of tcp, udp or sctp", fmt.Sprintf("%q is no port to be published", shorten(shown)))
			continue
		}
		if j.api.Ports == wordOff {
			j.off(rulePorts, p.Field, "port", shown, "ports", "no ports")
			continue
		}
		if p.HostPort != 0 && (p.HostPort < low || end > high) {
			allowed := fmt.Sprintf("0 (any that is free), and %d to %d", low, high)
			j.deny(rulePortRange, p.Field, host, allowed, fmt.Sprintf("host port %s is refused; allowed is %s", host, allowed))
		}
		p.HostIP = j.portAddress(p)
		j.spec.Ports = append(j.spec.Ports, p)
	}
}

// portAddress returns the host address for a port. Where the profile allows only the loopback
// address, it replaces "every address" by that.
func (j *containerJudge) portAddress(p ContainerPort) string {
	ip, err := netip.ParseAddr(p.HostIP)
	switch {
	case p.HostIP == "" && j.api.Ports == wordLoopback:
		j.override(rulePortAddress, p.Field, "", loopback)
		return loopback
	case p.HostIP == "":
	case err != nil || ip.Zone() != "":
		j.invalid(rulePortAddress, p.Field, p.HostIP, "an IP address", fmt.Sprintf("host address %q is no IP address", shorten(p.HostIP)))
	case j.api.Ports == wordLoopback && (!ip.IsLoopback() || ip.Is4In6()):
		j.deny(rulePortAddress, p.Field, p.HostIP, "127.0.0.1 and ::1", fmt.Sprintf("host address %q is refused: profile %s publishes on the loopback address only", shorten(p.HostIP), j.profile.Name))
	}
	return p.HostIP
}

var dnsWord = regexp.MustCompile(`^[A-Za-z0-9_.][A-Za-z0-9_.:-]{0,252}$`)

// dns judges the DNS servers, options, search domains and extra hosts.
func (j *containerJudge) dns(req ContainerRequest) {
	j.spec.DNS = j.dnsList("HostConfig.Dns", req.DNS, "IP addresses other than the loopback one's", func(s string) bool {
		ip, err := netip.ParseAddr(s)
		ip = ip.Unmap()
		// An engine may ask a loopback server from the host's side.
		return err == nil && ip.Zone() == "" && !ip.IsLoopback() && !ip.IsUnspecified() && !ip.IsMulticast()
	})
	j.spec.DNSOptions = j.dnsList("HostConfig.DnsOptions", req.DNSOptions, "words as ndots:1", dnsWord.MatchString)
	j.spec.DNSSearch = j.dnsList("HostConfig.DnsSearch", req.DNSSearch, "domain names", dnsWord.MatchString)
	var gateway, others []string
	for _, s := range req.ExtraHosts {
		if _, address := extraHost(s); address == hostGateway && j.api.HostGateway == wordOn && len(gateway) < maxDNS {
			gateway = append(gateway, s)
		} else {
			others = append(others, s)
		}
	}
	j.spec.ExtraHosts = append(j.dnsList("HostConfig.ExtraHosts", others, "a name and an IP address, as db:10.0.0.2, and host-gateway with engine_api.host_gateway on", func(s string) bool {
		_, address := extraHost(s)
		ip, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(address, "["), "]"))
		return err == nil && ip.Zone() == ""
	}), gateway...)
}

const hostGateway = "host-gateway" // an address of the host's, which the engine fills in

// extraHost splits an extra host into its name and address. Both are empty if s is malformed.
func extraHost(s string) (name, address string) {
	if i := strings.IndexAny(s, ":="); i >= 0 && dnsWord.MatchString(s[:i]) {
		return s[:i], s[i+1:]
	}
	return "", ""
}

func (j *containerJudge) dnsList(field string, asked []string, allowed string, good func(string) bool) []string {
	if j.tooMany(ruleDNSSyntax, field, len(asked), maxDNS, field+" has %d entries") {
		return nil
	}
	if len(asked) > 0 && j.api.DNS != wordOn {
		j.deny(ruleDNS, field, asked[0], "none, as long as the profile's engine_api.dns is off", fmt.Sprintf("%s is refused: profile %s has engine_api.dns off", field, j.profile.Name))
		return nil
	}
	for _, s := range asked {
		if !good(s) {
			j.deny(ruleDNSSyntax, field, s, allowed, fmt.Sprintf("%s %q is refused; allowed are %s", field, shorten(s), allowed))
		}
	}
	return asked
}

// logs bounds the size of a container's log on the host. It allows only listed log drivers: some
// make the engine connect to an address of the caller's choice.
func (j *containerJudge) logs(req ContainerRequest) {
	const field = "HostConfig.LogConfig"
	driver := req.LogDriver
	if driver == "" {
		driver = j.api.LogDrivers[0]
	}
	j.spec.LogDriver = driver
	if !slices.Contains(j.api.LogDrivers, driver) {
		j.refused(ruleLogDriver, field+".Type", "log driver", driver, orList(j.api.LogDrivers))
		return
	}
	options := map[string]string{}
	forms := logOptions
	if driver == logNone {
		forms = nil
	}
	for _, name := range sortedKeys(req.LogOptions) {
		value, good := req.LogOptions[name], forms[name]
		switch {
		case good == nil:
			j.refused(ruleLogOptions, field+".Config."+shorten(name), "log option", name, inList(sortedKeys(forms), "none"))
		case !good(value):
			j.deny(ruleLogOptions, field+".Config."+name, value, logValues,
				fmt.Sprintf("log option %s has a value of %q, which is refused; allowed is %s", name, shorten(value), logValues))
		default:
			options[name] = value
		}
	}
	if driver != logNone {
		j.logSize(options)
		j.spec.LogOptions = options
	}
}

const logValues = "max-size from 64k, max-file up to 100, compress true or false, mode blocking or non-blocking, max-buffer-size up to 4m, labels, " +
	"and a tag of letters, digits, _ . : / @ - and {{.ID}}, {{.FullID}}, {{.Name}}, {{.ImageName}}, {{.ImageID}}, {{.ImageFullID}}, {{.DaemonName}}"

// logTag matches a log's tag. The engine executes tags as templates, so no other actions match.
var logTag = regexp.MustCompile(`^([A-Za-z0-9_.:/@-]|\{\{ ?\.(ID|FullID|Name|ImageName|ImageID|ImageFullID|DaemonName) ?\}\}){0,64}$`)

// logLabels is a list of labels that each line of a log is to have. Of variables there is none,
// as it would tell those that the policy keeps back.
var logLabels = regexp.MustCompile(`^[A-Za-z0-9_./,-]{0,256}$`)

// logOptions are those that a caller may give, by what a good value is.
var logOptions = map[string]func(string) bool{
	"max-size":        func(s string) bool { return parseBytes(s) >= minLogBytes },
	"max-file":        func(s string) bool { n, ok := wholeNumber(s); return ok && n >= 1 && n <= maxLogFiles },
	"labels":          logLabels.MatchString,
	"compress":        func(s string) bool { return s == "true" || s == "false" },
	"mode":            func(s string) bool { return s == "blocking" || s == "non-blocking" },
	"tag":             logTag.MatchString,
	"max-buffer-size": func(s string) bool { n := parseBytes(s); return n >= 1 && n <= maxLogBuffer },
}

// logSize makes sure that the files of a log hold at most the profile's maximum together. It sets
// missing options, and keeps given ones that fit as they are written.
func (j *containerJudge) logSize(options map[string]string) {
	const field = "HostConfig.LogConfig.Config" // of all files
	most := j.api.LogMaxMB << 20
	files, given := wholeNumber(options["max-file"])
	size := parseBytes(options["max-size"])
	if !given {
		files = logFiles
		if size > 0 {
			files = min(max(most/size, 1), logFiles)
		}
	}
	if size > most/files {
		size = atMost(&j.judge, field, size*files, most) / files
		options["max-size"] = strconv.FormatInt(size, 10)
	} else if size < 0 {
		options["max-size"] = strconv.FormatInt(most/files, 10)
	}
	options["max-file"] = strconv.FormatInt(files, 10)
}

var (
	decimal    = regexp.MustCompile(`^(0|[1-9][0-9]{0,17})$`)
	byteNumber = regexp.MustCompile(`^([1-9][0-9]{0,11})([kmg]?)b?$`)
)

func wholeNumber(s string) (int64, bool) {
	if !decimal.MatchString(s) {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil
}

// parseBytes reads a number of bytes as engines write it; units are taken as the larger
// ones that engines know by that letter. Less than 0 is no such number.
func parseBytes(s string) int64 {
	m := byteNumber.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return -1
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	shift := map[string]int{"": 0, "k": 10, "m": 20, "g": 30}[m[2]]
	if err != nil || n > maxBytes>>shift {
		return -1
	}
	return n << shift
}
