package apitype

import "time"

// Workspace holds the chats of one user.
type Workspace struct {
	WorkspaceID string    `json:"workspace_id"` // UUID
	UserID      string    `json:"user_id"`
	CreatedAt   time.Time `json:"created_at"`
}

// WorkspaceUsage is how much of a workspace's quota is used.
type WorkspaceUsage struct {
	WorkspaceID string `json:"workspace_id"`
	UsedBytes   int64  `json:"used_bytes"`
	QuotaBytes  *int64 `json:"quota_bytes"` // nil: there is no quota
	Enforcement string `json:"enforcement"` // "hard" (the kernel's), "soft", or "none" without a quota
}

// ChatRequest names the workspace of a chat.
type ChatRequest struct {
	WorkspaceID string `json:"workspace_id"`
}

// Chat holds files that the sandbox of the same key mounts. They outlive the sandbox.
type Chat struct {
	ChatID      string    `json:"chat_id"`
	WorkspaceID string    `json:"workspace_id"`
	CreatedAt   time.Time `json:"created_at"`
}

// ChatList is one page of a workspace's chats, in the order of their IDs.
type ChatList struct {
	Chats      []Chat `json:"chats"`
	NextCursor string `json:"next_cursor,omitempty"` // empty on the last page
}

// ChatFile is a file of a chat, uploaded or written by its sandbox.
type ChatFile struct {
	FileID      string    `json:"file_id"` // UUID
	ChatID      string    `json:"chat_id"`
	Name        string    `json:"name"`
	ContentType *string   `json:"content_type"` // nil: not known
	SizeBytes   int64     `json:"size_bytes"`
	CreatedAt   time.Time `json:"created_at"`
	ModifiedAt  time.Time `json:"modified_at"`
}

// ChatFileList is one page of a chat's files, in the order of their names.
type ChatFileList struct {
	Files      []ChatFile `json:"files"`
	NextCursor string     `json:"next_cursor,omitempty"` // empty on the last page
	Truncated  bool       `json:"truncated"`             // the chat has more files than the server lists
}

// UploadedFiles are the files of one upload.
type UploadedFiles struct {
	Files []ChatFile `json:"files"`
}

// DeletedFiles is the number of deleted files.
type DeletedFiles struct {
	Deleted int `json:"deleted"`
}

// ChatHistory describes a chat's history, without its content.
type ChatHistory struct {
	SizeBytes  int64     `json:"size_bytes"`
	ModifiedAt time.Time `json:"modified_at"`
}

// FileURLRequest asks for a signed URL of one file of a chat.
type FileURLRequest struct {
	Name        string    `json:"name"`
	Method      string    `json:"method"`                 // "GET", which allows HEAD too, or "PUT"
	TTL         *Duration `json:"ttl,omitempty"`          // one second to seven days; nil is an hour
	ContentType *string   `json:"content_type,omitempty"` // with PUT: of the upload; nil is any
	MaxBytes    *int64    `json:"max_bytes,omitempty"`    // with PUT: of the upload; nil is the quota only
}

// FileURL is a signed URL. Anyone who has it can read or write one file of a chat without a
// token.
type FileURL struct {
	URL       string    `json:"url"`
	Path      string    `json:"path"` // of URL, for callers that know the server by another name
	Method    string    `json:"method"`
	ExpiresAt time.Time `json:"expires_at"`
}
