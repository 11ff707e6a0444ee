package apitype

import "time"

// Workspace is a user's, which holds the user's chats.
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

// ChatRequest says whose a chat is to be.
type ChatRequest struct {
	WorkspaceID string `json:"workspace_id"`
}

// Chat is content that the sandbox of the same key mounts, and that outlives it.
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

// ChatFile is an attachment of a chat, whoever wrote it.
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
	Truncated  bool       `json:"truncated"`             // the chat has more files than are ever listed
}

// UploadedFiles are those that one upload has brought.
type UploadedFiles struct {
	Files []ChatFile `json:"files"`
}

// DeletedFiles is how many were deleted.
type DeletedFiles struct {
	Deleted int `json:"deleted"`
}

// ChatHistory is what a chat's history is, without its content.
type ChatHistory struct {
	SizeBytes  int64     `json:"size_bytes"`
	ModifiedAt time.Time `json:"modified_at"`
}

// FileURLRequest asks for a signed URL of one file of a chat.
type FileURLRequest struct {
	Name        string    `json:"name"`
	Method      string    `json:"method"`                 // "GET", with which HEAD goes, or "PUT"
	TTL         *Duration `json:"ttl,omitempty"`          // one second to seven days; nil is an hour
	ContentType *string   `json:"content_type,omitempty"` // with PUT: what the upload must have; nil is any
	MaxBytes    *int64    `json:"max_bytes,omitempty"`    // with PUT: the most that the upload may have; nil is no limit but the quota
}

// FileURL lets whoever has it read or write one file of a chat, without a token.
type FileURL struct {
	URL       string    `json:"url"`
	Path      string    `json:"path"` // of URL: where the server is known by another name than it knows itself
	Method    string    `json:"method"`
	ExpiresAt time.Time `json:"expires_at"`
}
