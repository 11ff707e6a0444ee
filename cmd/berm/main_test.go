package main

import (
	"context"
	"os"
	"testing"
)

// asBerm makes this test binary behave as berm itself: tests that need a process of
// their own run os.Args[0] with it in the environment.
const asBerm = "RUN_AS_BERM=1"

func TestMain(m *testing.M) {
	if os.Getenv("RUN_AS_BERM") == "1" {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}
