package sandboxapi_test

import (
	"context"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
)

func (s *scripted) Files(context.Context, string, string) (*lifecycle.FileAccess, error) {
	if _, err := s.outcome(); err != nil {
		return nil, err
	}
	return nil, errdefs.ErrNotImplemented
}

func (s *scripted) Ports(context.Context, string, string) (*lifecycle.PortAccess, error) {
	if _, err := s.outcome(); err != nil {
		return nil, err
	}
	return nil, errdefs.ErrNotImplemented
}
