package main

import "github.com/bermhq/berm/runtime/agent/files"

var (
	// failureOf returns the failure that Berm gets for an error.
	failureOf = files.Failure
	// invalid returns the failure of an invalid request.
	invalid = files.Invalid
	// quote quotes a text, cut to 256 bytes.
	quote = files.Quote
	// reason returns an error's text without the names in it.
	reason = files.Reason
)
