package lifecycle

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/bermhq/berm/runtime"
)

// LabelSeal is the label that proves that Berm wrote the others: an HMAC over all of them.
// Images, builds and engines can put any other label on a container.
const LabelSeal = LabelPrefix + "seal"

// LabelPrefix begins the names of Berm's own labels, in any case of letters.
const LabelPrefix = "berm."

// SealKeyBytes is the length of a Sealer's key.
const SealKeyBytes = 32

// sealContext separates these HMACs from others of the same key, and from a later form.
const sealContext = "berm label seal 1"

// SealerOptions configure a Sealer.
type SealerOptions struct {
	Key    []byte       // SealKeyBytes random bytes, the same for the life of the instance; nil: random ones for this Sealer only
	Owner  string       // mandatory: this instance's ID
	Store  SealStore    // nil: an object without a seal is never the instance's
	Logger *slog.Logger // nil discards
}

// SealStore keeps the seals of objects that were made before there were any.
type SealStore interface {
	// Seals returns the stored seals. Open is true until CloseSeals is called.
	Seals(ctx context.Context) (seals []string, open bool, err error)
	// CloseSeals stores seals durably. It is called once.
	CloseSeals(ctx context.Context, seals []string) error
}

// Sealer seals labels and recognizes objects by their seal. It is safe for many goroutines.
type Sealer struct {
	opts SealerOptions

	mu     sync.Mutex
	kept   map[string]struct{} // seals in the store
	open   bool                // the store takes seals
	logged map[string]struct{} // objects that report has logged
}

// maxLogged bounds Sealer.logged.
const maxLogged = 16 << 10

// NewSealer reads the seals that the store keeps.
func NewSealer(ctx context.Context, opts SealerOptions) (*Sealer, error) {
	if opts.Key == nil {
		opts.Key = make([]byte, SealKeyBytes)
		_, _ = rand.Read(opts.Key) // it never fails
	}
	if len(opts.Key) != SealKeyBytes || opts.Owner == "" {
		return nil, fmt.Errorf("lifecycle: a sealer needs an owner and a key of %d bytes", SealKeyBytes)
	}
	opts.Logger = cmp.Or(opts.Logger, slog.New(slog.DiscardHandler))
	s := &Sealer{opts: opts, kept: map[string]struct{}{}, logged: map[string]struct{}{}}
	if opts.Store == nil {
		return s, nil
	}
	seals, open, err := opts.Store.Seals(ctx)
	s.keep(seals, open)
	return s, err
}

func (s *Sealer) keep(seals []string, open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, seal := range seals {
		s.kept[seal] = struct{}{}
	}
	s.open = open
}

// Seal adds the seal to the labels of an object that is about to be made, and returns them.
// All labels whose names begin with LabelPrefix must be final.
func (s *Sealer) Seal(kind ObjectKind, labels map[string]string) map[string]string {
	labels[LabelSeal] = s.seal(kind, "", labels)
	return labels
}

// Valid reports whether labels are those of an object that this instance made. The ID is the
// engine's. An object that only claims to be the instance's is logged once.
func (s *Sealer) Valid(kind ObjectKind, id string, labels map[string]string) bool {
	if s.opts.Owner != labels[LabelOwner] {
		return false
	}
	got, sealed := labels[LabelSeal]
	if sealed && hmac.Equal([]byte(got), []byte(s.seal(kind, "", labels))) {
		return true
	}
	if !sealed {
		seal := s.seal(kind, id, labels)
		s.mu.Lock()
		_, kept := s.kept[seal]
		s.mu.Unlock()
		if kept {
			return true
		}
	}
	s.report(kind, id, map[bool]string{true: "the seal is another key's, or of other labels", false: "there is no seal"}[sealed])
	return false
}

// report logs once that an object isn't this instance's although its labels say so.
func (s *Sealer) report(kind ObjectKind, id, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	object := string(kind) + " " + id
	if _, done := s.logged[object]; done || s.open { // while open, sealEarlier may still add the seal
		return
	}
	if len(s.logged) >= maxLogged {
		clear(s.logged)
	}
	s.logged[object] = struct{}{}
	s.opts.Logger.Warn("object_not_ours", "kind", string(kind), "id", id, "reason", reason)
}

// seal computes the HMAC over the context, the kind, the ID, and Berm's labels in the order of
// their names. Each part is preceded by its length, so that no two inputs read the same.
func (s *Sealer) seal(kind ObjectKind, id string, labels map[string]string) string {
	mac := hmac.New(sha256.New, s.opts.Key)
	add := func(part string) {
		mac.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		mac.Write([]byte(part))
	}
	add(sealContext)
	add(string(kind))
	add(id)
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		if IsOwnLabel(name) && name != LabelSeal {
			add(name)
			add(labels[name])
		}
	}
	return hex.EncodeToString(mac.Sum(nil))
}

// IsOwnLabel reports whether a label's name is one of Berm's own.
func IsOwnLabel(name string) bool {
	return len(name) >= len(LabelPrefix) && strings.EqualFold(name[:len(LabelPrefix)], LabelPrefix)
}

// Genuine returns the containers that this instance made, as Firsts does.
func (s *Sealer) Genuine(list []runtime.Container, known func(id string) bool) []runtime.Container {
	sealed := slices.DeleteFunc(slices.Clone(list), func(c runtime.Container) bool { return !s.Valid(ObjectContainer, c.ID, c.Labels) })
	return s.Firsts(sealed, known)
}

// Firsts returns one container for each session, among those with valid labels. If several have
// the same session, it takes the one whose ID is known, else the oldest: a copy of labels is
// younger than the original. If none is the oldest, it takes none.
func (s *Sealer) Firsts(list []runtime.Container, known func(id string) bool) []runtime.Container {
	bySession := map[string][]runtime.Container{}
	for _, c := range list {
		session := cmp.Or(c.Labels[LabelSessionID], c.ID)
		bySession[session] = append(bySession[session], c)
	}
	var out []runtime.Container
	for _, same := range bySession {
		slices.SortFunc(same, func(a, b runtime.Container) int { return a.CreatedAt.Compare(b.CreatedAt) })
		first := slices.IndexFunc(same, func(c runtime.Container) bool { return known(c.ID) })
		if first < 0 && (len(same) == 1 || same[0].CreatedAt.Before(same[1].CreatedAt)) {
			first = 0
		}
		for i, c := range same {
			if i == first {
				out = append(out, c)
			} else {
				s.report(ObjectContainer, c.ID, "another container has its session")
			}
		}
	}
	return out
}
