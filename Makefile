# Everything that a developer or a machine does with this repository.
# `make help` lists the targets.

SHELL       := /bin/bash -euo pipefail
GO          ?= go
ENGINE      ?= docker
FUZZTIME    ?= 1m
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
REVISION    ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
IMAGE       ?= berm:$(VERSION)
CA_BUNDLE   ?= /etc/ssl/certs/ca-certificates.crt
GOLANGCI    := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOTESTSUM   := gotest.tools/gotestsum@v1.13.0
NFPM        := github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4
SOURCES     := cmd compose lifecycle policy proxy runtime
E2E         := cd cmd/e2e && # a module of its own, whose tests run bin/berm
LONG        := ^Test(Soak|Clients)
SHIPPED     := CGO_ENABLED=0 GOFLAGS='-trimpath -buildvcs=false' # as bin/berm is built, so that nothing is compiled twice
TEST        := BERM_REQUIRE=docker,containerd,compose,newer $(GO) run $(GOTESTSUM)

.DEFAULT_GOAL := help
.PHONY: help build agent run test soak newer clients attack test-unit lint check bench fuzz quota-vm release image image-files image-layout clean compiler crun compose curl libseccomp engines bin/berm-engine

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: agent ## build the one static binary, bin/berm
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X github.com/bermhq/berm/cmd/berm/config.Version=$(VERSION) -X github.com/bermhq/berm/cmd/berm/config.Revision=$(REVISION)' -o bin/berm ./cmd/berm

run: build bin/berm-engine ## keep a server and an engine up until Ctrl-C, and print how to call it
	@export BERM_TOKEN=$$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n'); \
	printf '\n  export BERM_URL=http://127.0.0.1:7070 BERM_TOKEN=%s\n  bin/berm sandbox create mine\n\n' $$BERM_TOKEN; \
	BERM_SECURITY_TOKENS=$$BERM_TOKEN BERM_ENGINE_KIND=$(ENGINE) BERM_STATE_DIR=$$PWD/bin/state bin/berm-engine --engine $(ENGINE) -- \
		sh -c 'BERM_SANDBOX_IMAGE=$$BERM_DEMO_IMAGE BERM_ENGINE_NAMESPACE=$${CONTAINERD_NAMESPACE:-} exec bin/berm serve --listen 127.0.0.1:7070'

test: compiler crun compose curl build engines ## run the tests, with the race detector, on private engines (installs them if need be)
	$(TEST) --format pkgname --format-hide-empty-pkg -- -race -count=1 -p 3 -timeout 30m -skip '$(LONG)' ./...
	export $(SHIPPED); $(E2E) $(TEST) --format pkgname -- -count=1 -parallel 4 -timeout 30m -skip '$(LONG)' ./...

soak: compiler libseccomp crun compose curl build engines ## run the long tests: storms, soaks, other runtimes, fuzzers, kernel quotas
	runtime/runtimetest/engine/newer.sh dockerd-28 dockerd-29 containerd-2 runc docker-cli buildx
	$(TEST) --format testname -- -race -count=1 -timeout 60m -run '^TestSoak' ./...
	$(E2E) $(TEST) --format testname -- -count=1 -timeout 60m -run '^TestSoak' ./...
	BERM_SOAK=1 $(GO) test -count=1 -run '^TestDockerfileOn20$$' ./proxy/engineapi
	BERM_SOAK=1 $(MAKE) --no-print-directory newer fuzz quota-vm # FuzzDockerfile asks the parser of 20.10, too

newer: compiler libseccomp agent engines ## build the newest engines (10 minutes), and run their contract and the attacks on them
	newer=$$(runtime/runtimetest/engine/newer.sh) && PATH=$$newer:$$PATH && $(TEST) --format testname -- -count=1 -timeout 60m \
		-run '^Test(Docker|Containerd|UserNS)Contract$$|^Test(UserNS|Attack|Build|Archive|Held|Hold|Swapped|Led|Exchanged|Restart|Forged)' ./proxy/engineapi ./runtime/agent ./runtime/docker ./runtime/containerd

clients: compiler libseccomp compose build engines ## run the clients that people have, straight and through Berm (an hour; builds newer ones)
	rm -f bin/clients.md
	runtime/runtimetest/engine/newer.sh dockerd-28 dockerd-29 containerd-2 runc docker-cli buildx compose-2 compose
	$(E2E) $(TEST) --format testname -- -count=1 -timeout 180m -parallel 4 -run '^TestClients' ./clients -table $(CURDIR)/bin/clients.md $(UPDATE); \
		result=$$?; cat $(CURDIR)/bin/clients.md; exit $$result

attack: build engines ## attack servers on private engines from inside their sandboxes
	$(E2E) $(TEST) --format testname -- -count=1 -timeout 30m -run '^Test(Soak)?Attack' .

test-unit: compiler agent ## run the tests that need no engine
	$(GO) test -race -count=1 -short -skip '$(LONG)' ./...

lint: agent ## check format, vet, golangci-lint, go.mod
	@unformatted=$$(gofmt -l $(SOURCES)); test -z "$$unformatted" || { echo "gofmt these: $$unformatted"; exit 1; }
	export $(SHIPPED); for module in . cmd/e2e; do (cd $$module && \
		$(GO) vet ./... && $(GO) run $(GOLANGCI) run ./... && $(GO) mod tidy -diff) || exit; done

check: test lint ## run what CI runs

bench: build ## measure on both engines, and against their own clients, in one run: medians, percentiles, ratios
	$(GO) test -run '^$$' -bench . -benchtime 30x -p 1 -timeout 60m ./...
	$(E2E) $(GO) test -run '^$$' -bench . -benchtime 30x -p 1 -timeout 60m ./...

fuzz: ## run every fuzzer for FUZZTIME (1m)
	@grep -rHo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' $(SOURCES) | while IFS=: read -r file func; do \
		echo "$$file $${func#func }"; \
		$(GO) test -run '^$$' -fuzz "^$${func#func }\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 5x "./$$(dirname "$$file")"; \
	done

quota-vm: build bin/berm-engine ## try project quotas, and a server with them, on ext4 and XFS in a virtual machine (installs QEMU, downloads Debian's kernel)
	@type qemu-system-x86_64 busybox /sbin/mkfs.xfs /sbin/mkfs.ext4 /sbin/depmod >/dev/null 2>&1 || { \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends qemu-system-x86 xfsprogs e2fsprogs busybox-static kmod; }
	bin/berm-engine --private --engine containerd -- true
	GO=$(GO) lifecycle/quota/project/vm.sh

image: image-files ## build the container image from bin/, without a network, and print its size
	docker build --quiet --tag $(IMAGE) --file compose/Dockerfile --target local --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$(REVISION) --build-arg CREATED=$$(date -u +%Y-%m-%dT%H:%M:%SZ) bin/image
	@docker image inspect --format '{{.Size}}' $(IMAGE) | awk '{ printf "$(IMAGE): %.1f MB\n", $$1 / 1e6 }'

image-files: build
	@$(MAKE) --no-print-directory image-layout

# What the image holds: rootfs is root's, owned is what Berm writes to. That has the
# user 65532 and the group 0, so that root needs no capability for it, either.
image-layout: BERM ?= bin/berm
image-layout: LAYOUT ?= bin/image
image-layout:
	@test -s $(CA_BUNDLE) || { echo '$(CA_BUNDLE) is missing: install ca-certificates, or name another with CA_BUNDLE='; exit 1; }
	rm -rf $(LAYOUT)
	install -d $(LAYOUT)/rootfs/etc/ssl/certs $(LAYOUT)/rootfs/var/lib $(LAYOUT)/rootfs/run
	install -d -m 1777 $(LAYOUT)/rootfs/tmp
	install -d -m 0770 $(LAYOUT)/owned/lib/berm $(LAYOUT)/owned/run/berm
	install -m 0755 $(BERM) $(LAYOUT)/rootfs/berm
	install -m 0644 compose/image/passwd compose/image/group $(LAYOUT)/rootfs/etc/
	install -m 0644 $(CA_BUNDLE) $(LAYOUT)/rootfs/etc/ssl/certs/ca-certificates.crt

# Archive and package hold the same tree. The package's unit does without the sockets of
# systemd, as the configurations of berm init name addresses.
release: export ARCH = $(shell $(GO) env GOARCH)
release: export DEB_VERSION = $(shell echo '$(VERSION)' | sed -E 's/^v//; /^[0-9]+\./!s/^/0~/; s/-(alpha|beta|rc)/~\1/; s/-/+/g')
release: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
release: build ## build the archive and the Debian package of this architecture, with their checksums, into bin/release
	rm -rf bin/release
	install -D -m 0755 -t bin/release/tree/bin bin/berm
	install -D -m 0644 -t bin/release/tree/share/doc/berm LICENSE README.md CHANGELOG.md docs/berm.yaml docs/policy.yaml
	install -D -m 0644 -t bin/release/tree/share/doc/berm/systemd docs/systemd/*
	cd bin/release/tree/share && $(CURDIR)/bin/berm man man/man1 && gzip -9n man/man1/* && \
		mkdir -p bash-completion/completions zsh/vendor-completions fish/vendor_completions.d && \
		$(CURDIR)/bin/berm completion bash >bash-completion/completions/berm && \
		$(CURDIR)/bin/berm completion zsh >zsh/vendor-completions/_berm && \
		$(CURDIR)/bin/berm completion fish >fish/vendor_completions.d/berm.fish
	sed -E -e '/^# Berm as a service/,/^$$/d' -e '/^(Requires|Also)=/d' -e 's/ berm\.socket berm-docker\.socket//' -e 's,/usr/local/bin,/usr/bin,' \
		docs/systemd/berm.service >bin/release/berm.service
	grep -q '^ExecStart=/usr/bin/berm ' bin/release/berm.service && ! grep -F .socket bin/release/berm.service
	cd bin/release && tar --transform 's,^tree,berm_$(VERSION),' --sort=name --mtime=@$$SOURCE_DATE_EPOCH --owner=0 --group=0 --numeric-owner -cz -f berm_$(VERSION)_linux_$(ARCH).tar.gz tree
	$(GO) run $(NFPM) package --config cmd/berm/package/nfpm.yaml --packager deb --target bin/release/
	cd bin/release && rm -rf tree berm.service && sha256sum berm_* | tee SHA256SUMS

clean: ## remove what was built
	rm -rf bin cmd/berm/serve/agent/berm-agent

agent:
	GO="$(GO)" cmd/berm-agent/build.sh cmd/berm/serve/agent/berm-agent
	mkdir -p bin
	cp cmd/berm/serve/agent/berm-agent bin/berm-agent

# A program of its own rather than go run, which takes Ctrl-C for itself.
bin/berm-engine:
	@CGO_ENABLED=0 $(GO) build -trimpath -o $@ ./cmd/berm-engine

# Installs the engines' programs if they are missing.
engines: bin/berm-engine
	bin/berm-engine --private -- true
	bin/berm-engine --private --engine containerd -- true

# The race detector links with the C compiler.
compiler:
	@command -v gcc >/dev/null && test -e /usr/include/stdlib.h || { \
		echo 'installing gcc and libc6-dev, which the race detector needs'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends gcc libc6-dev; }

# The containerd backend is tested with it, too.
libseccomp:
	@dpkg-query -W libseccomp-dev pkg-config >/dev/null 2>&1 || { \
		echo 'installing libseccomp-dev and pkg-config'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends libseccomp-dev pkg-config; }

crun:
	@command -v crun >/dev/null || { \
		echo 'installing crun'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends crun; }

compose:
	@command -v docker-compose >/dev/null || { \
		echo 'installing docker-compose, which is tested as a client'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends docker-compose; }

curl:
	@command -v curl >/dev/null || { \
		echo 'installing curl, which the documentation calls the API with'; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends curl; }
