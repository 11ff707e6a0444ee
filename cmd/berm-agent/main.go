// Command berm-agent is the init process of a sandbox, and executes Berm's operations there. On the
// host, it writes a sandbox's log, and is the first process of a sandbox's user namespace. Every
// sandbox runs it, so it is small, starts fast, and needs little but the kernel.
package main

import "os"

const exitUsage = 2

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	if len(args) > 0 {
		switch args[0] {
		case "init":
			return runInit(args[1:])
		case "serve":
			return runServe(args[1:])
		case "log", "max", "owner": // keys of a URI's query, which come in any order
			return runLog(args)
		case "kill":
			return runKill(args[1:])
		case "userns":
			return keepUserNS(args[1:])
		}
	}
	return complain("usage: berm-agent init|serve|kill|userns|log …", exitUsage)
}
