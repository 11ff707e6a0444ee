package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// shared are the engines that tests have in common, by kind.
var shared = map[string]*sharedEngine{"docker": {}, "containerd": {}}

type sharedEngine struct {
	start sync.Once
	e     *testEngine
	err   error
}

// commonEngine is the engine of a kind that tests share, which starts with the first one.
// Each test removes what it made there.
func commonEngine(t testing.TB, kind string) *testEngine {
	t.Helper()
	engine.Require(t, kind)
	s := shared[kind]
	s.start.Do(func() { s.e, s.err = newEngine(kind, engine.Options{}) })
	if s.err != nil {
		engine.Lacking(t, kind, s.err)
	}
	e := *s.e // a test may change its settings
	return &e
}

// end closes the engine, on which nothing of any server may be left.
func (s *sharedEngine) end() error {
	if s.e == nil {
		return nil
	}
	left, err := s.left()
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("the tests left on %s:\n%s", s.e.config.Kind, strings.Join(left, "\n")))
	}
	return errors.Join(err, s.e.Close())
}

// left lists what is left of containers and networks, once what ends by itself, such as
// shims, has ended.
func (s *sharedEngine) left() (left []string, err error) {
	ctx := context.Background()
	if s.e.containerd == nil {
		for _, list := range []string{"ps --all --filter label=berm.owner", "network ls --filter label=berm.door", "volume ls --filter label=berm.door"} {
			out, err := command(ctx, "", dockerEnv(s.e.config.Address, s.e.Dir()), "docker", append(strings.Fields(list), "--quiet")...)
			if err != nil {
				return nil, err
			}
			for id := range strings.FieldsSeq(out) {
				left = append(left, list+": "+id)
			}
		}
		return left, nil
	}
	left, err = s.e.containerd.Settled(ctx, filepath.Join(s.e.Dir(), "root"), func(context.Context) error { return nil })
	if err != nil {
		return nil, err
	}
	for _, look := range []string{"ip -o link", "iptables-save"} {
		out, err := command(ctx, "", nil, "nsenter", append([]string{"--net=" + s.e.Netns()}, strings.Fields(look)...)...)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(out) {
			if lower := strings.ToLower(line); strings.Contains(lower, "berm") || strings.Contains(lower, "veth") {
				left = append(left, look+": "+strings.TrimSpace(line))
			}
		}
	}
	return left, nil
}
