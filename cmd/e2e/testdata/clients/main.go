// Command clients stands for two programs, by the name that it is called by, in an image that is
// made without a network: docker, of which it knows `run --rm IMAGE COMMAND…`, and curl.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"
)

func main() {
	var code int
	var err error
	switch args := os.Args[1:]; {
	case filepath.Base(os.Args[0]) == "curl":
		err = curl(args)
	case len(args) > 3 && args[0] == "run" && args[1] == "--rm":
		code, err = run(context.Background(), args[2], args[3:])
	default:
		err = errors.New("want run --rm IMAGE COMMAND...")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, os.Args[0]+":", err)
		code = 125
	}
	os.Exit(code)
}

func curl(args []string) error {
	flags := flag.NewFlagSet("curl", flag.ContinueOnError)
	flags.Bool("sS", true, "")
	flags.Bool("fail-with-body", true, "")
	limit := flags.Int("max-time", 0, "")
	method, body := flags.String("X", http.MethodGet, ""), flags.String("d", "", "")
	header := http.Header{}
	flags.Func("H", "", func(line string) error {
		name, value, _ := strings.Cut(line, ": ")
		header.Set(name, value)
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	req, err := http.NewRequest(*method, flags.Arg(0), strings.NewReader(*body))
	if err != nil {
		return err
	}
	req.Header = header
	resp, err := (&http.Client{Timeout: time.Duration(*limit) * time.Second}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return errors.New(resp.Status)
	}
	return nil
}

func run(ctx context.Context, image string, command []string) (int, error) {
	engine, err := client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation())
	if err != nil {
		return 0, err
	}
	made, err := engine.ContainerCreate(ctx, &container.Config{Image: image, Cmd: command}, &container.HostConfig{AutoRemove: true}, nil, nil, "")
	if err != nil {
		return 0, err
	}
	stream, err := engine.ContainerAttach(ctx, made.ID, container.AttachOptions{Stream: true, Stdout: true, Stderr: true})
	if err != nil {
		return 0, err
	}
	defer stream.Close()
	ended, failed := engine.ContainerWait(ctx, made.ID, container.WaitConditionNextExit)
	if err := engine.ContainerStart(ctx, made.ID, container.StartOptions{}); err != nil {
		return 0, err
	}
	if _, err := stdcopy.StdCopy(os.Stdout, os.Stderr, stream.Reader); err != nil {
		return 0, err
	}
	select {
	case result := <-ended:
		return int(result.StatusCode), nil
	case err := <-failed:
		return 0, err
	}
}
