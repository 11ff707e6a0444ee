// Package buildkit serves BuildKit's API on behalf of callers, and judges every field of it.
//
// It forwards no message. A client's build runs as one or more jobs of the engine, each with
// a source policy that denies every source that wasn't judged. BuildKit enforces that policy
// for all that a build reads: FROM, COPY --from, mounts, ADD, ONBUILD, and named contexts. A
// job's error names the first source that is missing; Server judges it, pins the image, and
// starts the next job. The client sees one build.
package buildkit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/bermhq/berm/policy"
)

// Caller owns a connection. Its methods are safe for many goroutines.
type Caller interface {
	// Tenant owns the builds and sessions.
	Tenant() string
	// Rules returns the policy's rules for BuildKit. It fails if the policy or the engine allows none.
	Rules(ctx context.Context) (policy.BuildKit, error)
	// Begin acquires room for one build, and returns its judge.
	Begin(ctx context.Context) (Build, error)
}

// Build judges one build. Its methods are safe for many goroutines. A refusal of the
// policy is a *policy.DeniedError.
type Build interface {
	// Context is canceled when the build must end.
	Context() context.Context
	// Rules are the policy's for BuildKit.
	Rules() policy.BuildKit
	// URLs are prefixes of addresses that the engine may fetch for ADD.
	URLs() []string
	// Args judges build arguments like a command's environment.
	Args(args map[string]string) (map[string]string, error)
	// Labels judges the image's labels, and adds those of the owner.
	Labels(own map[string]string) (map[string]string, error)
	// Limits returns the frontend attributes that limit the build's commands.
	Limits() (map[string]string, error)
	// Target judges a name for the image, and returns its full form.
	Target(name string) (string, error)
	// Base judges an image that the build reads, pulls it if pull is set or the engine
	// lacks it, and returns its ID.
	Base(ref string, pull bool, login Login) (id string, err error)
	// Pin tags an image as its pin, until release.
	Pin(id string) (ref string, release func(), err error)
	// Finish verifies the image that the build made, and gives it the names of Target. Of ids, the image's
	// is the first that the engine knows.
	Finish(ids, names []string) error
	// End releases the room. Err is the build's outcome.
	End(err error)
}

// Login asks a build's client for its credentials for a registry. Empty means none.
type Login func(ctx context.Context, registry string) (user, password string, err error)

func denied(rule, field, message, allowed string) error {
	return &policy.DeniedError{Reasons: []policy.Reason{{Rule: "buildkit." + rule, Field: field, Allowed: allowed, Message: message}}}
}

// derive returns a name for a list of strings. Different lists have different names.
func derive(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
