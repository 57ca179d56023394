#!/bin/bash
# inject NUMBER FAULT BEFORE AFTER LATER EVERY SETTLE
#
# Keeps a snapshot, lets the fault strike BEFORE seconds later, and lives on for AFTER seconds. Then it keeps
# LATER more snapshots, and lives EVERY seconds after each. At last it looks at its sums, and goes back on
# command. A life that was put back lives on for SETTLE seconds before it looks. Each life reports on the
# console, since the host cannot ask meanwhile:
#
#	campaign NUMBER: kept
#	campaign NUMBER: complaint WORDS		the first line of the kernel's
#	campaign NUMBER: alive COMPLAINTS SUMS		the fault has not ended this life
#	campaign NUMBER: back COMPLAINTS SUMS REPORT	the life after a rollback
#	campaign NUMBER: refused WORDS			no snapshot can be kept, or the way back is refused
#	campaign NUMBER: not-injected WORDS		no fault
number=$1 fault=$2 before=$3 after=$4 later=$5 every=$6 settle=$7

say() {
	echo "<3>campaign $number: $*" > /dev/kmsg
}

life() {
	complaints=$(bash /run/campaign/complaints)
	[ -z "$complaints" ] || say "complaint $(head -n 1 <<< "$complaints")"
	echo "$1 $(grep -c . <<< "$complaints") $(timeout 60 bash /run/campaign/check 2>&1 | tr '\n' ' ')"
}

keep() {
	mercury snapshot --drop > /dev/null 2>&1
	mercury snapshot --json > /run/campaign/said 2>&1
	said=$(tr -s ' \n' ' ' < /run/campaign/said)
	case $said in
	*'"kept"'*) return ;;
	*'"rolled-back"'*)
		sleep "$settle"
		say "$(life back) $said"
		;;
	*) say "refused $said" ;;
	esac
	exit
}

# The answer to the host's order is on its way.
sleep 0.5
keep
say kept
sleep "$before"
(eval "$fault" || say "not-injected by the command") > /dev/null 2>&1 &
sleep "$after"
if [ "$(< /sys/module/mercury_test/parameters/pending)" = Y ]; then
	say "not-injected in this time"
	exit
fi
while [ $((later--)) -gt 0 ]; do
	keep
	sleep "$every"
done
say "$(life alive)"
say "refused $(mercury rollback 2>&1)"
