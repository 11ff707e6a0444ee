package policy

// Policy is a loaded policy: immutable, safe for many goroutines.
type Policy struct{}
