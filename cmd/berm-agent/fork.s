// This file is empty. The compiler takes functions without a body, as supervise.go
// has them, in a package with assembly only.
