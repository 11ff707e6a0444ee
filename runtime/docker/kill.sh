# Kills every process of one command and all their descendants. Arguments: the
# command's marker as it stands in the environment, its age in seconds, and "root"
# if the engine says that its first process is alive after all was killed. Ends with
# 0 when two looks in a row found none, 3 when some can't be killed, 4 when there may
# be some that can't be told from others. Plain POSIX, and nothing but builtins.
marker=$1 age=$2 mode=$3
hits= first= root=

# look PID: its state, parent, and start in ticks of 1/100 s since boot.
look() {
	read -r line 2>/dev/null <"/proc/$1/stat" || return 1
	set -- ${line##*) }
	state=$1 parent=$2
	shift 19
	born=$1
	case $state in [ZXx]) return 1 ;; esac
}

# environ PID WORD: whether the word is in its environment.
environ() {
	while read -r line || [ -n "$line" ]; do
		case $line in *"$2"*) return 0 ;; esac
	done 2>/dev/null <"/proc/$1/environ"
	return 1
}

# pass stops all that are new among the command's processes; found says if any were.
pass() {
	found=
	for p in /proc/[0-9]*; do
		p=${p#/proc/}
		case " 1 $$ $hits " in *" $p "*) continue ;; esac
		look "$p" || continue
		case " $hits " in *" $parent "*) ;; *)
			[ "$p" = "$root" ] || environ "$p" "$marker" || continue
		esac
		kill -STOP "$p" 2>/dev/null
		hits="$hits $p" found=1
		[ -n "$first" ] && [ "$first" -le "$born" ] || first=$born
	done
}

look $$ || exit 3
self=$born
since=$((born - age * 100 - 500))

# A first process that has changed its environment is told by what it is not: it has
# no parent in here, no marker, and isn't older than the command.
if [ "$mode" = root ]; then
	for p in /proc/[0-9]*; do
		p=${p#/proc/}
		case " 1 $$ " in *" $p "*) continue ;; esac
		look "$p" && [ "$parent" = 0 ] && [ "$born" -ge "$since" ] || continue
		environ "$p" BERM_EXEC_ID= && continue
		[ -z "$root" ] || exit 4
		root=$p
	done
fi

clean=0 rounds=0
while [ $clean -lt 2 ]; do
	hits= found=1
	while [ -n "$found" ]; do pass; done
	if [ -z "$hits" ]; then
		clean=$((clean + 1))
		continue
	fi
	clean=0 rounds=$((rounds + 1))
	[ $rounds -lt 500 ] || exit 3
	for p in $hits; do kill -KILL "$p" 2>/dev/null; done
done

# Orphans that hide where they come from, and began after the command did. The
# oldest child of init is none of them: it is the container's main process.
oldest=$self
for p in /proc/[0-9]*; do
	look "${p#/proc/}" && [ "$parent" = 1 ] && [ "$born" -lt "$oldest" ] && oldest=$born
done
for p in /proc/[0-9]*; do
	p=${p#/proc/}
	look "$p" && [ "$parent" = 1 ] && [ "$born" -gt "$oldest" ] && [ "$born" -ge "${first:-$since}" ] || continue
	environ "$p" BERM_EXEC_ID= && continue
	# It may be one that is just ending, and has let go of its environment.
	tries=0 seen=$born
	while look "$p" && [ "$born" = "$seen" ]; do
		tries=$((tries + 1))
		[ $tries -lt 2000 ] || exit 4
	done
done
exit 0
