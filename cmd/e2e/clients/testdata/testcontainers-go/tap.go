package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// T is what a case works with.
type T struct {
	context.Context
	undo []func()
}

// after undoes at the case's end.
func (t *T) after(f func()) { t.undo = append(t.undo, f) }

type testCase struct {
	name string
	run  func(t *T)
}

// failure is what ends a case.
type failure struct{ text string }

func fail(format string, args ...any) { panic(failure{fmt.Sprintf(format, args...)}) }

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

// must returns the value of a call that may not fail.
func must[V any](v V, err error) V {
	check(err)
	return v
}

func equal(got, want any) {
	if g, w := fmt.Sprintf("%v", got), fmt.Sprintf("%v", want); g != w {
		fail("got %q, want %q", g, w)
	}
}

func within(text, part string) {
	if !strings.Contains(text, part) {
		fail("%q isn't in %.300q", part, text)
	}
}

// until waits until ok; the case's own time is the end of it.
func until(t *T, what string, ok func() bool) {
	for !ok() {
		select {
		case <-t.Done():
			fail("never: %s", what)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// tap runs cases and prints TAP.
func tap(cases []testCase) {
	wanted := regexp.MustCompile(os.Getenv("CASES"))
	failed := false
	for i, c := range cases {
		if !wanted.MatchString(c.name) {
			continue
		}
		line := fmt.Sprintf("ok %d - %s", i+1, c.name)
		if reason := strings.Join(strings.Fields(attempt(c)), " "); reason != "" {
			line, failed = "not "+line+" # "+reason[:min(len(reason), 600)], true
		}
		fmt.Println(line)
	}
	fmt.Printf("1..%d\n", len(cases))
	if failed {
		os.Exit(1)
	}
}

// attempt runs a case and returns why it failed.
func attempt(c testCase) (reason string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	t := &T{Context: ctx}
	defer func() {
		for _, f := range slices.Backward(t.undo) {
			f()
		}
	}()
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			reason = r.text
		default:
			reason = fmt.Sprintf("%v: %s", r, debug.Stack())
		}
	}()
	c.run(t)
	return ""
}
