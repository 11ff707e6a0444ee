module github.com/bermhq/berm/cmd/e2e

go 1.26.8

replace github.com/bermhq/berm => ../..

require github.com/bermhq/berm v0.0.0
