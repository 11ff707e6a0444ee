-- Workspaces, chats and their files. Texts are compared byte by byte. Keys begin with the
-- tenant, and so do references: no chat of one tenant is in a workspace of another.
CREATE TABLE workspaces (
    tenant       TEXT NOT NULL,
    workspace_id TEXT NOT NULL,
    user_id      TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    project      INTEGER NOT NULL UNIQUE CHECK (project BETWEEN 1 AND 4294967294),
    PRIMARY KEY (tenant, workspace_id),
    UNIQUE (tenant, user_id)
) WITHOUT ROWID;

CREATE TABLE chats (
    tenant       TEXT NOT NULL,
    chat_id      TEXT NOT NULL,
    workspace_id TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (tenant, chat_id),
    FOREIGN KEY (tenant, workspace_id) REFERENCES workspaces (tenant, workspace_id)
) WITHOUT ROWID;
CREATE INDEX chats_of_workspace ON chats (tenant, workspace_id, chat_id);

CREATE TABLE files (
    tenant       TEXT NOT NULL,
    chat_id      TEXT NOT NULL,
    name         TEXT NOT NULL,
    file_id      TEXT NOT NULL,
    content_type TEXT NOT NULL,
    size         INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,
    modified_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant, chat_id, name),
    UNIQUE (tenant, file_id),
    FOREIGN KEY (tenant, chat_id) REFERENCES chats (tenant, chat_id) ON DELETE CASCADE
) WITHOUT ROWID;

-- What was going to be put into a chat, with the records that were going to be files.
CREATE TABLE changes (
    change_id TEXT PRIMARY KEY NOT NULL,
    tenant    TEXT NOT NULL,
    chat_id   TEXT NOT NULL,
    FOREIGN KEY (tenant, chat_id) REFERENCES chats (tenant, chat_id) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX changes_of_chat ON changes (tenant, chat_id);

CREATE TABLE changed_files (
    change_id    TEXT NOT NULL REFERENCES changes (change_id) ON DELETE CASCADE,
    name         TEXT NOT NULL,
    file_id      TEXT NOT NULL,
    content_type TEXT NOT NULL,
    size         INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,
    modified_at  INTEGER NOT NULL,
    PRIMARY KEY (change_id, name)
) WITHOUT ROWID;
