package client_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func Example() {
	_, url, stop := startBerm(runtimetest.FakeOptions{})
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	c, err := client.New(client.Options{BaseURL: url, Token: red})
	if err != nil {
		fmt.Println(err)
		return
	}
	memory, ttl := int64(256), apitype.Duration(30*time.Minute)
	sb, err := c.Create(ctx, "build-42", apitype.SandboxRequest{MemoryMB: &memory, TTL: &ttl})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(sb.Result, sb.Status)

	res, err := c.Exec(ctx, "build-42", apitype.ExecRequest{Command: apitype.Command{"echo", "hello"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(res.Stdout)

	del, err := c.Delete(ctx, "build-42")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(del.Result)
	// Output:
	// created running
	// hello
	// deleted
}

func ExampleError() {
	_, url, stop := startBerm(runtimetest.FakeOptions{})
	defer stop()
	ctx := context.Background()

	c, err := client.New(client.Options{BaseURL: url, Token: red})
	if err != nil {
		fmt.Println(err)
		return
	}
	etc := "/etc"
	_, err = c.Create(ctx, "build-42", apitype.SandboxRequest{HostPath: &etc})
	var e *client.Error
	if errors.As(err, &e) && e.Code == "policy_denied" {
		for _, r := range e.Problem.Reasons {
			fmt.Println(r.Field, r.Value)
		}
	}
	// Output: host_path /etc
}

func ExampleClient_List() {
	_, url, stop := startBerm(runtimetest.FakeOptions{})
	defer stop()
	ctx := context.Background()

	c, err := client.New(client.Options{BaseURL: url, Token: red})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, key := range []string{"b", "a"} {
		if _, err := c.Create(ctx, key, apitype.SandboxRequest{Metadata: map[string]string{"team": "tools"}}); err != nil {
			fmt.Println(err)
			return
		}
	}
	for sb, err := range c.List(ctx, client.ListOptions{Metadata: map[string]string{"team": "tools"}}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(sb.Key)
	}
	// Output:
	// a
	// b
}

func ExampleClient_ExecStream() {
	_, url, stop := startBerm(runtimetest.FakeOptions{})
	defer stop()
	ctx := context.Background()

	c, err := client.New(client.Options{BaseURL: url, Token: red})
	if err != nil {
		fmt.Println(err)
		return
	}
	req := apitype.ExecRequest{
		Command: apitype.Command{"sh", "-c", "echo one; exit 3"},
		ExecID:  "job-1", // so that a broken connection doesn't end it
		Sandbox: &apitype.SandboxRequest{},
	}
	for ev, err := range c.ExecStream(ctx, "build-42", req) {
		if err != nil {
			fmt.Println(err)
			return
		}
		switch ev.Event {
		case apitype.EventStdout, apitype.EventStderr:
			fmt.Print(ev.Data)
		case apitype.EventExit:
			fmt.Println(ev.Status, *ev.ExitCode)
		}
	}
	// Output:
	// one
	// completed 3
}
