package main

import (
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// broken is a policy that is refused.
const broken = "version: 1\nprofiles: {c: {extends: nothing}}\n"

var (
	must         = check.Must // ends a test if a step of its own fails
	write        = check.Write
	wantEmptyDir = check.EmptyDir
)
