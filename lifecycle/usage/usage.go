// Package usage measures what a directory holds that somebody else may be changing, with
// bounded time, memory and file descriptors.
package usage
