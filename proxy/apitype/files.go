package apitype

import "time"

// FileInfo is what a file in a sandbox is. Names are bytes: where they aren't UTF-8,
// the text has U+FFFD for what isn't, and the field in base64 is there beside it.
type FileInfo struct {
	Path         string    `json:"path"` // absolute
	PathBase64   []byte    `json:"path_base64,omitempty"`
	Type         string    `json:"type"` // "file", "directory", "symlink", "fifo", "socket" or "device"
	Size         int64     `json:"size"` // bytes
	Mode         string    `json:"mode"` // permissions in octal, "0644"
	ModifiedAt   time.Time `json:"modified_at"`
	UID          int       `json:"uid"`
	GID          int       `json:"gid"`
	Target       string    `json:"target,omitempty"` // of a symbolic link, in lists only
	TargetBase64 []byte    `json:"target_base64,omitempty"`
}

// FileList is what a list or a glob found.
type FileList struct {
	Files     []FileInfo `json:"files"`
	Truncated bool       `json:"truncated"` // the limit was reached: there may be more
}

// FileMatch is a line that a search found.
type FileMatch struct {
	Path       string `json:"path"`
	PathBase64 []byte `json:"path_base64,omitempty"`
	Line       int    `json:"line"` // from 1
	Text       string `json:"text"` // of the line, at most 4 KiB; what isn't UTF-8 is U+FFFD
}

// FileMatches is what a search found.
type FileMatches struct {
	Matches   []FileMatch `json:"matches"`
	Truncated bool        `json:"truncated"` // the limit was reached: there may be more
}

// FileEvent is a change that a watch tells of.
type FileEvent struct {
	// Type is "ready", the first, from when on changes are seen; "create", "modify",
	// "remove", "rename" or "attrib"; "overflow": some were lost; or EventGoingDown, the last.
	Type       string `json:"type"`
	Path       string `json:"path,omitempty"`
	PathBase64 []byte `json:"path_base64,omitempty"`
	Dir        bool   `json:"dir,omitempty"`
}

// MkdirRequest asks for a directory.
type MkdirRequest struct {
	Path       string `json:"path,omitempty"`
	PathBase64 []byte `json:"path_base64,omitempty"` // instead of Path
	Mode       string `json:"mode,omitempty"`        // octal; empty is 0755
	Parents    bool   `json:"parents,omitempty"`     // also those above it; it may be there then
}

// MoveRequest is what to move or copy, and where to.
type MoveRequest struct {
	From       string `json:"from,omitempty"`
	FromBase64 []byte `json:"from_base64,omitempty"` // instead of From
	To         string `json:"to,omitempty"`
	ToBase64   []byte `json:"to_base64,omitempty"` // instead of To
	Replace    bool   `json:"replace,omitempty"`   // what is there, but for a directory that isn't empty
}

// PortURLRequest asks for a signed URL of a port.
type PortURLRequest struct {
	Port int       `json:"port"`
	TTL  *Duration `json:"ttl,omitempty"` // one second to seven days; nil is an hour
}

// PortURL lets whoever has it use a port of a sandbox, without a token.
type PortURL struct {
	URL       string    `json:"url"`
	Path      string    `json:"path"` // of URL: where the server is known by another name than it knows itself
	ExpiresAt time.Time `json:"expires_at"`
}
