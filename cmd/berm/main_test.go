package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
)

// asBerm makes this test binary behave as berm itself: tests that need a process of
// their own run os.Args[0] with it in the environment.
const asBerm = "RUN_AS_BERM=1"

func TestMain(m *testing.M) {
	if from, to, ok := strings.Cut(os.Getenv(plainProxyEnv), ":"); ok {
		_, _ = fmt.Fprintln(os.Stderr, plainProxy(from, to))
		os.Exit(1)
	}
	if os.Getenv("RUN_AS_BERM") == "1" {
		os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	if dir := os.Getenv(bareFiles); dir != "" {
		if err := serveBareFiles(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}
