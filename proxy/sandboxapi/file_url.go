package sandboxapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const (
	filePrefix  = "/f/"
	signedFiles = filePrefix + "{signature}"
	filePurpose = "berm signed file url 1"
)

// fileClaim is what a signed URL of a file allows: to read it, or to write it, until a
// time.
type fileClaim struct {
	Tenant      string `json:"t"`
	Chat        string `json:"c"`
	Made        int64  `json:"m"` // when the chat was made, in ns since 1970; a later chat of that ID doesn't match
	Name        string `json:"n"`
	Put         bool   `json:"p,omitempty"`
	ContentType string `json:"k,omitempty"` // which the upload must have; empty is any
	MaxBytes    int64  `json:"b,omitempty"` // of the upload; 0 is no limit
	Expires     int64  `json:"e"`           // seconds since 1970
}

// signFileURL makes a URL for a file that needs no token.
func (a *api) signFileURL(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	found, err := a.Chats.Get(r.Context(), tenant, chatID)
	if err != nil {
		return err
	}
	var body apitype.FileURLRequest
	if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
		return err
	}
	c := fileClaim{Tenant: tenant, Chat: chatID, Name: body.Name}
	if err := c.allow(r, body); err != nil {
		return err
	}
	expires, err := expiry(body.TTL)
	if err != nil {
		return err
	}
	var missing *chat.FileNotFoundError // the file needn't exist yet, but its name must be valid
	if _, err := a.Chats.FileNamed(r.Context(), tenant, chatID, body.Name); err != nil && !errors.As(err, &missing) {
		return err
	}
	c.Made, c.Expires = found.CreatedAt.UnixNano(), expires.Unix()
	signature, err := a.signer.sign(filePurpose, c)
	if err != nil {
		return err
	}
	path := filePrefix + signature
	return reply(w, http.StatusCreated, apitype.FileURL{
		URL: absolute(r, path), Path: path, Method: body.Method, ExpiresAt: expires,
	}, nil)
}

// allow sets the claim's method and bounds from body, if the caller may do that.
func (c *fileClaim) allow(r *http.Request, body apitype.FileURLRequest) (err error) {
	switch body.Method {
	case http.MethodGet:
		if body.ContentType != nil || body.MaxBytes != nil {
			return &lifecycle.InvalidError{Field: "method", Message: "must be PUT for content_type and max_bytes"}
		}
		return nil
	case http.MethodPut:
	default:
		return &lifecycle.InvalidError{Field: "method", Message: "must be GET or PUT"}
	}
	c.Put = true
	if body.MaxBytes != nil {
		if c.MaxBytes = *body.MaxBytes; c.MaxBytes < 1 {
			return &lifecycle.InvalidError{Field: "max_bytes", Message: "must be at least 1"}
		}
	}
	if body.ContentType != nil {
		if c.ContentType, err = contentType(*body.ContentType); err != nil {
			return err
		}
	}
	return proxy.Require(r, proxy.ScopeStorageWrite)
}

// methods lists the methods that the claim allows, as in an Allow header.
func (c *fileClaim) methods() string {
	if c.Put {
		return http.MethodPut
	}
	return http.MethodGet + ", " + http.MethodHead
}

// fileClaim returns the claim of the request's URL. It sets the headers that let pages of any
// origin read the answer.
func (a *api) fileClaim(w http.ResponseWriter, r *http.Request) (c fileClaim, err error) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "*")
	h.Set("Referrer-Policy", "no-referrer") // the URL itself is the credential
	if err := a.signer.opened(r, filePurpose, &c); err != nil {
		return c, err
	}
	ex := proxy.ExchangeOf(r.Context())
	ex.Caller.Tenant, ex.Key = c.Tenant, c.Chat
	if time.Now().Unix() >= c.Expires {
		return c, expiredFileURL(nil)
	}
	return c, knownQuery(r)
}

func expiredFileURL(cause error) error { return expiredURL("chat", cause) }

// usable fails if the claim is for another method, or its chat is gone.
func (a *api) usable(ctx context.Context, c fileClaim, put bool) error {
	if c.Put != put {
		return &proxy.Fault{Status: http.StatusForbidden, Code: "url_invalid", Title: "Invalid address",
			Detail: "this address is for " + c.methods() + " only"}
	}
	found, err := a.Chats.Get(ctx, c.Tenant, c.Chat)
	if _, missing := errors.AsType[*chat.NotFoundError](err); missing || err == nil && found.CreatedAt.UnixNano() != c.Made {
		return expiredFileURL(nil)
	}
	return err
}

// readSignedFile sends the file that the signed URL names.
func (a *api) readSignedFile(w http.ResponseWriter, r *http.Request) error {
	c, err := a.fileClaim(w, r)
	if err != nil {
		return err
	}
	file, err := a.Chats.Content(r.Context(), c.Tenant, c.Chat, c.Name)
	// After the file is open: it could be a file of a new chat with the same ID.
	if gone := a.usable(r.Context(), c, false); gone != nil {
		if err == nil {
			_ = file.Close()
		}
		return gone
	}
	return sendContent(w, r, file, err)
}

// writeSignedFile writes the file that the signed URL names.
func (a *api) writeSignedFile(w http.ResponseWriter, r *http.Request, body *upload) error {
	c, err := a.fileClaim(w, r)
	if err != nil {
		return err
	}
	if err := a.usable(r.Context(), c, true); err != nil {
		return err
	}
	f, err := chatFilePut(r, c.Name)
	if err != nil {
		return err
	}
	if c.ContentType != "" && !strings.EqualFold(f.ContentType, c.ContentType) {
		return proxy.UnsupportedMedia("this address takes a Content-Type of " + c.ContentType + " only")
	}
	body.until = time.Unix(c.Expires, 0)
	ctx, cancel := context.WithDeadline(r.Context(), body.until)
	defer cancel()
	// Put finds its chat before the first read, so this check is about the chat that takes the file.
	content := io.Reader(&lastLook{body, func() error { return a.usable(ctx, c, true) }})
	if c.MaxBytes > 0 {
		if f.Size > c.MaxBytes {
			return &http.MaxBytesError{Limit: c.MaxBytes}
		}
		content = http.MaxBytesReader(w, io.NopCloser(content), c.MaxBytes)
	}
	f.Size = -1 // reserves room only for bytes that have come
	err = a.putChatFile(w, r.WithContext(ctx), c.Tenant, c.Chat, f, content)
	var full *quota.FullError
	switch {
	case err != nil && ctx.Err() != nil && r.Context().Err() == nil:
		return expiredFileURL(err)
	case errors.As(err, &full): // the error's numbers of the workspace aren't for anyone who has the URL
		out := proxy.FaultOf(err)
		out.Detail = "there is no room for this"
		return &out
	}
	return err
}

// lastLook is a body that calls look before the first read, and fails if look does.
type lastLook struct {
	io.Reader
	look func() error
}

func (l *lastLook) Read(b []byte) (int, error) {
	if l.look != nil {
		if err := l.look(); err != nil {
			return 0, err
		}
		l.look = nil
	}
	return l.Reader.Read(b)
}

// askSignedFile answers a CORS preflight.
func (a *api) askSignedFile(w http.ResponseWriter, r *http.Request) error {
	c, err := a.fileClaim(w, r)
	if err != nil {
		return err
	}
	w.Header().Set("Access-Control-Allow-Methods", c.methods())
	w.Header().Set("Access-Control-Allow-Headers", "Content-Type, If-None-Match, Range, X-Request-Id")
	w.WriteHeader(http.StatusNoContent)
	return nil
}
