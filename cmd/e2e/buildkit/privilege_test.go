package buildkit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	control "github.com/moby/buildkit/api/services/control"
)

// saying has a step find out something that ends in WORD-yes.
func saying(name, dockerfile string, change ...func(*build)) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		word := s.word()
		b := build{dockerfile: strings.NewReplacer("WORD", word, "WEB", s.web.addr, "BASE", base).Replace(dockerfile), attrs: map[string]string{}}
		for _, f := range change {
			f(&b)
		}
		for k, v := range b.attrs {
			b.attrs[k] = strings.ReplaceAll(v, "WEB", s.web.addr)
		}
		r, err := s.bob.run(ctx, b)
		if r != nil && strings.Contains(r.log, "\nyes "+word) || r != nil && strings.HasPrefix(r.log, "yes "+word) {
			return nil
		}
		if err != nil && strings.Contains(err.Error(), "exit code: ") { // the step ran, and said no
			return errHarmless
		}
		return errors.Join(err, harmless(err))
	}}
}

func entitled(names ...string) func(*build) {
	return func(b *build) { b.change = func(req *control.SolveRequest) { req.Entitlements = names } }
}

func step(test string) string { return "FROM BASE\nRUN " + test + " && printf '\\nyes %s\\n' WORD" }

var privilegeAttacks = []attack{
	saying("network host", "FROM BASE\nRUN --network=host wget -qO- http://WEB/pub/f && printf '\\nyes %s\\n' WORD", entitled("network.host")),
	saying("network host without the entitlement", "FROM BASE\nRUN --network=host wget -qO- http://WEB/pub/f && printf '\\nyes %s\\n' WORD").tamed(": it needs an entitlement, or the daemon's consent"),
	saying("network of all steps", step("wget -qO- http://WEB/pub/f"), with("force-network-mode", "host"), entitled("network.host")),
	saying("network of the engine", step("ip addr | grep -q eth0")),
	saying("network by name", "FROM BASE\nRUN --network=default ip addr | grep -q eth0 && printf '\\nyes %s\\n' WORD"),
	saying("security", "FROM BASE\nRUN --security=insecure mount -t tmpfs x /mnt && printf '\\nyes %s\\n' WORD", entitled("security.insecure")).tamed(": it needs an entitlement, or the daemon's consent"),
	saying("security of a frontend's", "FROM BASE\nRUN --security=insecure mount -t tmpfs x /mnt && printf '\\nyes %s\\n' WORD").tamed(": it needs an entitlement, or the daemon's consent"),
	saying("cgroup parent", step("grep -q elsewhere /proc/self/cgroup"), with("cgroup-parent", "/elsewhere")),
	saying("ulimit", step("test $(ulimit -n) = 12345"), with("ulimit", "nofile=12345:12345")),
	saying("shared memory", step("df /dev/shm | grep -q 7340032"), with("shm-size", "7516192768")),
	saying("hosts", step("grep -q evil /etc/hosts"), with("add-hosts", "evil=1.2.3.4")),
	saying("host name", step("test $(hostname) = evil"), with("hostname", "evil")),
	saying("host name by argument", step("test $(hostname) = evil"), with("build-arg:BUILDKIT_SANDBOX_HOSTNAME", "evil")),
	saying("memory", step("grep -q 99999744 /sys/fs/cgroup/memory/memory.limit_in_bytes"), with("memory", "99999744"), with("memswap", "99999744")).tamed("28: it knows no limits of steps"),
	saying("processors", step("grep -q 77000 /sys/fs/cgroup/cpu/cpu.cfs_quota_us"), with("cpuquota", "77000"), with("cpuperiod", "100000")).tamed("28: it knows no limits of steps"),
	saying("device", "FROM BASE\nRUN --device=vendor.com/x=y printf '\\nyes %s\\n' WORD", entitled("device")).tamed("28: it has no devices"),
	saying("device attribute", step("true"), with("device", "vendor.com/x=y")),
	saying("more processes than all may have", step("true"), with("cpu-shares", "1"), with("cpusetcpus", "0")),
	saying("ssh and secrets of others", "FROM BASE\nRUN --mount=type=secret,id=t grep -q . /run/secrets/t && printf '\\nyes %s\\n' WORD").tamed(": a session has its own only"),
}

var sourceAttacks = []attack{
	saying("http", "FROM BASE\nADD http://WEB/private/f /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD"),
	saying("redirect", "FROM BASE\nADD http://WEB/private/../pub/away /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD"),
	saying("parent of an allowed one", "FROM BASE\nADD http://WEB/pub/../private/f /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD"),
	saying("escaped parent of an allowed one", "FROM BASE\nADD http://WEB/pub/%2e%2e/private/f /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD").tamed(": there is no such file"),
	saying("other spelling", "FROM BASE\nADD HTTP://WEB/private/f /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD").tamed(": there is no such file"),
	saying("user", "FROM BASE\nADD http://x@WEB/private/f /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD"),
	saying("by an argument", "FROM BASE\nARG U\nADD $U /f\n"+"RUN grep -q MARK /f && printf '\\nyes %s\\n' WORD", with("build-arg:U", "http://WEB/private/f")),
	{name: "remote Dockerfile", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{attrs: map[string]string{"context": "http://" + s.web.addr + "/private/f"}})
		return fetched(err)
	}},
	{name: "named context", tame: "28: it takes archives only", try: func(ctx context.Context, s *side) error {
		return s.leaks(ctx, build{dockerfile: "FROM " + base + "\nCOPY --from=x / /x\nRUN echo " + s.word() + "; cat /x/*", attrs: map[string]string{"context:x": "http://" + s.web.addr + "/private/f"}})
	}},
	{name: "git", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nADD http://" + s.web.addr + "/private/r.git /r"})
		return fetched(err)
	}},
	{name: "git context", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{attrs: map[string]string{"context": "http://" + s.web.addr + "/private/r.git"}})
		return fetched(err)
	}},
	{name: "git named context", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nCOPY --from=x / /x", attrs: map[string]string{"context:x": "http://" + s.web.addr + "/private/r.git"}})
		return fetched(err)
	}},
	{name: "layout", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM x", attrs: map[string]string{"context:x": "oci-layout://x@sha256:" + strings.Repeat("a", 64)}})
		if err != nil && !strings.Contains(err.Error(), "PermissionDenied") {
			return nil // the engine looked for it
		}
		return err
	}},
	{name: "upload of another session's", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nADD http://buildkit-session/abcdef /f"})
		if err != nil && strings.Contains(err.Error(), "Unimplemented") && s.bare {
			return nil // the engine asked for it
		}
		return err
	}},
}

// fetched reports whether the engine asked the network.
func fetched(err error) error {
	if err == nil {
		return nil
	}
	for _, refused := range []string{"PermissionDenied", "denied by policy", "is not allowed by"} {
		if strings.Contains(err.Error(), refused) {
			return err
		}
	}
	return nil
}

// secretLayer reuses a layer that Alice has made with a secret.
func secretLayer(mount, read string) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		b := build{
			dockerfile: "FROM " + base + "\nRUN --mount=type=secret," + mount + " echo " + s.word() + "; " + read + " >/s\nRUN cat /s",
			secrets:    map[string][]byte{"t": []byte(marker + "secret")},
		}
		if _, err := s.alice.run(ctx, b); err != nil {
			return fmt.Errorf("alice: %w", err)
		}
		b.secrets = nil
		b.dockerfile += " && echo " + s.word()
		return stepFailed(s.leaks(ctx, b))
	}
}

var cacheAttacks = []attack{
	{name: "layer of a secret", try: secretLayer("id=t", "cat /run/secrets/t")},
	{name: "layer of a secret variable", try: secretLayer("id=t,env=T", "echo $T")},
	{name: "running step of a secret", try: func(ctx context.Context, s *side) error {
		word := s.word()
		b := build{
			dockerfile: "FROM " + base + "\nRUN --mount=type=secret,id=t echo " + word + "; sleep 3; cat /run/secrets/t",
			secrets:    map[string][]byte{"t": []byte(marker + "secret")},
		}
		ended := make(chan error, 1)
		go func() {
			_, err := s.alice.run(ctx, b)
			ended <- err
		}()
		time.Sleep(1500 * time.Millisecond) // her step runs, and his would join it
		b.secrets = nil
		err := stepFailed(s.leaks(ctx, b))
		return errors.Join(err, errIf(<-ended, "alice"))
	}},
	{name: "mount", try: cacheMount("id=c")},
	{name: "mount of her namespace", tame: ": it has none", try: cacheMount("id=../" + "NS/c")},
	{name: "mount by its target", try: cacheMount("")},
	{name: "namespace", try: func(ctx context.Context, s *side) error {
		word := s.word()
		if _, err := s.alice.run(ctx, build{dockerfile: "FROM " + base + "\nRUN --mount=type=cache,target=/c,id=" + word + " echo " + marker + "cache >/c/s", attrs: map[string]string{}}); err != nil {
			return fmt.Errorf("alice: %w", err)
		}
		return s.leaks(ctx, build{dockerfile: "FROM " + base + "\nRUN --mount=type=cache,target=/c,id=" + word + " echo " + s.word() + "; cat /c/s", attrs: map[string]string{"build-arg:BUILDKIT_CACHE_MOUNT_NS": ""}})
	}},
	{name: "import", try: cacheOptions(&control.CacheOptions{Imports: []*control.CacheOptionsEntry{{Type: "registry", Attrs: map[string]string{"ref": "127.0.0.1:1/x:1"}}}})},
	{name: "import, deprecated", try: cacheOptions(&control.CacheOptions{ImportRefsDeprecated: []string{"127.0.0.1:1/x:1"}})},
	{name: "export", tame: "2: where the store can't export", try: cacheOptions(&control.CacheOptions{Exports: []*control.CacheOptionsEntry{{Type: "registry", Attrs: map[string]string{"ref": "127.0.0.1:1/x:1"}}}})},
	{name: "export, deprecated", tame: "2: no engine looks at it", try: cacheOptions(&control.CacheOptions{ExportRefDeprecated: "127.0.0.1:1/x:1"})},
	{name: "import by an attribute", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, attrs: map[string]string{"cache-from": "127.0.0.1:1/x:1"}})
		return err // it is ignored when it isn't there
	}},
}

func errIf(err error, what string) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// stepFailed takes a step that failed for one that was run, and told nothing.
func stepFailed(err error) error {
	if err != nil && (strings.Contains(err.Error(), "exit code: ") || strings.Contains(err.Error(), "secret t: not found")) {
		return errHarmless
	}
	return err
}

// cacheMount has Alice write and Bob read a mount.
func cacheMount(spell string) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		word := s.word()
		flags := strings.ReplaceAll(spell, "id=c", "id=c"+word)
		if spell == "" {
			flags = "sharing=shared"
		}
		hers := strings.ReplaceAll(flags, "../NS/", "")
		if _, err := s.alice.run(ctx, build{dockerfile: "FROM " + base + "\nRUN --mount=type=cache,target=/c," + hers + " echo " + word + "; echo " + marker + "cache >/c/s"}); err != nil {
			return fmt.Errorf("alice: %w", err)
		}
		return stepFailed(s.leaks(ctx, build{dockerfile: "FROM " + base + "\nRUN --mount=type=cache,target=/c," + strings.ReplaceAll(flags, "NS", cacheNamespace("alice")) + " echo " + s.word() + "; cat /c/s"}))
	}
}

// cacheOptions has the engine look for or write a cache elsewhere.
func cacheOptions(o *control.CacheOptions) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nRUN echo " + s.word(), change: func(req *control.SolveRequest) { req.Cache = o }})
		return fetched(err)
	}
}
