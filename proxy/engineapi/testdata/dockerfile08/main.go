// Command dockerfile08 parses Dockerfiles with the parser of Docker Engine 20.10. It reads
// JSON strings, and answers each with a line of JSON.
package main

import (
	"encoding/json"
	"io"
	"log"
	"os"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// instruction is an instruction as the test compares it.
type instruction struct {
	Word  string
	Flags []string
	Args  []string
	JSON  bool
	Sub   []instruction
}

func read(n *parser.Node) instruction {
	out := instruction{Word: strings.ToUpper(n.Value), Flags: append([]string{}, n.Flags...), Args: []string{}, JSON: n.Attributes["json"], Sub: []instruction{}}
	for next := n.Next; next != nil; next = next.Next {
		out.Args = append(out.Args, next.Value)
		for _, c := range next.Children {
			out.Sub = append(out.Sub, read(c))
		}
	}
	return out
}

func parse(text string) (all []instruction, images []string, err error) {
	parsed, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return nil, nil, err
	}
	for _, n := range parsed.AST.Children {
		all = append(all, read(n))
	}
	stages, _, err := instructions.Parse(parsed.AST)
	for _, s := range stages {
		images = append(images, s.BaseName)
		for _, c := range s.Commands {
			if c, ok := c.(*instructions.CopyCommand); ok && c.From != "" {
				images = append(images, c.From)
			}
		}
	}
	return all, images, err
}

func main() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var text string
		if err := in.Decode(&text); err == io.EOF {
			return
		} else if err != nil {
			log.Fatal(err)
		}
		var answer struct {
			Error  string
			All    []instruction
			Images []string
		}
		var err error
		if answer.All, answer.Images, err = parse(text); err != nil {
			answer.Error = err.Error()
		}
		if err := out.Encode(answer); err != nil {
			log.Fatal(err)
		}
	}
}
