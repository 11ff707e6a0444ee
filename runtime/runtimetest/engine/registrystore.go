package engine

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// RegistryStore is the handler of a registry of images that keeps all in memory. It takes
// manifests of any kind, and checks nothing but digests. The zero value is empty, and any
// number of goroutines may use it.
type RegistryStore struct {
	mu        sync.Mutex
	blobs     map[string][]byte                    // by digest, of all repositories
	uploads   map[string][]byte                    // blobs that come in pieces
	manifests map[string]map[string]storedManifest // by repository, and by tag and digest
}

type storedManifest struct {
	mediaType string
	content   []byte
}

func (s *RegistryStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/v2/")
	repo, upload, isUpload := strings.Cut(path, "/blobs/uploads/")
	blobRepo, digest, isBlob := cutLast(path, "/blobs/")
	manifestRepo, ref, isManifest := cutLast(path, "/manifests/")
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch {
	case path == "" && reads:
	case isUpload && repo != "" && (upload == "") == (r.Method == http.MethodPost) && !reads:
		s.upload(w, r, repo, upload)
	case reads && strings.HasSuffix(path, "/tags/list"):
		s.tags(w, strings.TrimSuffix(path, "/tags/list"))
	case isBlob && reads:
		s.blob(w, r, blobRepo, digest)
	case isManifest && r.Method == http.MethodPut:
		s.putManifest(w, r, manifestRepo, ref)
	case isManifest && reads:
		s.manifest(w, r, manifestRepo, ref)
	case reads:
		http.NotFound(w, r)
	default:
		registryError(w, http.StatusMethodNotAllowed, "UNSUPPORTED", r.Method+" "+r.URL.Path)
	}
}

func cutLast(path, separator string) (before, after string, found bool) {
	if i := strings.LastIndex(path, separator); i > 0 {
		return path[:i], path[i+len(separator):], true
	}
	return "", "", false
}

func registryError(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json") // newer engines read an error of no other type
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `{"errors":[{"code":%q,"message":%q}]}`, code, message)
}

func digestOf(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// upload takes a blob, or a piece of one. The last one comes with the digest.
func (s *RegistryStore) upload(w http.ResponseWriter, r *http.Request, repo, id string) {
	piece, err := io.ReadAll(r.Body)
	want := r.URL.Query().Get("digest")
	s.mu.Lock()
	defer s.mu.Unlock()
	content := append(s.uploads[id], piece...)
	digest := digestOf(content)
	switch {
	case err != nil || want != "" && digest != want:
		registryError(w, http.StatusBadRequest, "DIGEST_INVALID", "the blob has the digest "+digest)
		return
	case want == "":
		if id == "" {
			id = rand.Text()
		}
		if s.uploads == nil {
			s.uploads = make(map[string][]byte)
		}
		s.uploads[id] = content
		w.Header().Set("Location", "/v2/"+repo+"/blobs/uploads/"+id)
		w.Header().Set("Range", fmt.Sprintf("0-%d", max(len(content), 1)-1))
		w.Header().Set("Docker-Upload-UUID", id)
		w.WriteHeader(http.StatusAccepted)
		return
	}
	if s.blobs == nil {
		s.blobs = make(map[string][]byte)
	}
	s.blobs[digest] = content
	delete(s.uploads, id)
	w.Header().Set("Location", "/v2/"+repo+"/blobs/"+digest)
	w.Header().Set("Docker-Content-Digest", digest)
	w.WriteHeader(http.StatusCreated)
}

func (s *RegistryStore) tags(w http.ResponseWriter, repo string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tags := []string{}
	for ref := range s.manifests[repo] {
		if !strings.Contains(ref, ":") {
			tags = append(tags, ref)
		}
	}
	if len(tags) == 0 {
		registryError(w, http.StatusNotFound, "NAME_UNKNOWN", "there is no repository "+repo)
		return
	}
	slices.Sort(tags)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"name": repo, "tags": tags})
}

func (s *RegistryStore) blob(w http.ResponseWriter, r *http.Request, repo, digest string) {
	s.mu.Lock()
	content, found := s.blobs[digest]
	s.mu.Unlock()
	if !found {
		registryError(w, http.StatusNotFound, "BLOB_UNKNOWN", repo+" has no blob "+digest)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Docker-Content-Digest", digest)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
}

func (s *RegistryStore) putManifest(w http.ResponseWriter, r *http.Request, repo, ref string) {
	content, err := io.ReadAll(r.Body)
	digest := digestOf(content)
	if err != nil || strings.Contains(ref, ":") && ref != digest {
		registryError(w, http.StatusBadRequest, "DIGEST_INVALID", "the manifest has the digest "+digest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.manifests == nil {
		s.manifests = make(map[string]map[string]storedManifest)
	}
	if s.manifests[repo] == nil {
		s.manifests[repo] = make(map[string]storedManifest)
	}
	m := storedManifest{r.Header.Get("Content-Type"), content}
	s.manifests[repo][ref], s.manifests[repo][digest] = m, m
	w.Header().Set("Docker-Content-Digest", digest)
	w.WriteHeader(http.StatusCreated)
}

func (s *RegistryStore) manifest(w http.ResponseWriter, r *http.Request, repo, ref string) {
	s.mu.Lock()
	known := s.manifests[repo] != nil
	m, found := s.manifests[repo][ref]
	s.mu.Unlock()
	switch {
	case !known:
		registryError(w, http.StatusNotFound, "NAME_UNKNOWN", "there is no repository "+repo)
	case !found:
		registryError(w, http.StatusNotFound, "MANIFEST_UNKNOWN", repo+" has no manifest "+ref)
	default:
		w.Header().Set("Content-Type", m.mediaType)
		w.Header().Set("Docker-Content-Digest", digestOf(m.content))
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(m.content))
	}
}
