#!/bin/bash
# Prints "right" if all sums are right and the computation goes on, or else "wrong" and what is wrong.
cd /run/campaign
wrong=$(cat ./*.wrong 2> /dev/null)
[ "$(cat $(< files) | sha256sum)" = "$(< base)" ] || wrong+=" files"
mercury-workload --seconds 0.1 compute > /dev/null 2>&1 || wrong+=" computation"
before=$(< rounds)
for _ in $(seq 200); do
	[ "$(< rounds)" = "$before" ] || break
	sleep 0.1
done
[ "$(< rounds)" != "$before" ] || wrong+=" the computation stands still"
bash ./check-load || wrong+=" the load"
echo "${wrong:+wrong: }${wrong:-right}"
