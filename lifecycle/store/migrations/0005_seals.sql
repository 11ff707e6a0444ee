-- The seals of objects that were made by a version without seals. The row 'open' stands until
-- they have been looked for.
CREATE TABLE seals (seal TEXT PRIMARY KEY) WITHOUT ROWID;
INSERT INTO seals (seal) VALUES ('open');
