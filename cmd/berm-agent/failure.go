package main

import "github.com/bermhq/berm/runtime/agent/files"

var (
	// failureOf returns what Berm is sent of an error.
	failureOf = files.Failure
	// invalid returns the failure of a request that makes no sense.
	invalid = files.Invalid
	// quote makes any bytes readable, and no longer than a message may be.
	quote = files.Quote
	// reason returns an error's text without the names in it.
	reason = files.Reason
)
