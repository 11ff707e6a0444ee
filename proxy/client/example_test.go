package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
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
		log.Fatal(err)
	}
	memory, ttl := int64(256), apitype.Duration(30*time.Minute)
	sb, err := c.Create(ctx, "build-42", apitype.SandboxRequest{MemoryMB: &memory, TTL: &ttl})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sb.Result, sb.Status)

	res, err := c.Exec(ctx, "build-42", apitype.ExecRequest{Command: apitype.Command{"echo", "hello"}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(res.Stdout)

	del, err := c.Delete(ctx, "build-42")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(del.Result)
	// Output:
	// created running
	// hello
	// deleted
}

// connected is a client of a server that stop ends.
func connected() (c *client.Client, stop func()) {
	_, url, stop := startBerm(runtimetest.FakeOptions{})
	c, err := client.New(client.Options{BaseURL: url, Token: red})
	if err != nil {
		log.Fatal(err)
	}
	return c, stop
}

func ExampleError() {
	c, stop := connected()
	defer stop()
	ctx := context.Background()

	etc := "/etc"
	_, err := c.Create(ctx, "build-42", apitype.SandboxRequest{HostPath: &etc})
	var e *client.Error
	if errors.As(err, &e) && e.Code == "policy_denied" {
		for _, r := range e.Problem.Reasons {
			fmt.Println(r.Field, r.Value)
		}
	}
	// Output: host_path /etc
}

func ExampleClient_List() {
	c, stop := connected()
	defer stop()
	ctx := context.Background()

	for _, key := range []string{"b", "a"} {
		if _, err := c.Create(ctx, key, apitype.SandboxRequest{Metadata: map[string]string{"team": "tools"}}); err != nil {
			log.Fatal(err)
		}
	}
	for sb, err := range c.List(ctx, client.ListOptions{Metadata: map[string]string{"team": "tools"}}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(sb.Key)
	}
	// Output:
	// a
	// b
}

// A chat outlives its sandboxes: a file goes up, a command works on it, and what that made
// comes down.
func Example_chat() {
	c, stop := connected()
	defer stop()
	ctx := context.Background()

	w, err := c.EnsureWorkspace(ctx, "user-7")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.EnsureChat(ctx, "chat-42", w.WorkspaceID); err != nil {
		log.Fatal(err)
	}
	f, err := c.PutChatFile(ctx, "chat-42", "draft.txt", strings.NewReader("hello"), client.PutChatFileOptions{ContentType: "text/plain"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(f.Name, f.SizeBytes)

	// The sandbox of the same key has the chat's directory.
	res, err := c.Exec(ctx, "chat-42", apitype.ExecRequest{
		Command: apitype.Command{"sh", "-c", "tr a-z A-Z </chat/draft.txt >/chat/final.txt"},
		Sandbox: &apitype.SandboxRequest{},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(res.Status)

	r, err := c.ReadChatFile(ctx, "chat-42", "final.txt", 0, 0)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	content, err := io.ReadAll(r)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", content)
	// Output:
	// draft.txt 5
	// completed
	// HELLO
}

func ExampleClient_PutChatFiles() {
	c, stop := connected()
	defer stop()
	ctx := context.Background()

	w, err := c.EnsureWorkspace(ctx, "user-7")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.EnsureChat(ctx, "chat-42", w.WorkspaceID); err != nil {
		log.Fatal(err)
	}
	// Each file is opened when its turn comes, and closed when it has been sent.
	local := func(yield func(client.NewChatFile, error) bool) {
		for _, name := range []string{"client.go", "chats.go"} {
			file, err := os.Open(name)
			if err != nil {
				yield(client.NewChatFile{}, err)
				return
			}
			more := yield(client.NewChatFile{Name: name, ContentType: "text/x-go", Content: file}, nil)
			_ = file.Close()
			if !more {
				return
			}
		}
	}
	if _, err := c.PutChatFiles(ctx, "chat-42", local); err != nil {
		log.Fatal(err)
	}
	for f, err := range c.ChatFiles(ctx, "chat-42", 0) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(f.Name, *f.ContentType)
	}
	// Output:
	// chats.go text/x-go
	// client.go text/x-go
}

func ExampleClient_ExecStream() {
	c, stop := connected()
	defer stop()
	ctx := context.Background()

	req := apitype.ExecRequest{
		Command: apitype.Command{"sh", "-c", "echo one; exit 3"},
		ExecID:  "job-1", // so that a broken connection doesn't end it
		Sandbox: &apitype.SandboxRequest{},
	}
	for ev, err := range c.ExecStream(ctx, "build-42", req) {
		if err != nil {
			log.Fatal(err)
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
