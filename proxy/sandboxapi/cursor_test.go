package sandboxapi

import "testing"

// Whatever is accepted is a key of some tenant, and comes out as it went in.
func FuzzCursor(f *testing.F) {
	f.Add(cursor{Tenant: "red", After: "k"}.String())
	f.Add("")
	f.Add("eyJ0IjoicmVkIiwiYSI6Ii4uL2sifQ")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := parseCursor(s)
		if err != nil {
			return
		}
		again, err := parseCursor(c.String())
		if err != nil || again != c {
			t.Errorf("%q: %+v came back as %+v, %v", s, c, again, err)
		}
	})
}
