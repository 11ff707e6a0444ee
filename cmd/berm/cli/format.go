package cli

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"strings"
	"text/template"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/apitype"
)

const (
	formatTable = "table"
	formatJSON  = "json"
)

// parseFormat checks --output, and parses a template.
func (f *clientFlags) parseFormat() error {
	if f.output == formatTable || f.output == formatJSON {
		return nil
	}
	if !strings.Contains(f.output, "{{") {
		return usage("--output is %q, want table or json, or a Go template like '{{.Key}}'", f.output)
	}
	var err error
	f.template, err = template.New("output").Funcs(template.FuncMap{"json": toJSON, "join": strings.Join}).Parse(f.output)
	if err != nil {
		return usage("--output: %w", err)
	}
	return nil
}

func toJSON(v any) (string, error) {
	data, err := json.Marshal(v)
	return string(data), err
}

// execute prints a line by the template for v, or for each element if v is a list. What comes
// from a sandbox can't control the terminal.
func (f *clientFlags) execute(w io.Writer, v any) error {
	switch answer := v.(type) { // lists with more about them
	case *apitype.FileList:
		v = answer.Files
	case *apitype.FileMatches:
		v = answer.Matches
	case running:
		v = answer.rows()
	}
	list := reflect.ValueOf(v)
	if list.Kind() != reflect.Slice {
		list = reflect.ValueOf([]any{v})
	}
	var b bytes.Buffer
	for i := range list.Len() {
		if err := f.template.Execute(&b, list.Index(i).Interface()); err != nil {
			return usage("--output: %w", err)
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, harmless(b.String(), "\t\n"))
	return err
}

// event prints an event of a stream in a line, as JSON or by the template. It returns false
// if the output is to be a table.
func (f *clientFlags) event(w io.Writer, ev any) (bool, error) {
	switch {
	case f.output == formatJSON:
		return true, json.NewEncoder(w).Encode(ev)
	case f.template != nil:
		return true, f.execute(w, ev)
	}
	return false, nil
}

// quiet adds the flag -q, which prints one field of each element: by the template.
func (f *clientFlags) quiet(cmd *cobra.Command, template string) *cobra.Command {
	cmd.Flags().BoolFuncP("quiet", "q", "print names only", func(string) error {
		f.output = template
		return nil
	})
	return cmd
}
