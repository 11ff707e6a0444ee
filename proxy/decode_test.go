package proxy_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

func TestDecodeJSON(t *testing.T) {
	ttl := apitype.Duration(30 * time.Minute)
	image, cpus := "alpine", 1.5
	tests := map[string]struct {
		in   string
		want apitype.SandboxRequest
	}{
		"empty":          {`{}`, apitype.SandboxRequest{}},
		"spaces":         {" \n{ }\t", apitype.SandboxRequest{}},
		"values":         {`{"image":"alpine","cpus":1.5,"ttl":"30m"}`, apitype.SandboxRequest{Image: &image, CPUs: &cpus, TTL: &ttl}},
		"null is absent": {`{"image":null,"env":null,"extra_mounts":null,"ttl":null,"agent_id":null}`, apitype.SandboxRequest{}},
		"escaped name":   {`{"\u0069mage":"alpine"}`, apitype.SandboxRequest{Image: &image}},
		"map keys may differ by case": {`{"env":{"A":"1","a":"2"}}`,
			apitype.SandboxRequest{Env: map[string]string{"A": "1", "a": "2"}}},
		"mounts": {`{"extra_mounts":[{"host_path":"/a","mount_path":"/b"},{"host_path":"/c","mount_path":"/d","mode":"rw"}]}`,
			apitype.SandboxRequest{ExtraMounts: []apitype.MountRequest{{HostPath: "/a", MountPath: "/b"}, {HostPath: "/c", MountPath: "/d", Mode: "rw"}}}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var got apitype.SandboxRequest
			must(t, proxy.DecodeJSON([]byte(tt.in), &got))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestDecodeJSONLongNames holds that what is told of a body is short, whatever its names.
func TestDecodeJSONLongNames(t *testing.T) {
	long := strings.Repeat("é", 1<<18)
	for name, in := range map[string]string{
		"unknown": `{"` + long + `":1}`,
		"twice":   `{"env":{"` + long + `":"1","` + long + `":"2"}}`,
		"kind":    `{"env":{"` + long + `":1}}`,
	} {
		t.Run(name, func(t *testing.T) {
			var got apitype.SandboxRequest
			err := proxy.DecodeJSON([]byte(in), &got)
			var invalid *lifecycle.InvalidError
			told := ""
			if errors.As(err, &invalid) {
				told = invalid.Field
			}
			if err == nil || len(err.Error()) > 512 || len(told) > 512 {
				t.Errorf("%d bytes are told, and a field of %d", len(err.Error()), len(told))
			}
		})
	}
	var got apitype.SandboxRequest
	if err := proxy.DecodeJSON([]byte(`{"env":{"`+long+`":"1"}}`), &got); err != nil || got.Env[long] != "1" {
		t.Errorf("a long name of a map: %v", err)
	}
}

func TestDecodeJSONMalformed(t *testing.T) {
	for name, tt := range map[string]struct{ in, detail string }{
		"nothing":                {``, "not one valid JSON value"},
		"cut":                    {`{"image":"alp`, "not one valid JSON value"},
		"trailing object":        {`{}{}`, "not one valid JSON value"},
		"trailing text":          {`{} x`, "not one valid JSON value"},
		"comment":                {`{/**/}`, "not one valid JSON value"},
		"byte order mark":        {"\xef\xbb\xbf{}", "not one valid JSON value: invalid character '\\ufeff'"},
		"not UTF-8":              {"{\"image\":\"\xff\"}", "not one valid JSON value: invalid UTF-8, after byte 10"},
		"unknown":                {`{"imgae":"x"}`, `unknown field "imgae"`},
		"unknown of other case":  {`{"Image":"x"}`, `unknown field "Image"`},
		"Go name":                {`{"CPUs":1}`, `unknown field "CPUs"`},
		"unknown inside":         {`{"extra_mounts":[{"host_path":"/a","mount_path":"/b","uid":0}]}`, `unknown field "extra_mounts[0].uid"`},
		"twice":                  {`{"cpus":1,"cpus":2}`, `field "cpus" is there twice`},
		"twice, once escaped":    {`{"cpus":1,"\u0063pus":2}`, `field "cpus" is there twice`},
		"twice in a map":         {`{"env":{"A":"1","A":"2"}}`, `field "env.A" is there twice`},
		"twice in a list's item": {`{"extra_mounts":[{"mode":"ro","mode":"rw"}]}`, `field "extra_mounts[0].mode" is there twice`},
		"deep":                   {strings.Repeat(`{"env":`, 100) + "1" + strings.Repeat("}", 100), "nested more than 16"},
		"deep and never closed":  {strings.Repeat(`[`, 1<<16), "nested more than 16"},
	} {
		t.Run(name, func(t *testing.T) {
			err := proxy.DecodeJSON([]byte(tt.in), &apitype.SandboxRequest{})
			f := proxy.FaultOf(err)
			if f.Status != http.StatusBadRequest || f.Code != "malformed" || !strings.Contains(f.Detail, tt.detail) {
				t.Errorf("got %d %s %q, want 400 malformed with %q", f.Status, f.Code, f.Detail, tt.detail)
			}
		})
	}
}

func TestDecodeJSONInvalid(t *testing.T) {
	for in, field := range map[string]string{
		`{"image":5}`:                           "image",
		`{"cpus":"1"}`:                          "cpus",
		`{"cpus":1e999}`:                        "cpus",
		`{"memory_mb":1.5}`:                     "memory_mb",
		`{"memory_mb":99999999999999999999}`:    "memory_mb",
		`{"read_only_rootfs":1}`:                "read_only_rootfs",
		`{"env":[]}`:                            "env",
		`{"env":{"A":null}}`:                    "env.A",
		`{"env":{"A":1}}`:                       "env.A",
		`{"extra_mounts":{}}`:                   "extra_mounts",
		`{"extra_mounts":[null]}`:               "extra_mounts[0]",
		`{"extra_mounts":[{"host_path":null}]}`: "extra_mounts[0].host_path",
		`{"ttl":30.5}`:                          "ttl",
		`{"ttl":""}`:                            "ttl",
		`null`:                                  "",
		`[]`:                                    "",
		`"x"`:                                   "",
	} {
		err := proxy.DecodeJSON([]byte(in), &apitype.SandboxRequest{})
		var invalid *lifecycle.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%s: got %v, want a complaint about %q", in, err, field)
		}
	}
	for in, field := range map[string]string{
		`{"timeout":null}`:         "timeout",
		`{"timeout":""}`:           "timeout",
		`{"timeout":999.5}`:        "timeout",
		`{"command":null}`:         "command",
		`{"command":[1]}`:          "command",
		`{"stdin_base64":"%"}`:     "stdin_base64",
		`{"stdin_base64":[65,66]}`: "stdin_base64",
		`{"cwd":null}`:             "cwd",
	} {
		err := proxy.DecodeJSON([]byte(in), &apitype.ExecRequest{})
		var invalid *lifecycle.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%s: got %v, want a complaint about %q", in, err, field)
		}
	}
}

// Whatever is accepted must be what encoding/json makes of it, and must survive
// the way back.
func FuzzDecodeJSON(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"image":"a","env":{"A":"b"},"ttl":30.0}`, `{"extra_mounts":[{"host_path":"/a","mount_path":"/b"}]}`,
		`{"cpus":1,"cpus":2}`, `{"Image":"x"}`, `{"metadata":{"\ud800":"x"}}`, `{"idle_ttl":"1h","cpus":1e2}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var got, std, back apitype.SandboxRequest
		if proxy.DecodeJSON(in, &got) != nil {
			return
		}
		dec := json.NewDecoder(strings.NewReader(string(in)))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&std); err != nil {
			t.Fatalf("accepted %q, encoding/json says %v", in, err)
		}
		if diff := cmp.Diff(std, got); diff != "" {
			t.Fatalf("%q: %s", in, diff)
		}
		out, err := json.Marshal(got)
		must(t, err)
		if err := proxy.DecodeJSON(out, &back); err != nil {
			t.Fatalf("%q came out as %q: %v", in, out, err)
		}
	})
}

func TestDecodeNulls(t *testing.T) {
	type inner struct {
		A string `json:"A"`
		B int64  `json:"B"`
	}
	type whole struct {
		inner
		C    bool              `json:"C"`
		D    []inner           `json:"D"`
		E    map[string]string `json:"E"`
		Size [2]uint           `json:"Size"`
		F    *inner            `json:"F"`
		G    []*inner
		h    string //nolint:unused // no JSON sets it
	}
	decode := func(body string) (w whole, err error) {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		err = proxy.DecodeNulls(httptest.NewRecorder(), r, 1024, &w)
		return w, err
	}
	for in, want := range map[string]whole{
		`{}`: {},
		`{"A":null,"B":null,"C":null,"D":null,"E":null,"Size":null,"F":null}`: {},
		`{"A":"x","B":1,"D":[null,{"A":null}],"E":{"k":null},"F":{"B":null}}`: {inner: inner{A: "x", B: 1}, D: []inner{{}, {}}, E: map[string]string{"k": ""}, F: &inner{}},
		`{"Size":[1,2]}`:    {Size: [2]uint{1, 2}},
		`{"G":[{"A":"x"}]}`: {G: []*inner{{A: "x"}}}, // named by its Go name
	} {
		got, err := decode(in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(whole{})); diff != "" {
			t.Errorf("%s: %s", in, diff)
		}
	}
	for _, in := range []string{`null`, `[]`, ``, `{"inner":{}}`, `{"h":""}`, `{"g":[]}`, `{"G":[null]}`, `{"a":"x"}`, `{"A":"x","A":null}`, `{"F":{"b":1}}`, `{"C":1}`, `{} {}`, `{"A":"` + strings.Repeat("x", 1024) + `"}`} {
		if got, err := decode(in); err == nil {
			t.Errorf("%s was taken as %+v", in, got)
		}
	}
}

// TestNumbersOfDurations checks that a duration of Docker's types is a number of nanoseconds.
func TestNumbersOfDurations(t *testing.T) {
	var got struct{ Interval time.Duration }
	if err := proxy.DecodeJSON([]byte(`{"Interval":1500}`), &got); err != nil || got.Interval != 1500 {
		t.Errorf("%v, %v", got, err)
	}
	if err := proxy.DecodeJSON([]byte(`{"Interval":"1s"}`), &got); err == nil {
		t.Errorf("a text was taken: %v", got)
	}
}

// TestWriteJSON checks what answers have of empty fields: clients know it from encoding/json.
func TestWriteJSON(t *testing.T) {
	w := httptest.NewRecorder()
	must(t, proxy.WriteJSON(w, http.StatusOK, "application/json", struct {
		Recreated bool              `json:"recreated,omitempty"`
		Count     int               `json:"count,omitempty"`
		List      []string          `json:"list"`
		Labels    map[string]string `json:"labels"`
		Text      string            `json:"text"`
	}{Labels: map[string]string{"b": "", "a": ""}, Text: "<&>"}))
	if got, want := w.Body.String(), `{"list":null,"labels":{"a":"","b":""},"text":"\u003c\u0026\u003e"}`+"\n"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
