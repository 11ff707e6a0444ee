// Command ryuk stands in for the reaper of Testcontainers. It removes what has the labels
// that its clients name, once the last one has left.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	docker, err := client.NewClientWithOpts(client.WithHost("unix:///var/run/docker.sock"), client.WithAPIVersionNegotiation())
	if err != nil {
		return err
	}
	if _, err := docker.Ping(ctx); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", ":8080")
	if err != nil {
		return err
	}
	fmt.Println("Started")
	wanted := serve(listener)
	return remove(ctx, docker, wanted)
}

// serve reads filters until no client has been there for the time to reconnect.
func serve(listener net.Listener) map[string]bool {
	var mu sync.Mutex
	wanted := map[string]bool{}
	left, conns := make(chan struct{}), make(chan net.Conn)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			conns <- conn
		}
	}()
	wait, err := time.ParseDuration(os.Getenv("RYUK_RECONNECTION_TIMEOUT"))
	if err != nil {
		wait = 10 * time.Second
	}
	timer, clients := time.NewTimer(time.Minute), 0
	for {
		select {
		case conn := <-conns:
			clients++
			timer.Stop()
			go func() {
				for lines := bufio.NewScanner(conn); lines.Scan(); {
					for label := range strings.SplitSeq(lines.Text(), "&") {
						mu.Lock()
						wanted[strings.TrimSpace(strings.TrimPrefix(label, "label="))] = true
						mu.Unlock()
					}
					fmt.Fprintln(conn, "ACK")
				}
				left <- struct{}{}
			}()
		case <-left:
			if clients--; clients == 0 {
				timer.Reset(wait)
			}
		case <-timer.C:
			return wanted
		}
	}
}

func remove(ctx context.Context, docker *client.Client, wanted map[string]bool) error {
	for label := range wanted {
		by := filters.NewArgs(filters.Arg("label", label))
		containers, err := docker.ContainerList(ctx, container.ListOptions{All: true, Filters: by})
		if err != nil {
			return err
		}
		host, _ := os.Hostname()
		for _, c := range containers {
			if !strings.HasPrefix(c.ID, host) {
				_ = docker.ContainerRemove(ctx, c.ID, container.RemoveOptions{Force: true, RemoveVolumes: true})
			}
		}
		networks, err := docker.NetworkList(ctx, network.ListOptions{Filters: by})
		if err != nil {
			return err
		}
		for _, n := range networks {
			_ = docker.NetworkRemove(ctx, n.ID)
		}
		volumes, err := docker.VolumeList(ctx, volume.ListOptions{Filters: by})
		if err != nil {
			return err
		}
		for _, v := range volumes.Volumes {
			_ = docker.VolumeRemove(ctx, v.Name, true)
		}
		images, err := docker.ImageList(ctx, image.ListOptions{Filters: by})
		if err != nil {
			return err
		}
		for _, i := range images {
			_, _ = docker.ImageRemove(ctx, i.ID, image.RemoveOptions{Force: true, PruneChildren: true})
		}
	}
	return nil
}
