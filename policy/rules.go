package policy

import "strings"

// The rules that a Reason or an Override can name. docs/policy.md explains each.
const (
	ruleProfileUnknown = "profiles.unknown"
	ruleLocked         = "profiles.NAME.locked"

	ruleImageSyntax   = "images.syntax"
	ruleImageID       = "images.id"
	ruleImageAllow    = "images.allow"
	ruleImagePins     = "images.pins"
	ruleRequireDigest = "images.require_digest"

	ruleNetworkUnknown = "networks.unknown"

	rulePathSyntax    = "mounts.path_syntax"
	ruleMode          = "mounts.mode"
	ruleModeNone      = "mounts.mode_none"
	ruleTarget        = "mounts.target"
	ruleTargetOverlap = "mounts.target_overlap"
	ruleTooMany       = "mounts.too_many"
	ruleDisabled      = "mounts.disabled"
	ruleAlwaysRefused = "mounts.always_refused"
	ruleAllowedRoots  = "mounts.allowed_roots"
	ruleNotADirectory = "mounts.not_a_directory"
	ruleUnheld        = "mounts.unheld"

	ruleEnvSyntax   = "env.syntax"
	ruleEnvReserved = "env.reserved"
	ruleEnvDeny     = "env.deny"
	ruleEnvAllow    = "env.allow"
	ruleEnvPin      = "env.pin"
	ruleEnvInject   = "env.inject"

	ruleRange       = "resources.range"
	ruleOverMax     = "resources.over_max"
	ruleTTLRange    = "ttl.range"
	ruleMaxLifetime = "ttl.max_lifetime"

	ruleTimeoutRange = "timeout.range"
	ruleTimeoutMax   = "timeout.max"

	ruleCwdSyntax  = "cwd.syntax"
	ruleCwdOutside = "cwd.outside_mount"

	// Of the engine's own API.
	ruleField          = "fields.refused"
	ruleOperation      = "operations.off"
	rulePrivileged     = "containers.privileged"
	ruleCapability     = "containers.capabilities"
	ruleSecurityOpt    = "containers.security_opt"
	ruleNamespace      = "containers.namespaces"
	ruleDevice         = "containers.devices"
	ruleUser           = "containers.user"
	ruleSysctl         = "containers.sysctls"
	ruleUlimit         = "containers.ulimits"
	ruleRuntime        = "containers.runtime"
	ruleRestart        = "containers.restart"
	ruleOOM            = "resources.oom"
	ruleSwap           = "resources.swap"
	ruleMountType      = "mounts.type"
	ruleMountOptions   = "mounts.options"
	ruleVolumes        = "mounts.volumes"
	ruleVolumeName     = "mounts.volume_name"
	ruleVolumeForeign  = "mounts.volume_foreign"
	ruleVolumeOptions  = "mounts.volume_options"
	ruleNetworkHost    = "networks.host"
	ruleNetworkForeign = "networks.foreign"
	ruleNetworkMixed   = "networks.mixed"
	ruleNetworkTooMany = "networks.too_many"
	ruleNetworkOptions = "networks.options"
	ruleNetworkOwn     = "networks.own"
	ruleNetworkName    = "networks.name"
	ruleInternal       = "networks.internal"
	rulePorts          = "ports.off"
	rulePortAddress    = "ports.address"
	rulePortRange      = "ports.range"
	rulePortSyntax     = "ports.syntax"
	ruleLogDriver      = "logs.driver"
	ruleLogOptions     = "logs.options"
	ruleDNS            = "dns.off"
	ruleDNSSyntax      = "dns.syntax"
	ruleTags           = "images.tags"
)

func lockedRule(profile string) string { return strings.Replace(ruleLocked, "NAME", profile, 1) }
