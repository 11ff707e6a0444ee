package engineapi

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestLabelsAreHidden has an engine tell of objects with Berm's labels in every way.
func TestLabelsAreHidden(t *testing.T) {
	for _, show := range []bool{false, true} {
		t.Run(fmt.Sprint(show), func(t *testing.T) {
			d, s, address := scripted(t, "1.51", fmt.Sprintf(basePolicy+"profiles: {default: {engine_api: {show_labels: %t}}}\n", show))
			labels := func(kind lifecycle.ObjectKind) string {
				return d.sealed(kind, "mine", "own", "1", "berm.ttl", "8h", "Berm.x", "y")
			}
			ct, n, v, img := labels(lifecycle.ObjectContainer), labels(lifecycle.ObjectNetwork), labels(lifecycle.ObjectVolume), labels(lifecycle.ObjectImage)
			volume := fmt.Sprintf(`{"Name":"v","Driver":"local","Labels":%s}`, v)
			network := fmt.Sprintf(`{"Id":%q,"Name":"n","Driver":"bridge","Labels":%s}`, mineID, n)
			image := fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":["x:1"],"Labels":%s,"Config":{"Labels":%s}}`, mineID, img, img)
			list := fmt.Sprintf(`[{"Id":%q,"Labels":%s}]`, mineID, ct)
			s.answers["GET /containers/json"] = list
			s.answers["GET /containers/"+mineID+"/json"] = fmt.Sprintf(`{"Id":%q,"Name":"/n","State":{},"HostConfig":{},"Config":{"Labels":%s},"NetworkSettings":{}}`, mineID, ct)
			s.answers["GET /networks"], s.answers["GET /networks/"+mineID] = "["+network+"]", network
			s.answers["GET /volumes"], s.answers["GET /volumes/v"], s.answers["POST /volumes/create"] = `{"Volumes":[`+volume+`]}`, volume, volume
			s.answers["GET /images/json"], s.answers["GET /images/x:1/json"], s.answers["GET /images/sha256:"+mineID+"/json"] = "["+image+"]", image, image
			s.answers["GET /system/df"] = `{"Images":[` + strings.Split(image, `,"Config"`)[0] + `}],"Containers":` + list + `,"Volumes":[` + volume + `]}`
			s.answers["GET /events"] = fmt.Sprintf(`{"Type":"container","Action":"start","Actor":{"ID":%q,"Attributes":%s},"time":1}`+"\n", mineID, ct)
			for _, call := range []string{
				"GET /containers/json", "GET /containers/" + mineID + "/json", "GET /networks", "GET /networks/" + mineID, "GET /volumes", "GET /volumes/v",
				"POST /volumes/create", "GET /images/json", "GET /images/x:1/json", "GET /v1.41/images/x:1/json", "GET /system/df", "GET /events",
			} {
				method, path, _ := strings.Cut(call, " ")
				status, told := say(t, address, method, path, map[string]string{"POST": `{"Name":"v"}`}[method])
				hidden := strings.Count(strings.ToLower(told), `"berm.`) - strings.Count(told, `"berm.ttl"`)
				if status >= 300 || !strings.Contains(told, `"own":"1"`) || !strings.Contains(told, `"berm.ttl":"8h"`) || hidden > 0 != show {
					t.Errorf("%s: %d %s", call, status, told)
				}
			}
			filter := url.QueryEscape(`{"label":["berm.tenant","a","berm.ttl=8h"]}`)
			for _, path := range []string{"/containers/json", "/networks", "/volumes", "/events"} {
				s.forget()
				_, _ = say(t, address, "GET", path+"?filters="+filter, "")
				asked := check.Value(url.QueryUnescape(s.said("GET " + path)[len(s.said("GET "+path))-1]))(t)
				if strings.Contains(asked, `"berm.tenant":true`) != show || strings.Contains(asked, `"berm.none"`) == show || !strings.Contains(asked, `"berm.ttl=8h"`) {
					t.Errorf("%s: the engine was asked %s", path, asked)
				}
			}
			s.answers["POST /volumes/prune"] = "{}"
			_, _ = say(t, address, "POST", "/volumes/prune?filters="+url.QueryEscape(`{"label!":["berm.tenant","a"]}`), "")
			asked := check.Value(url.QueryUnescape(strings.Join(s.said("POST /volumes/prune"), " ")))(t)
			if strings.Contains(asked, `"berm.tenant":true`) != show || !strings.Contains(asked, `"label!":{"a":true`) {
				t.Errorf("prune: the engine was asked %s", asked)
			}
		})
	}
}

// TestCopiedLabels has a client make an object with the labels of another, as those do that
// make a container again.
func TestCopiedLabels(t *testing.T) {
	for _, show := range []bool{false, true} {
		d, s, address := scripted(t, "1.41", fmt.Sprintf(basePolicy+"profiles: {default: {engine_api: {show_labels: %t}}}\n", show))
		s.answers["GET /volumes"] = `{"Volumes":[]}`
		copied := d.labels(lifecycle.ObjectVolume, "theirs", "own", "1", "berm.ttl", "1h")
		body := string(check.Value(json.Marshal(map[string]any{"Name": "again", "Labels": copied}))(t))
		status, told := say(t, address, "POST", "/volumes/create", body)
		asked := strings.Join(s.said("POST"), " ")
		switch {
		case !show && (status != 403 || !strings.Contains(told, "labels.reserved") || asked != ""):
			t.Errorf("hidden: %d %s, the engine was asked %q", status, told, asked)
		case show && (!strings.Contains(asked, `"berm.tenant":"mine"`) || strings.Contains(asked, "theirs") || strings.Contains(asked, copied[lifecycle.LabelSeal]) || !strings.Contains(asked, `"own":"1"`)):
			t.Errorf("shown: %d %s, the engine was asked %q", status, told, asked)
		}
		other := strings.Replace(body, `"berm.tenant"`, `"Berm.tenant"`, 1)
		if status, told := say(t, address, "POST", "/volumes/create", other); status != 403 || !strings.Contains(told, "labels.reserved") {
			t.Errorf("in another case: %d %s", status, told)
		}
	}
}
