package apitype

import "time"

// FileInfo describes a file in a sandbox. A name may not be UTF-8. Its text then has U+FFFD for
// invalid bytes, and the field in base64 has all bytes.
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

// FileList is the result of a list or a glob.
type FileList struct {
	Files     []FileInfo `json:"files"`
	Truncated bool       `json:"truncated"` // the limit was reached: there may be more
}

// FileMatch is a line that a search found.
type FileMatch struct {
	Path       string `json:"path"`
	PathBase64 []byte `json:"path_base64,omitempty"`
	Line       int    `json:"line"` // from 1
	Text       string `json:"text"` // of the line, at most 4 KiB; U+FFFD for invalid UTF-8
}

// FileMatches is the result of a search.
type FileMatches struct {
	Matches   []FileMatch `json:"matches"`
	Truncated bool        `json:"truncated"` // the limit was reached: there may be more
}

// FileEvent is an event of a watch.
type FileEvent struct {
	// Type is "create", "modify", "remove", "rename" or "attrib". The first is "ready": later
	// changes are seen. "overflow" means that events were lost. EventGoingDown is the last.
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
	Parents    bool   `json:"parents,omitempty"`     // as mkdir -p: create parents, and allow it to exist
}

// MoveRequest asks to move or copy a file or directory.
type MoveRequest struct {
	From       string `json:"from,omitempty"`
	FromBase64 []byte `json:"from_base64,omitempty"` // instead of From
	To         string `json:"to,omitempty"`
	ToBase64   []byte `json:"to_base64,omitempty"` // instead of To
	Replace    bool   `json:"replace,omitempty"`   // replace a file or an empty directory at To
}

// PortURLRequest asks for a signed URL of a port.
type PortURLRequest struct {
	Port int       `json:"port"`
	TTL  *Duration `json:"ttl,omitempty"` // one second to seven days; nil is an hour
}

// PortURL is a signed URL. Anyone who has it can use a port of a sandbox without a token.
type PortURL struct {
	URL       string    `json:"url"`
	Path      string    `json:"path"` // of URL, for callers that know the server by another name
	ExpiresAt time.Time `json:"expires_at"`
}
