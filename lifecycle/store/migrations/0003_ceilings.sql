-- The projects of sandboxes' own workspaces. No number is ever given out again. They follow
-- those of workspaces, which would need 16,777,216 to come here.
CREATE TABLE ceilings (
    project    INTEGER PRIMARY KEY AUTOINCREMENT CHECK (project BETWEEN 1 AND 4294967294),
    session_id TEXT NOT NULL,
    dir        TEXT NOT NULL UNIQUE
);
INSERT INTO sqlite_sequence (name, seq) VALUES ('ceilings', 1660944383); -- 0x63000000 is the first
