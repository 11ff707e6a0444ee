package doctor

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
)

// policyFacts are facts about the policy and its images.
type policyFacts struct {
	policy *policy.Policy // nil with an error
	err    error          // why berm serve would refuse it
	held   error          // why mounts can't be held; nil if they can
	images []imageFacts
}

// imageFacts are facts about an image of the profiles.
type imageFacts struct {
	ref string
	err error // nil: the engine has the image; errdefs' NotFound: it lacks the image; else not known
}

// lookAtPolicy reads the policy as berm serve does, and asks the engine for its images.
func lookAtPolicy(ctx context.Context, limit time.Duration, e *engineFacts) *policyFacts {
	p := &policyFacts{}
	p.policy, p.err = serve.Within(ctx, limit, func(context.Context) (*policy.Policy, error) {
		return serve.ReadPolicyAs(e.cfg, e.view, e.self, policy.ReadSecret)
	})
	p.held = serve.Try(ctx, limit, func(context.Context) error {
		if err := e.view.Holds(); err != nil {
			return err
		}
		return mountpin.Try(serve.Existing(filepath.Join(e.cfg.StateDir, "hold")))
	})
	if p.err != nil {
		return p
	}
	p.err = serve.CheckPolicy(e.cfg, p.held)(p.policy)
	p.images = imagesOf(p.policy)
	for i := range p.images {
		img := &p.images[i]
		if img.err = e.err; img.err == nil {
			img.err = serve.Try(ctx, limit, func(ctx context.Context) error { _, err := e.client.Image(ctx, img.ref); return err })
		}
	}
	return p
}

// imagesOf returns the default images of the profiles.
func imagesOf(p *policy.Policy) []imageFacts {
	var images []imageFacts
	for _, name := range p.Profiles() {
		pr, _ := p.Profile(name)
		ref := cmp.Or(p.Sandbox(policy.Request{Profile: name}).Spec.Image, pr.Image) // with the digest of a pin
		if !slices.ContainsFunc(images, func(img imageFacts) bool { return img.ref == ref }) {
			images = append(images, imageFacts{ref: ref})
		}
	}
	return images
}

func (p *policyFacts) judge(e *engineFacts) []finding {
	file := cmp.Or(e.cfg.PolicyFile, "the built-in policy")
	if p.policy == nil {
		return judge("policy.file", bad(true, said(p.err), wontStart, "correct "+file+"; docs/policy.yaml has every key"))
	}
	var images []finding
	if e.err == nil {
		images = p.judgeImages(e.cfg.Engine)
	}
	var loose []string
	for _, img := range p.images {
		if !strings.Contains(img.ref, "@") {
			loose = append(loose, img.ref)
		}
	}
	return slices.Concat(
		judge("policy.file",
			bad(p.err != nil, file+": "+said(p.err), wontStart, "change the policy, or where Berm runs"),
			okay(true, file+"; profiles: "+some(p.policy.Profiles()))),
		p.judgeHold(e), images,
		judge("policy.digests",
			okay(len(loose) == 0, "profiles' images have digests"),
			soft(true, "without a digest: "+some(loose), "whoever can push that tag chooses what sandboxes run", "pin it in the policy's images.pins, or give the digest")),
		p.judgeNetworks())
}

// judgeHold judges how Berm keeps mounted directories from being replaced: by holding them, or by
// trusting their roots.
func (p *policyFacts) judgeHold(e *engineFacts) []finding {
	own := e.cfg.Sandbox.ChatsRoot + e.cfg.Sandbox.DependenciesRoot + e.cfg.Sandbox.LambdaToolsRoot
	trusted, mounts := p.policy.TrustedRoots(), p.policy.AllowsMounts()
	known := p.err == nil && e.view.Asked
	found := "mode trusted, as mounts can't be held: " + said(p.held)
	return judge("policy.hold",
		okay(own == "" && !mounts, "no directory of the host can be mounted"),
		okay(p.held == nil, "mode held: mounts are held from their check until the engine has made them"),
		okay(known && !mounts, found+"; only Berm's own directories are mounted"),
		soft(known && len(trusted) == 0, found+"; there are no mounts.trusted_roots", "every request to mount a directory of the host is refused", serve.HoldRemedy),
		soft(known, found+"; trusted: "+some(trusted), "mounts that these don't cover are refused, and so are writable ones below them", serve.HoldRemedy))
}

func (p *policyFacts) judgeImages(cfg config.Engine) []finding {
	var absent, unknown []string
	pull := "docker pull "
	switch {
	case cfg.Kind == "containerd":
		pull = "ctr --address " + serve.EngineSocket(cfg) + " --namespace " + cmp.Or(cfg.Namespace, "berm") + " images pull "
	case cfg.Address != "": // the docker command needs the address too
		pull = "DOCKER_HOST=" + cfg.Address + " " + pull
	}
	for _, img := range p.images {
		switch {
		case errdefs.IsNotFound(img.err):
			absent = append(absent, img.ref)
		case img.err != nil:
			unknown = append(unknown, img.ref+": "+said(img.err))
		}
	}
	if len(absent) > 0 {
		pull += inFull(absent[0], cfg.Kind)
	}
	return judge("policy.images",
		soft(len(unknown) > 0, "can't be asked for: "+some(unknown), "whether they are there isn't known", "look at the engine's log"),
		bad(len(absent) > 0 && p.policy.PullPolicy() == policy.PullNever, "the engine lacks "+some(absent), "nothing can be made of them, as the policy says images.pull: never", pull),
		soft(len(absent) > 0, "the engine lacks "+some(absent), "the first create waits for the pull, or fails where the registry can't be reached", pull),
		okay(true, fmt.Sprintf("the engine has those of all %d profiles", len(p.policy.Profiles()))))
}

// inFull returns a reference for the engine's own client. That of containerd has no default
// registry.
func inFull(ref, kind string) string {
	if named, err := reference.ParseNormalizedNamed(ref); err == nil && kind == "containerd" {
		return named.String()
	}
	return ref
}

// judgeNetworks judges what sandboxes can reach on the policy's networks.
func (p *policyFacts) judgeNetworks() []finding {
	var words, together []string
	out := map[string]bool{}
	for _, n := range p.policy.Networks() {
		word := "with a way out"
		if n.Internal {
			word = "internal"
		}
		out[n.Name] = !n.Internal
		if !n.Isolated {
			together = append(together, n.Name)
		}
		words = append(words, n.Name+" ("+word+")")
	}
	found := "there are " + some(words)
	pr, _ := p.policy.Profile("")
	return judge("policy.networks",
		soft(len(together) > 0, "not isolated: "+some(together)+"; "+found, "sandboxes on it reach each other, and so what others run", "leave isolated: false out of the policy, or give each tenant a network of its own"),
		soft(out[pr.Network], "the profile default has "+pr.Network+"; "+found, "every sandbox that doesn't ask for less reaches the internet, and what else the host reaches", "have network: \"off\" in the profile default, and another profile for who needs it"),
		okay(true, "by default "+pr.Network+"; who asks gets "+some(words)))
}
