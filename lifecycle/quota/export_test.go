package quota

// Live reports whether a key has a sandbox.
func Live(s *Service, tenant, key string) bool { return s.live(tenant, key) }
